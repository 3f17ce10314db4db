"""The public attention kernel: checks its arguments and calls the backend asked for.

Shapes: Nq query rows, Nk key rows, Hq query heads, Hk kv heads (Hq a multiple of Hk), D head size. Query head h uses kv
head ``h // (Hq // Hk)``. Equations and what counts as correct: `cp_engine.kernels.attention.reference`.

A backend is a module with ``forward(q, k, v, intervals, scale, accumulate, into)``, ``backward(q, k, v, out, lse, dout,
intervals, scale, accumulate_q, accumulate_kv, into_q)`` and ``prepare(step, q, kv_heads, intervals)``, where a step is
"forward" or "backward", after "partial" with ``accumulate`` or ``accumulate_q``. It is imported when it is first asked
for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.shared.dtypes import accumulation_dtype

BACKENDS = {
    "auto": "cp_engine.kernels.attention.auto",
    "reference": "cp_engine.kernels.attention.reference",
    "triton": "cp_engine.kernels.attention.triton",
    "cudnn": "cp_engine.kernels.attention.cudnn",
    "fa4": "cp_engine.kernels.attention.fa4",
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    intervals: Intervals,
    *,
    scale: float,
    backend: str = "reference",
    accumulate: bool = False,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row over its visible key rows. Records no autograd graph: see `attention_backward`.

    Args:
        q: [Nq, Hq, D].
        k, v: [Nk, Hk, D], of q's dtype and device. Nq and Nk may be 0.
        intervals: visible key rows of each query row.
        scale: factor on ``q . k``.
        accumulate: return ``out`` in the accumulation dtype, for callers that merge partial results. `cudnn` has it
            rounded to q's dtype all the same; `auto` does not take that for it.
        into: tensors that become out and lse, of any strides: for callers that compute a group of heads at a time.
            `cudnn` writes there where out is aligned and lse has its rows side by side; other results are copied.

    Returns:
        out [Nq, Hq, D] in q's dtype and lse [Nq, Hq], natural log, in the accumulation dtype (float32, or float64 for
        float64 inputs). A row that sees nothing has out 0 and lse -inf.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit together, or an unknown backend.
    """
    module = _backend(backend)
    _check(q, k, v, intervals)
    if into is not None:
        out_dtype = accumulation_dtype(q.dtype) if accumulate else q.dtype
        _check_like("into[0]", into[0], out_dtype, q.shape)
        _check_like("into[1]", into[1], accumulation_dtype(q.dtype), q.shape[:2])
    return module.forward(q, k, v, intervals, scale, accumulate, into)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    intervals: Intervals,
    *,
    scale: float,
    backend: str = "reference",
    accumulate_q: bool = False,
    accumulate_kv: bool = False,
    into_q: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention` with respect to q, k and v.

    ``out`` and ``lse`` are the final ones. Where a row's keys were split over several calls, each call's backward takes
    the merged out and lse, and the sum of the calls is the exact gradient: nothing flows through lse.

    Args:
        out, dout: [Nq, Hq, D] of q's dtype.
        lse: [Nq, Hq] in the accumulation dtype.
        accumulate_q: return dq in the accumulation dtype, for callers that split a row's keys over several calls. For
            `cudnn` as with ``accumulate`` of `attention`.
        accumulate_kv: the same of dk and dv, for callers whose keys are seen by the rows of several calls. `cudnn`
            gives them rounded to q's dtype all the same.
        into_q: a tensor that becomes dq, as ``into`` of `attention`.

    Returns:
        dq, dk, dv shaped like q, k, v and in their dtype unless accumulated.

    Raises:
        ValueError: as `attention`.
    """
    module = _backend(backend)
    _check(q, k, v, intervals)
    for name, x in (("out", out), ("dout", dout)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(f"{name} must be like q, {_told(q)}; got {_told(x)}")
    _check_like("lse", lse, accumulation_dtype(q.dtype), q.shape[:2])
    if into_q is not None:
        _check_like("into_q", into_q, accumulation_dtype(q.dtype) if accumulate_q else q.dtype, q.shape)
    return module.backward(q, k, v, out, lse, dout, intervals, scale, accumulate_q, accumulate_kv, into_q)


def prepare(
    intervals: Intervals,
    *,
    query_heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    accumulate: bool = False,
    backend: str = "auto",
) -> None:
    """Build on the host what calls of these shapes need of the intervals, so that a planning thread can do it ahead.

    Calls without it build the same at their first layer. Nothing touches the device: tables go there, and cuDNN's mask
    plan (GPU work of a few milliseconds) is made, at the first call. ``query_heads`` and ``kv_heads`` are those of one
    call: of a group of heads, where an exchange calls the kernel by groups; ``accumulate``: rows' keys are split
    over several calls.

    Raises:
        ValueError: for an unknown backend, or head counts that do not fit together.
    """
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of kv heads; got {query_heads} and {kv_heads}")
    rows = torch.empty(0, query_heads, size, dtype=dtype, device=intervals.device)
    for step in ("forward", "backward"):
        _backend(backend).prepare(f"partial {step}" if accumulate else step, rows, kv_heads, intervals)


def _backend(name: str) -> ModuleType:
    if name not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    return importlib.import_module(BACKENDS[name])


def _check_like(name: str, x: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}; got {_told(x)}")


def _told(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, intervals: Intervals) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be [rows, heads, head size]; got shape {list(x.shape)}")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"q, k and v must share one dtype of {known}; got {q.dtype}, {k.dtype}, {v.dtype}")
        if x.device != intervals.device:
            raise ValueError(f"{name} is on {x.device} but the intervals are on {intervals.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape; got {list(k.shape)} and {list(v.shape)}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have one head size; got {q.shape[2]} and {k.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of kv heads; got {q.shape[1]} and {k.shape[1]}")
    if q.shape[0] != intervals.rows:
        raise ValueError(f"the intervals are for {intervals.rows} query rows; q has {q.shape[0]}")
    if k.shape[0] < intervals.key_end:
        raise ValueError(f"the intervals reach key row {intervals.key_end - 1}; k has {k.shape[0]} rows")
