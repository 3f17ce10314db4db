"""The cuDNN attention backend: `cudnn.flex_attention` of nvidia-cudnn-frontend, on Hopper and Blackwell.

Its mask is a union of key intervals for each query row, which is what `Intervals` are. The mask plan is made once for a
pack and used by all its layers, forward and backward. The number of intervals of a row is data to its kernels.

dk and dv come back in the inputs' dtype whatever ``accumulate_kv`` asks for: its float32 accumulators are not handed
out. Backward adds dq by atomics, in a fixed order when PyTorch's deterministic algorithms are
on (`torch.use_deterministic_algorithms`). out, lse and dq of a group of heads are written where the caller wants them.

Shapes: Nq query rows, Nk key rows, Hq query heads, Hk kv heads, D head size, M intervals of a row.
"""

from __future__ import annotations

import numpy as np
import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.pieces import row_pieces
from cp_engine.kernels.attention.placing import placed
from cp_engine.kernels.shared import packages

PACKAGE = "nvidia-cudnn-frontend==1.32.0"
DTYPES = (torch.bfloat16, torch.float16)
CARDS = (9, 10)  # compute capabilities
MOST_HEAD_SIZE = 128  # every multiple of 8 up to it, and 256
# Bytes at whose multiples rows and heads must start; at head size 256 backward asks for more.
ALIGNMENT, WIDE_ALIGNMENT = 16, 128


def why_not(q: torch.Tensor) -> str | None:
    """Why this backend cannot compute with rows like q, in the user's words; None when it can."""
    size = q.shape[2]
    if q.dtype not in DTYPES:
        return f"computes bfloat16 and float16; got {q.dtype}. Use reference"
    if q.device.type != "cuda":
        return f"needs a GPU; q is on {q.device}"
    if torch.cuda.get_device_capability(q.device)[0] not in CARDS:
        return f"needs a Hopper or Blackwell GPU; this is {torch.cuda.get_device_name(q.device)}. Use triton"
    if size != 256 and (size > MOST_HEAD_SIZE or size % 8):
        return f"needs a head size of 256, or a multiple of 8 up to {MOST_HEAD_SIZE}; got {size}. Use triton"
    if not (packages.installed("cudnn") and packages.installed("cutlass")):
        return f"needs {PACKAGE} (pip install cp-engine[gpu])"
    return None


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
    q, k, v = (aligned(x) for x in (q, k, v))
    plan = _plan(q, k, intervals)
    dtype = torch.float32 if accumulate else q.dtype
    into = into or (None, None)
    if plan is None:
        none_seen = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        return placed(q.new_zeros(q.shape, dtype=dtype), into[0]), placed(none_seen, into[1])
    out, lse = _place(q, into[0]), into[1]
    if lse is None or lse.stride(0) != 1:  # cuDNN writes a row a head
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device).T
    _call("Fwd", (q, k, v, out), (lse.T,), plan, intervals, scale)
    return placed(out.to(dtype), into[0]), placed(lse, into[1])


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
    q, k, v, out, dout = (aligned(x) for x in (q, k, v, out, dout))
    plan = _plan(q, k, intervals)
    row_dtype = torch.float32 if accumulate_q else q.dtype
    if plan is None:
        return placed(torch.zeros_like(q, dtype=row_dtype), into_q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv = _place(q, into_q), torch.empty_like(k), torch.empty_like(v)
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = q, k, v, out, dout, lse.T.contiguous(), dq, dk, dv
    _call("Bwd", given, (), plan, intervals, scale, deterministic=deterministic)
    return placed(dq.to(row_dtype), into_q), dk, dv


def _place(q: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Rows like q that cuDNN can write: ``into`` where it is such a place."""
    if into is not None and into.dtype == q.dtype and _in_place(into):
        return into
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _call(kind: str, rows, after_plan, plan, intervals: Intervals, scale: float, **options) -> None:
    """Run a kernel, made at the first call with such tensors, which all have a batch of one.

    Args:
        kind: Fwd or Bwd.
        rows, after_plan: tensors before and after the mask plan in cuDNN's order, the results among them.
    """
    import cudnn.flex_attention as flex

    given = *(x[None] for x in rows), plan, *(x[None] for x in after_plan)
    layouts = [(x.dtype, *x.shape, *x.stride()) for x in (*rows, *after_plan)]

    def build(_):
        made = getattr(flex, f"FlexAttention{kind}")(*given, **options)
        made.check_support()
        made.compile()
        return made

    made = intervals.prepared(f"cudnn {kind} {layouts} {options}", build)
    workspace = torch.empty(made.workspace_size, dtype=torch.uint8, device=rows[0].device)
    made.execute(*given, workspace=workspace, softmax_scale=scale)


def prepare(step: str, q: torch.Tensor, kv_heads: int, intervals: Intervals) -> None:
    """See `cp_engine.kernels.attention.api.prepare`."""
    intervals.prepared("cudnn ends", interval_ends)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows [N, H, D] as cuDNN reads them: themselves where rows and heads are aligned, as in slices of heads."""
    return x if _in_place(x) else x.clone(memory_format=torch.contiguous_format)


def _in_place(x: torch.Tensor) -> bool:
    step = WIDE_ALIGNMENT if x.shape[2] == 256 else ALIGNMENT
    row, head, element = (stride * x.element_size() for stride in x.stride())
    return element == x.element_size() and not (row % step or head % step or x.data_ptr() % step)


def _plan(q: torch.Tensor, k: torch.Tensor, intervals: Intervals):
    """The mask plan for these heads and rows, or None where no row sees anything."""
    reason = why_not(q)
    if reason is not None:
        raise ValueError(f"attention backend cudnn {reason}")
    if not q.shape[0] or not intervals.key_end:
        return None
    from cudnn.flex_attention import create_mask_plan

    def build(made: Intervals):
        ends = made.on_device("cudnn ends", interval_ends)
        return create_mask_plan(ends[None], q[None], k[None], k[None], build_backward=True)

    return intervals.prepared(f"cudnn {tuple(q.shape)} {tuple(k.shape)} {q.dtype}", build)


def interval_ends(intervals: Intervals) -> torch.Tensor:
    """int32 [1 + 2 M, Nq] on the host: row i sees [0, f0), [f1, f2), [f3, f4), ... of column i.

    Ascending; f0 is 0, and unused intervals are empty ones at ``key_end``.
    """
    row, lo, hi = row_pieces(intervals).by_row()
    order = np.lexsort((lo, row))
    row, lo, hi = row[order], lo[order], hi[order]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    ends = np.full((3 + 2 * int(place.max(initial=0)), intervals.rows), intervals.key_end, np.int32)
    ends[0] = 0
    ends[1 + 2 * place, row], ends[2 + 2 * place, row] = lo, hi
    return torch.as_tensor(ends)
