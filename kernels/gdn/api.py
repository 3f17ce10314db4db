"""The gated delta rule over a forest of fragments, as stages that a layer interleaves with its exchange.

Forward: `chunk_stages`, then `forward`. Backward: `chunk_stages`, `backward_stages`, then `backward`. Both walk the
trees turn by turn: those of turn 0 stand below no entry, those of turn t wait for the states of round t - 1. Where
affine maps are folded instead, all entries arrive at once: `exit_summary` comes before that in the forward, and
`begin_backward` before gradients cross ranks. States, summaries and their gradients are in the accumulation dtype:
float32, or float64 for float64. The reference module states equations and shapes.

Two backends: `reference` on `ChunkTables` and `triton` on `ChainTables`; the tables say which one computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

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
    "backward",
    "backward_stages",
    "begin_backward",
    "chain_tables",
    "choose",
    "chunk_stages",
    "chunk_tables",
    "exit_summary",
    "forward",
    "kept_tensors",
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


class Forward(Protocol):
    """The rest of the forward. Turns must run in their order."""

    def leaving(self, turn: int, entry_states: torch.Tensor | None) -> torch.Tensor:
        """States of all exits [X, H, K, V], of which those of this turn are right.

        Args:
            entry_states: [Y, H, K, V], those of this turn among them; may be None for turn 0.
        """

    def run(self, turn: int, entry_states: torch.Tensor | None) -> None:
        """What `leaving` has left to do of a turn: all, if it was not called."""

    def outputs(self) -> torch.Tensor:
        """o [n, H, V] when all turns have run; rows outside fragments are zero."""


class Backward(Protocol):
    """The rest of the backward. Turns must run from the last one to the first."""

    def entering(self, turn: int, dexit: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        """Gradients of the entry states [Y, H, K, V], of which those of this turn are right.

        Args:
            dexit: gives the gradients of the exit states [X, H, K, V], those of this turn among them; None where it has
                none. Called as late as the backend can.
        """

    def gradients(self, dexit: Callable[[], torch.Tensor | None]) -> Inputs:
        """Of the inputs, with the turns that `entering` was not asked for."""


def forward(inputs: Inputs, stages, tables: ChunkTables | ChainTables) -> Forward:
    if isinstance(tables, ChainTables):
        return triton.forward(inputs, stages, tables)
    return reference.Forward(inputs, stages, tables)


def backward_stages(
    inputs: Inputs, stages, dout: torch.Tensor, tables: ChunkTables | ChainTables
) -> list[BackwardStage] | _Pulled:
    """The tree-independent half of the backward before the reverse state pass; ``dout`` [n, H, V]."""
    if isinstance(tables, ChainTables):
        return _Pulled(dout, triton.backward_stages(inputs, stages, dout, tables))
    return reference.backward_stages(inputs, dout, tables)


def begin_backward(
    inputs: Inputs, stages, pulled, entry_states: torch.Tensor, tables: ChunkTables | ChainTables
) -> tuple[torch.Tensor, object]:
    """Gradients of the entry states [Y, H, K, V] when the gradients of all exit states are zero.

    Args:
        pulled: of `backward_stages`.
        entry_states: [Y, H, K, V]; the backend may compute states meanwhile.

    Returns:
        These, and what `backward` takes in the place of ``pulled``: with what is computed already.
    """
    if isinstance(tables, ChainTables):
        dentry, begun = triton.begin_backward(inputs, stages, pulled.dout, pulled.dv_local, entry_states, tables)
        return dentry, pulled._replace(begun=begun)
    return reference.entry_cotangents(inputs, stages, pulled, tables), pulled


def backward(inputs: Inputs, stages, pulled, entry_states: torch.Tensor, tables: ChunkTables | ChainTables) -> Backward:
    """
    Args:
        pulled: of `backward_stages` or of `begin_backward`.
        entry_states: [Y, H, K, V].
    """
    if isinstance(tables, ChainTables):
        return triton.backward(inputs, stages, pulled.dout, pulled.dv_local, entry_states, tables, pulled.begun)
    return reference.Backward(inputs, stages, pulled, entry_states, tables)
