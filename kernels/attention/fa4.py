"""The FlashAttention-4 backend, backward only: dense variable-length calls of flash-attn-4 on diagonals and rectangles.

`rectangles.call_list` says which calls. Every call gets the final out and lse, and what they return is added up in the
accumulation dtype, call by call; no addition within a call meets another one, so the order is fixed. There is no
forward: FA4 hands out each call's output in the inputs' dtype, so merging rounds a row once a call. At head size 256
that missed the error bound of design section 10, and it was slower than one masked kernel (docs/log.md).

It does best where few large rectangles hold the pairs: a long trunk with long leaves. `auto` does not take it: there
`cudnn` (head size 128) and `triton` (256) are faster. Every call's dq, dk and dv come back in the inputs' dtype, so
each is rounded once more than in one kernel. Inside a call dq is added by atomics, in a fixed order when PyTorch's
deterministic algorithms are on (`torch.use_deterministic_algorithms`).

Shapes: Nq query rows, Nk key rows, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.placing import placed
from cp_engine.kernels.attention.rectangles import Call, call_list, calls_on_device
from cp_engine.kernels.shared import packages
from cp_engine.kernels.shared.dtypes import accumulation_dtype

PACKAGE = "flash-attn-4==4.0.0b36"
DTYPES = (torch.bfloat16, torch.float16)
CARDS = (9,)  # compute capabilities
MOST_HEAD_SIZE = 256
# FA4 compiles another kernel for sequences of one tile; a bound above every tile's length keeps to one.
LEAST_LONGEST = 256


def why_not(q: torch.Tensor) -> str | None:
    """Why this backend cannot compute with rows like q, in the user's words; None when it can."""
    size = q.shape[2]
    if q.dtype not in DTYPES:
        return f"computes bfloat16 and float16; got {q.dtype}. Use reference"
    if q.device.type != "cuda":
        return f"needs a GPU; q is on {q.device}"
    if torch.cuda.get_device_capability(q.device)[0] not in CARDS:
        return f"needs a Hopper GPU; this is {torch.cuda.get_device_name(q.device)}. Use cudnn or triton"
    if size > MOST_HEAD_SIZE or size % 8:
        return f"needs a head size that is a multiple of 8 up to {MOST_HEAD_SIZE}; got {size}. Use triton"
    # Another distribution, flash-attn, holds the same package without `cute`.
    if not (packages.installed("flash_attn.cute") and packages.installed("cutlass")):
        return f"needs {PACKAGE} (pip install cp-engine[gpu])"
    return None


def variable_length_backward() -> Callable:
    """Backward of FA4 on packed sequences. Tests put a dense stand-in in its place."""
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    intervals: Intervals,
    scale: float,
    accumulate: bool,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Refuses: see the head of this file."""
    raise ValueError(
        "attention backend fa4 computes gradients only. Use auto, cudnn or triton for attention; attention_backward "
        "takes fa4 on their out and lse"
    )


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
    _check(q, intervals)
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for call in calls_on_device(intervals):
        kernel, rows = variable_length_backward(), call.rows
        row_grad, *key_grads = kernel(
            q[rows], k[call.keys], v[call.keys], out[rows], dout[rows], lse[rows].T.contiguous(),
            deterministic=torch.are_deterministic_algorithms_enabled(), **_options(call, scale),
        )  # fmt: skip
        _add(dq, rows, row_grad)
        for total, part in zip((dk, dv), key_grads, strict=True):
            for taken, keys in call.sums:
                _add(total, keys, part[taken])
    wanted = zip((dq, dk, dv), (accumulate_q, accumulate_kv, accumulate_kv), strict=True)
    dq, dk, dv = (x if wide else x.to(q.dtype) for x, wide in wanted)
    return placed(dq, into_q), dk, dv


def prepare(step: str, q: torch.Tensor, kv_heads: int, intervals: Intervals) -> None:
    """See `cp_engine.kernels.attention.api.prepare`."""
    if step.endswith("backward"):
        call_list(intervals)


def _options(call: Call, scale: float) -> dict:
    return {
        "softmax_scale": scale,
        "causal": call.causal,
        "cu_seqlens_q": call.row_ends,
        "cu_seqlens_k": call.key_ends,
        "max_seqlen_q": max(call.longest_rows, LEAST_LONGEST),
        "max_seqlen_k": max(call.longest_keys, LEAST_LONGEST),
    }


def _add(total: torch.Tensor, rows: slice | torch.Tensor, part: torch.Tensor) -> None:
    """Add to rows of ``total``, none of which occurs twice."""
    if isinstance(rows, slice):
        total[rows].add_(part)
    else:
        total[rows] = total[rows] + part


def _check(q: torch.Tensor, intervals: Intervals) -> None:
    reason = why_not(q)
    if reason is None and intervals.slide is not None:
        reason = "computes no sliding window. Use cudnn or triton"
    if reason is not None:
        raise ValueError(f"attention backend fa4 {reason}")
