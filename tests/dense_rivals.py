"""Stand-ins on a CPU for the packages that attention is compared with: the same calls, computed densely.

Shapes: n rows, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from unittest import mock

import torch


def dense(q, k, v, mask, scale: float) -> torch.Tensor:
    """[n, Hq, D] from k, v [n, Hk, D] and a bool mask [n, n]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale):
    """flash-attn-4's."""
    assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (row[:, None] == row) & torch.ones(len(row), len(row), dtype=torch.bool).tril()
    return dense(q, k, v, mask, softmax_scale), None


def flash_forward(q, k, v, starts, starts_k, longest, longest_k, dropout, causal, debug, *, scale):
    """PyTorch's varlen FlashAttention-2, which has no GQA."""
    assert q.shape == k.shape and dropout == 0 and not debug
    ends = {"cu_seqlens_q": starts, "cu_seqlens_k": starts_k, "max_seqlen_q": longest, "max_seqlen_k": longest_k}
    out, _ = varlen(q, k, v, **ends, causal=causal, softmax_scale=scale)
    return out, "lse", "seed", "offset", None


def flash_backward(
    dout, q, k, v, out, lse, starts, starts_k, longest, longest_k, dropout, causal, seed, offset, *, scale
):
    assert (lse, seed, offset) == ("lse", "seed", "offset")
    rows = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again = flash_forward(*rows, starts, starts_k, longest, longest_k, dropout, causal, False, scale=scale)[0]
    assert torch.equal(again, out)
    return torch.autograd.grad(again, rows, dout)


def create_mask_plan(ends: torch.Tensor, q, k, v) -> torch.Tensor:
    """cuDNN's: bool [n, n] from interval ends [1, 1 + 2 M, n]."""
    key, (ends,) = torch.arange(k.shape[1]), ends
    mask = key < ends[0][:, None]
    for lo, hi in zip(ends[1::2], ends[2::2], strict=True):
        mask |= (key >= lo[:, None]) & (key < hi[:, None])
    return mask


def flex_attn_func(q, k, v, *, mask_plan, softmax_scale):
    return dense(q[0], k[0], v[0], mask_plan, softmax_scale)[None]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Inside, the stand-ins are what the packages' names import."""
    modules = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "cudnn")}
    modules["flash_attn.cute"].flash_attn_varlen_func = varlen
    modules["cudnn.flex_attention"] = types.ModuleType("cudnn.flex_attention")
    modules["cudnn.flex_attention"].create_mask_plan = create_mask_plan
    modules["cudnn.flex_attention"].flex_attn_func = flex_attn_func
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(torch.ops.aten, "_flash_attention_forward", flash_forward),
        mock.patch.object(torch.ops.aten, "_flash_attention_backward", flash_backward),
    ):
        yield
