"""The Triton attention backend: any GPU that Triton compiles for, and Triton's interpreter on a CPU.

Triton itself is imported at the first call, so that everything imports where it is not installed.
"""

from __future__ import annotations

import os

import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.placing import placed
from cp_engine.kernels.shared import packages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_SIZES = (16, 256)
# Where backward keeps p and ds (`stored_pass`): head sizes, and compute capabilities of cards it was built for.
STORED_SIZES = (129, 256)
STORED_CARDS = (9,)


def why_not(q: torch.Tensor) -> str | None:
    """Why this backend cannot compute with rows like q, in the user's words; None when it can."""
    if not packages.installed("triton"):
        return "needs the package triton (pip install triton)"
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU, or TRITON_INTERPRET=1 before the start; q is on {q.device}"
    if q.dtype not in DTYPES:
        return f"computes float32, bfloat16 and float16; got {q.dtype}. Use reference"
    if not HEAD_SIZES[0] <= q.shape[2] <= HEAD_SIZES[1]:
        return f"needs a head size from {HEAD_SIZES[0]} to {HEAD_SIZES[1]}; got {q.shape[2]}. Use reference"
    return None


def stores(q: torch.Tensor) -> bool:
    """Whether the backward of rows like q keeps p and ds between its kernels: five products in the place of eight."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    sizes = STORED_SIZES[0] <= q.shape[2] <= STORED_SIZES[1]
    return sizes and torch.cuda.get_device_capability(q.device)[0] in STORED_CARDS


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    intervals: Intervals,
    scale: float,
    accumulate: bool,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention`."""
    from cp_engine.kernels.attention.triton.forward_pass import forward as run
    from cp_engine.kernels.attention.triton.primitives import adjoining

    _check(q, scale)
    out, lse = run(*(adjoining(x) for x in (q, k, v)), intervals, scale, accumulate)
    return (out, lse) if into is None else (placed(out, into[0]), placed(lse, into[1]))


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    intervals: Intervals,
    scale: float,
    accumulate_q: bool,
    accumulate_kv: bool,
    into_q: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention_backward`."""
    from cp_engine.kernels.attention.triton import backward_pass, stored_pass
    from cp_engine.kernels.attention.triton.primitives import adjoining

    _check(q, scale)
    run = (stored_pass if stores(q) else backward_pass).backward
    q, k, v, out, dout = (adjoining(x) for x in (q, k, v, out, dout))
    dq, dk, dv = run(q, k, v, out, lse.contiguous(), dout, intervals, scale, accumulate_q, accumulate_kv)
    return placed(dq, into_q), dk, dv


def prepare(step: str, q: torch.Tensor, kv_heads: int, intervals: Intervals) -> None:
    """See `cp_engine.kernels.attention.api.prepare`."""
    from cp_engine.kernels.attention.triton.backward_pass import key_tiles
    from cp_engine.kernels.attention.triton.primitives import packed_heads, row_tiles
    from cp_engine.kernels.attention.triton.stored_pass import blocks_of
    from cp_engine.kernels.attention.triton.tiles import tile_list

    backward = step.endswith("backward")
    if backward and stores(q):
        blocks_of(q, kv_heads, intervals, on_device=False)
        return
    pack = packed_heads(q.shape[1] // kv_heads)
    row_tiles("dq" if backward else "forward", q, pack, intervals, tile_list)
    if backward:
        key_tiles(q, pack, intervals, tile_list)


def _check(q: torch.Tensor, scale: float) -> None:
    reason = why_not(q)
    if reason is None and not scale > 0:
        reason = f"needs a positive scale; got {scale}"
    if reason is not None:
        raise ValueError(f"attention backend triton {reason}")
