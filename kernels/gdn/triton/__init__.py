"""The Triton backend of the gated delta rule: our kernels, and fla's for the solve and for w and u.

The stages of `cp_engine.kernels.gdn.api` on `ChainTables`, for float32, bfloat16 and float16 rows; states, summaries
and their gradients are float32. Triton and fla are imported at the first call, so that everything imports where they
are not installed.

Shapes: n rows, Hk key heads, H value heads, K and V head sizes, N chunks, Y entries, X exits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from cp_engine.kernels.gdn import fla_stages
from cp_engine.kernels.gdn.reference import Inputs
from cp_engine.kernels.gdn.triton.chain_tables import ChainTables, chain_tables
from cp_engine.kernels.gdn.triton.stages import Stages, in_fragments
from cp_engine.kernels.shared import packages

if TYPE_CHECKING:
    from cp_engine.kernels.gdn.triton.walks import Backward, Begun, Forward

__all__ = [
    "ChainTables",
    "Stages",
    "backward",
    "backward_stages",
    "begin_backward",
    "chain_tables",
    "chunk_stages",
    "exit_summary",
    "forward",
    "kept_tensors",
    "why_not",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


def why_not(k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why this backend cannot compute with rows like k and v, in the user's words; None when it can."""
    for module, package in (("triton", "triton"), ("fla", "fla-core==" + fla_stages.VERSION)):
        if not packages.installed(module):
            return f"needs the package {module} (pip install {package})"
    if v.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU, or TRITON_INTERPRET=1 before the start; v is on {v.device}"
    if k.dtype != v.dtype or v.dtype not in DTYPES:
        return f"computes float32, bfloat16 and float16; got {k.dtype} and {v.dtype}. Use reference"
    if max(k.shape[2], v.shape[2]) > LARGEST_HEAD:
        return f"needs head sizes up to {LARGEST_HEAD}; got {k.shape[2]} and {v.shape[2]}. Use reference"
    return None


def _sequences(tables: ChainTables) -> fla_stages.Sequences:
    return fla_stages.Sequences(tables.fragment_row, tables.chunk_fragment, tables.chunk_size)


def chunk_stages(inputs: Inputs, tables: ChainTables, kept: tuple[torch.Tensor, ...] = ()) -> Stages:
    """The tree-independent half of the forward, once over all chunks; in the backward from what it `kept_tensors`.

    Raises:
        ValueError: if this backend cannot compute with these inputs.
    """
    from cp_engine.kernels.gdn.triton.inside import cumulative_decay, key_products

    reason = why_not(inputs.k, inputs.v)
    if reason is not None:
        raise ValueError(f"gdn backend triton {reason}")
    q, k, v, g, beta = (in_fragments(x, tables) for x in inputs)
    if not tables.chunks:
        empty = v.new_empty(0, v.shape[1], tables.chunk_size)
        return Stages(g.float(), g.float(), empty, k.new_empty(0, v.shape[1], k.shape[2]), v)
    at, chunks, size = _sequences(tables), tables.chunk_rows, tables.chunk_size
    if kept:
        decay, ends, inverse = kept
    else:
        decay, ends = cumulative_decay(g, tables.ancestors, chunks, size)
        if not tables.packed:
            w, u, inverse = fla_stages.solve(k, v, decay, beta, at)
            return Stages(decay, ends, inverse, w, u)
        inverse = fla_stages.inverse_of(key_products(k, decay, beta, tables.ancestors, chunks, size), k.dtype, at)
    return Stages(decay, ends, inverse, *fla_stages.w_and_u(k, v, decay, beta, inverse, at))


def kept_tensors(stages: Stages) -> tuple[torch.Tensor, ...]:
    """What is worth keeping for the backward: the solve costs three times as long as w and u from its result, and that
    takes a quarter of their bytes."""
    return stages.decay, stages.ends, stages.inverse


def exit_summary(inputs: Inputs, stages: Stages, tables: ChainTables) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 B [X, H, K, V] of every exit and A [XA, H, K, K] of the exits below an entry."""
    from cp_engine.kernels.gdn.triton.forward_pass import run_summary

    k, value_dim = in_fragments(inputs.k, tables), inputs.v.shape[2]
    maps = run_summary(
        k, stages.w, stages.u, stages.decay, stages.ends, tables.entries, tables.summary, tables.chunk_size
    )
    if not tables.entries:
        return maps[tables.summary.exit_slot], maps.new_zeros((0, *maps.shape[1:3], maps.shape[2]))
    return maps[tables.summary.exit_slot][..., :value_dim], maps[tables.through_slot][..., value_dim:]


def backward_stages(inputs: Inputs, stages: Stages, dout: torch.Tensor, tables: ChainTables) -> torch.Tensor:
    """The tree-independent half of the backward before the reverse state pass: the gradient of v' [n, H, V] through
    outputs of the same chunk; ``dout`` [n, H, V]."""
    from cp_engine.kernels.gdn.triton.inside import value_gradient_inside

    q, k, dout = (in_fragments(x, tables) for x in (inputs.q, inputs.k, dout))
    if not tables.chunks:
        return dout
    return value_gradient_inside(q, k, dout, stages.decay, tables.ancestors, tables.chunk_rows, tables.chunk_size)


def forward(inputs: Inputs, stages: Stages, tables: ChainTables) -> Forward:
    from cp_engine.kernels.gdn.triton import walks

    return walks.Forward(inputs, stages, tables)


def begin_backward(
    inputs: Inputs,
    stages: Stages,
    dout: torch.Tensor,
    dv_local: torch.Tensor,
    entry_states: torch.Tensor,
    tables: ChainTables,
) -> tuple[torch.Tensor, Begun]:
    from cp_engine.kernels.gdn.triton import walks

    return walks.begin_backward(inputs, stages, dout, dv_local, entry_states, tables)


def backward(
    inputs: Inputs,
    stages: Stages,
    dout: torch.Tensor,
    dv_local: torch.Tensor,
    entry_states: torch.Tensor,
    tables: ChainTables,
    begun: Begun | None = None,
) -> Backward:
    from cp_engine.kernels.gdn.triton import walks

    return walks.Backward(inputs, stages, dout, dv_local, entry_states, tables, begun)
