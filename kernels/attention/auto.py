"""Picks the attention backend: by device, dtype and head size, then by rates measured on an H200 (docs/log.md).

Forward and backward are picked on their own: each takes only q, k, v and, backward, the final out and lse. Partial
results, which a caller merges, come from a backend that hands them out in the accumulation dtype.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from cp_engine.kernels.attention import cudnn, reference, triton
from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.pieces import row_pieces

_LOG = logging.getLogger(__name__)
MODULES = {"reference": reference, "triton": triton, "cudnn": cudnn}
# Below so many visible keys of a row, mean over the rows, segments are short: the tiles of `triton` cover them with
# fewer pairs, and it is faster (game24_tree has 457 keys a row).
FEW_KEYS = 700


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
    name = choose("partial forward" if accumulate else "forward", q, intervals)
    return MODULES[name].forward(q, k, v, intervals, scale, accumulate, into)


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
    name = choose("partial backward" if accumulate_q else "backward", q, intervals)
    return MODULES[name].backward(q, k, v, out, lse, dout, intervals, scale, accumulate_q, accumulate_kv, into_q)


def prepare(step: str, q: torch.Tensor, kv_heads: int, intervals: Intervals) -> None:
    """See `cp_engine.kernels.attention.api.prepare`."""
    MODULES[choose(step, q, intervals)].prepare(step, q, kv_heads, intervals)


def choose(step: str, q: torch.Tensor, intervals: Intervals) -> str:
    """The backend for a step ("forward", "backward", or "partial" and one of them) of query rows like q."""
    # float32 is for proofs: the reference is exact there, and matrix units do not help any backend.
    if q.device.type != "cuda" or q.dtype in (torch.float64, torch.float32):
        return "reference"
    why = {name: MODULES[name].why_not(q) for name in ("cudnn", "triton")}
    # cuDNN rounds partial results to 16 bits: merged they leave the bounds of bf16 (docs/log.md).
    able = ("triton",) if step.startswith("partial") else ("cudnn", "triton")
    name = next((one for one in able if why[one] is None), "reference")
    if why["triton"] is None:
        # Five products: 59.5 ms where `fa4` takes 79.2 and `cudnn` 93.5 (one trunk of 16,384 with 16 leaves of 2,048).
        # Its blocks are not smaller than theirs, but nor are they larger: no tree turns the order round.
        five_products = step.endswith("backward") and triton.stores(q)
        if five_products or intervals.prepared("keys a row", mean_keys) < FEW_KEYS:
            name = "triton"
    _log_once(step, name, str(q.dtype), q.shape[2], tuple(why.items()))
    return name


def mean_keys(intervals: Intervals) -> float:
    """Visible keys of a query row, mean over the rows."""
    return int(row_pieces(intervals).pairs.sum()) / max(intervals.rows, 1)


@cache
def _log_once(step: str, name: str, dtype: str, size: int, why: tuple[tuple[str, str | None], ...]) -> None:
    reasons = [f"{other} {reason}" for other, reason in why if reason]
    told = f"; {'; '.join(reasons)}" if reasons else ""
    _LOG.info("attention %s, %s, head size %d: backend %s%s", step, dtype, size, name, told)
