"""The gated delta rule over a forest of fragments, as stages that a layer interleaves with its exchange.

Forward: `chunk_stages`, `exit_summary`, (states move), `outputs`. Backward: `chunk_stages`, `backward_stages`,
`entry_cotangents`, (gradients of states move), `input_gradients`. States, summaries and their gradients are in the
accumulation dtype: float32, or float64 for float64. The reference module states equations and shapes.

Two backends: `reference` on `ChunkTables` and `triton` on `ChainTables`; the tables say which one computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from cp_engine.kernels.gdn import reference, triton
from cp_engine.kernels.gdn.chunks import ChunkTables, chunk_tables
from cp_engine.kernels.gdn.reference import Inputs
from cp_engine.kernels.gdn.state_pass import BackwardStage, Stage
from cp_engine.kernels.gdn.triton import ChainTables, chain_tables

__all__ = [
    "BACKENDS",
    "ChainTables",
    "ChunkTables",
    "Inputs",
    "backward_stages",
    "chain_tables",
    "choose",
    "chunk_stages",
    "chunk_tables",
    "entry_cotangents",
    "exit_summary",
    "input_gradients",
    "kept_tensors",
    "outputs",
]

BACKENDS = ("auto", "reference", "triton")
_LOG = logging.getLogger(__name__)


class _Pulled(NamedTuple):
    """What the Triton backward needs besides its `Stages`."""

    dout: torch.Tensor  # [n, H, V]
    dv_local: torch.Tensor  # [n, H, V]
    begun: triton.Begun | None = None


def choose(backend: str, k: torch.Tensor, v: torch.Tensor) -> str:
    """``reference`` or ``triton`` for rows like k [., Hk, K] and v [., H, V].

    Raises:
        ValueError: for an unknown backend, and for ``triton`` where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"gdn backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "reference":
        return backend
    if backend == "auto" and (v.device.type != "cuda" or v.dtype in (torch.float64, torch.float32)):
        # float32 is for proofs: some of fla's products are in tf32.
        return "reference"
    reason = triton.why_not(k, v)
    if backend == "triton" and reason is not None:
        raise ValueError(f"gdn backend triton {reason}")
    name = "triton" if reason is None else "reference"
    _log_once(name, str(v.dtype), k.shape[2], v.shape[2], reason)
    return name


@cache
def _log_once(name: str, dtype: str, key_dim: int, value_dim: int, reason: str | None) -> None:
    told = f"; triton {reason}" if reason else ""
    _LOG.info("gated delta rule, %s, head sizes %d and %d: backend %s%s", dtype, key_dim, value_dim, name, told)


def chunk_stages(
    inputs: Inputs, tables: ChunkTables | ChainTables, kept: tuple[torch.Tensor, ...] = ()
) -> list[Stage] | triton.Stages:
    """The tree-independent half of the forward, once over all chunks; in the backward from what it `kept_tensors`."""
    if isinstance(tables, ChainTables):
        return triton.chunk_stages(inputs, tables, kept)
    return reference.chunk_stages(inputs, tables)


def kept_tensors(stages) -> tuple[torch.Tensor, ...]:
    """What of the stages is worth keeping until the backward; the rest it computes again."""
    return triton.kept_tensors(stages) if isinstance(stages, triton.Stages) else ()


def exit_summary(inputs: Inputs, stages, tables: ChunkTables | ChainTables) -> tuple[torch.Tensor, torch.Tensor]:
    """B [X, H, K, V] of every exit and A [XA, H, K, K] of the exits below an entry."""
    backend = triton if isinstance(tables, ChainTables) else reference
    return backend.exit_summary(inputs, stages, tables)


def outputs(
    inputs: Inputs, stages, entry_states: Callable[[], torch.Tensor], tables: ChunkTables | ChainTables
) -> torch.Tensor:
    """o [n, H, V]; rows outside fragments are zero.

    Args:
        entry_states: gives the states [Y, H, K, V] at the entries; called as late as the backend can.
    """
    if isinstance(tables, ChainTables):
        return triton.outputs(inputs, stages, entry_states, tables)
    return reference.outputs(inputs, stages, entry_states(), tables)


def backward_stages(
    inputs: Inputs, stages, dout: torch.Tensor, tables: ChunkTables | ChainTables
) -> list[BackwardStage] | _Pulled:
    """The tree-independent half of the backward before the reverse state pass; ``dout`` [n, H, V]."""
    if isinstance(tables, ChainTables):
        return _Pulled(dout, triton.backward_stages(inputs, stages, dout, tables))
    return reference.backward_stages(inputs, dout, tables)


def entry_cotangents(
    inputs: Inputs, stages, backward, entry_states: torch.Tensor, tables: ChunkTables | ChainTables
) -> tuple[torch.Tensor, object]:
    """Gradients of the entry states [Y, H, K, V] when the gradients of all exit states are zero.

    Args:
        entry_states: [Y, H, K, V]; the backend may compute states meanwhile.

    Returns:
        These, and what `input_gradients` takes in the place of ``backward``: with what is computed already.
    """
    if isinstance(tables, ChainTables):
        dentry, begun = triton.entry_cotangents(inputs, stages, backward.dout, backward.dv_local, entry_states, tables)
        return dentry, backward._replace(begun=begun)
    return reference.entry_cotangents(inputs, stages, backward, tables), backward


def input_gradients(
    inputs: Inputs,
    stages,
    backward,
    entry_states: torch.Tensor,
    dexit: Callable[[], torch.Tensor],
    tables: ChunkTables | ChainTables,
) -> Inputs:
    """Gradients of the inputs.

    Args:
        backward: of `entry_cotangents`, or of `backward_stages` where no entry has to be told.
        entry_states: [Y, H, K, V].
        dexit: gives the gradients of the exit states [X, H, K, V]; called as late as the backend can.
    """
    if isinstance(tables, ChainTables):
        return triton.input_gradients(inputs, stages, *backward, entry_states, dexit, tables)
    return reference.input_gradients(inputs, stages, backward, entry_states, dexit(), tables)
