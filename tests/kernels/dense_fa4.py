"""A dense stand-in for FA4's variable-length backward, in any dtype on any device, with its argument names.

Shapes: R query rows, K key rows, B sequences, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

import torch


def sequence_mask(row_ends, key_ends, causal: bool) -> torch.Tensor:
    """bool [R, K]: same sequence, and if causal, no key beyond the row's own, counted from the sequence's last."""
    rows, keys = row_ends.diff().tolist(), key_ends.diff().tolist()
    mask = torch.zeros(sum(rows), sum(keys), dtype=torch.bool)
    for b, (height, width) in enumerate(zip(rows, keys, strict=True)):
        assert height > 0 and width > 0
        block = torch.ones(height, width, dtype=torch.bool)
        if causal:
            block = block.tril(width - height)
        mask[row_ends[b] : row_ends[b + 1], key_ends[b] : key_ends[b + 1]] = block
    return mask


def _check(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    for x, ends, longest in ((q, cu_seqlens_q, max_seqlen_q), (k, cu_seqlens_k, max_seqlen_k)):
        assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(x)
        assert ends.diff().max() <= longest
    assert cu_seqlens_q.shape == cu_seqlens_k.shape and len(cu_seqlens_q) <= 257


def backward(
    q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    deterministic,
):  # fmt: skip
    """dq, dk, dv for the given out and lse [Hq, R], by the equations of the reference kernel."""
    assert isinstance(deterministic, bool) and lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
    _check(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    share = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * softmax_scale
    scores = scores.masked_fill(~sequence_mask(cu_seqlens_q, cu_seqlens_k, causal), -torch.inf)
    weights = (scores - lse[..., None]).exp()
    delta = (dout * out).sum(-1).T[..., None]
    ds = weights * (torch.einsum("qhd,khd->hqk", dout, values) - delta) * softmax_scale
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", weights, dout)
    summed = (x.unflatten(1, (k.shape[1], share)).sum(2) for x in (dk, dv))
    return torch.einsum("hqk,khd->qhd", ds, keys), *summed
