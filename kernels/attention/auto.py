"""Picks the attention backend: by device, dtype and head size, then by rates measured on an H200 (docs/log.md).

Forward and backward are picked on their own: each takes only q, k, v and, backward, the final out and lse.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from cp_engine.kernels.attention import cudnn, reference, triton
from cp_engine.kernels.attention.intervals import Intervals

_LOG = logging.getLogger(__name__)
MODULES = {"reference": reference, "triton": triton, "cudnn": cudnn}
# Below so many visible keys of a row, mean over the rows, segments are short: the tiles of `triton` cover them with
# fewer pairs, and its backward is faster (game24_tree has 457 keys a row).
FEW_KEYS = 700


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, intervals: Intervals, scale: float, accumulate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention`."""
    name = choose("forward", q, intervals)
    return MODULES[name].forward(q, k, v, intervals, scale, accumulate)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    intervals: Intervals,
    scale: float,
    accumulate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention_backward`."""
    name = choose("backward", q, intervals)
    return MODULES[name].backward(q, k, v, out, lse, dout, intervals, scale, accumulate)


def choose(step: str, q: torch.Tensor, intervals: Intervals) -> str:
    """The backend for "forward" or "backward" of query rows like q."""
    # float32 is for proofs: the reference is exact there, and matrix units do not help either backend.
    if q.device.type != "cuda" or q.dtype in (torch.float64, torch.float32):
        return "reference"
    why = {name: MODULES[name].why_not(q) for name in ("cudnn", "triton")}
    name = "reference"
    if why["cudnn"] is None:
        name = "cudnn"
    elif why["triton"] is None:
        name = "triton"
    if name == "cudnn" and why["triton"] is None:
        if step == "backward" and intervals.prepared("keys a row", mean_keys) < FEW_KEYS:
            name = "triton"
    _log_once(step, name, str(q.dtype), q.shape[2], why["cudnn"], why["triton"])
    return name


def mean_keys(intervals: Intervals) -> float:
    """Visible keys of a query row, mean over the rows."""
    length, diagonal = intervals.run_length, intervals.diag_lo >= 0
    spans = torch.repeat_interleave(length, intervals.span_ptr.diff()) * (intervals.span_hi - intervals.span_lo)
    first = intervals.diag_hi - intervals.diag_lo
    own = torch.where(diagonal, length * first + length * (length - 1) // 2, 0)
    return (int(spans.sum()) + int(own.sum())) / max(intervals.rows, 1)


@cache
def _log_once(step: str, name: str, dtype: str, size: int, cudnn_reason: str | None, triton_reason: str | None) -> None:
    reasons = [f"{other} {why}" for other, why in (("cudnn", cudnn_reason), ("triton", triton_reason)) if why]
    told = f"; {'; '.join(reasons)}" if reasons else ""
    _LOG.info("attention %s, %s, head size %d: backend %s%s", step, dtype, size, name, told)
