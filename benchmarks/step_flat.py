"""Attention of `transformers` models on packed rows that share nothing: what trainers without prefix trees call.

A flat pack is a forest of one segment a rollout, so each row begins where the position is 0.

Shapes: n tokens of a pack, R rows, L tokens of the longest, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import clock
from cp_engine.pack import pack_of
from cp_engine.sharding.exchange.kept import kept

FLAT_NAME = "cp_engine_flat_rows"


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the rows of a pack lie, on its device."""

    starts: torch.Tensor  # int32 [R + 1]
    lengths: list[int]
    place: torch.Tensor | None  # int64 [n] in [R, L] padded to the longest; None where all rows are equally long

    @classmethod
    def of(cls, position: np.ndarray, device: torch.device) -> Rows:
        """From the positions of a flat pack's tokens."""
        starts = np.append(np.flatnonzero(position == 0), len(position))
        lengths = np.diff(starts)
        place = None
        if (lengths != lengths[0]).any():
            row = np.repeat(np.arange(len(lengths)), lengths)
            place = torch.as_tensor(row * lengths.max() + position, device=device)
        return cls(torch.as_tensor(starts, dtype=torch.int32, device=device), lengths.tolist(), place)

    @property
    def longest(self) -> int:
        return max(self.lengths)


def fa4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, scale: float) -> torch.Tensor:
    """flash-attn-4 on packed rows."""
    return _OnRows.apply(q, k, v, rows, scale, _fa4_forward, _fa4_backward)


def fa2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, scale: float) -> torch.Tensor:
    """PyTorch's FlashAttention-2 on packed rows."""
    return _OnRows.apply(q, k, v, rows, scale, _fa2_forward, _fa2_backward)


class _OnRows(torch.autograd.Function):
    """A kernel whose results activation recompute can keep, as it keeps those of the tree's attention."""

    @staticmethod
    def forward(ctx, q, k, v, rows, scale, forward, backward):
        results = kept("mixer", lambda: forward(q, k, v, rows, scale), q)
        ctx.save_for_backward(q, k, v, *results)
        ctx.backward, ctx.rows, ctx.scale = backward, rows, scale
        return results[0]

    @staticmethod
    def backward(ctx, dout):
        return *ctx.backward(dout, *ctx.saved_tensors, ctx.rows, ctx.scale), None, None, None, None


def _fa4_options(rows: Rows, scale: float) -> dict:
    ends = {"cu_seqlens_q": rows.starts, "cu_seqlens_k": rows.starts}
    return ends | {"max_seqlen_q": rows.longest, "max_seqlen_k": rows.longest, "causal": True, "softmax_scale": scale}


def _fa4_forward(q, k, v, rows, scale):
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **_fa4_options(rows, scale))
    return out, lse


def _fa4_backward(dout, q, k, v, out, lse, rows, scale):
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(q, k, v, out, dout, lse, **_fa4_options(rows, scale))[:3]


def _repeated(q, k, v) -> tuple[torch.Tensor, ...]:
    """PyTorch's operator has no GQA: kv heads are repeated, and their gradients added up."""
    return tuple(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))


def _fa2_forward(q, k, v, rows, scale):
    ends = rows.starts, rows.starts, rows.longest, rows.longest
    return torch.ops.aten._flash_attention_forward(q, *_repeated(q, k, v), *ends, 0.0, True, False, scale=scale)[:4]


def _fa2_backward(dout, q, k, v, out, lse, seed, offset, rows, scale):
    ends = rows.starts, rows.starts, rows.longest, rows.longest
    dq, *dkv = torch.ops.aten._flash_attention_backward(
        dout, q, *_repeated(q, k, v), out, lse, *ends, 0.0, True, seed, offset, scale=scale
    )
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in dkv)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, scale: float) -> torch.Tensor:
    """cuDNN through PyTorch, on rows padded to the longest: what follows a row's end is never seen by its tokens."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return _padded(q, k, v, rows, scale, sdpa_kernel(SDPBackend.CUDNN_ATTENTION))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, scale: float) -> torch.Tensor:
    """What PyTorch chooses for padded rows, on any device and in any dtype."""
    return _padded(q, k, v, rows, scale, nullcontext())


def _padded(q, k, v, rows: Rows, scale: float, chosen) -> torch.Tensor:
    count, longest = len(rows.lengths), rows.longest

    def pad(x: torch.Tensor) -> torch.Tensor:
        if rows.place is not None:
            x = x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, rows.place, x)
        return x.unflatten(0, (count, longest)).transpose(1, 2)

    with chosen:
        out = F.scaled_dot_product_attention(*map(pad, (q, k, v)), is_causal=True, enable_gqa=True, scale=scale)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if rows.place is None else out.index_select(0, rows.place)


FLAT_CALLS: dict[str, Callable] = {"fa4": fa4, "cudnn": cudnn, "fa2": fa2, "sdpa": sdpa}
RIVALS = ("fa4", "cudnn", "fa2")  # among which the fastest is taken
KEEPING = ("fa4", "fa2")  # whose results activation recompute can keep


class FlatAttention:
    """A flat call in the signature of `transformers`."""

    def __init__(self, call: Callable):
        self.call = call
        self.pack, self.rows = None, None  # the last pack that came, and its rows

    def __call__(self, module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        pack = pack_of(kwargs, f"attention layer {module.layer_idx}")
        assert attention_mask is None and dropout == 0.0 and kwargs.get("sliding_window") is None
        if pack is not self.pack:
            self.pack, self.rows = pack, Rows.of(pack.plan.position, query.device)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return self.call(q, k, v, self.rows, scaling)[None], None


def use_flat_attention(causal_lm: torch.nn.Module, call: Callable) -> None:
    """Let a model's softmax attention run on rows; `prepare_for_trees` brings the tree back."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLAT_NAME, FlatAttention(call))
    causal_lm.set_attn_implementation(FLAT_NAME)


def times_of_calls(
    names: tuple[str, ...], rows: Rows, query_heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> dict[str, float]:
    """Milliseconds of one layer's attention, forward and backward, on rows; calls that cannot run are left out."""
    device = rows.starts.device
    tokens = sum(rows.lengths)
    heads = query_heads, kv_heads, kv_heads, query_heads
    q, k, v, dout = (torch.randn(tokens, count, size, dtype=dtype, device=device) for count in heads)
    for x in (q, k, v):
        x.requires_grad_()
    times = {}
    for name in names:

        def both(call=FLAT_CALLS[name]):
            torch.autograd.grad(call(q, k, v, rows, size**-0.5), (q, k, v), dout)

        try:
            both()
            times[name] = round(clock.median_ms(both, device), 3)
        except Exception as error:  # noqa: BLE001
            # Not installed, or not for this device or head size: the others count.
            print(f"  flat attention {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}")
        clock.release(device)
    return times


def fastest(times: dict[str, float]) -> str:
    """Raises: ValueError: if no call could run."""
    if not times:
        raise ValueError(f"none of {', '.join(RIVALS)} runs here; name a flat attention with --flat")
    return min(times, key=times.__getitem__)
