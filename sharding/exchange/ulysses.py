"""Attention by head shards: one all-to-all gives every rank all tokens of a share of the heads, one brings them back.

Callables as in `gather`. Shapes: n local rows, T tokens, N rows of all ranks (padding rows included), P ranks, Hq query
heads, Hk kv heads, hq = Hq / P and hk = max(Hk, P) / P heads of a shard, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cp_engine.sharding.exchange.rows import all_to_all_rows


@dataclass(frozen=True)
class UlyssesTables:
    """A `UlyssesPlan` on a device."""

    rank: int
    rank_rows: list[int]  # [P] rows of each rank, padding rows included
    dfs_order: torch.Tensor  # int64 [T] row of each token in the concatenation of all ranks' rows
    intervals: Any  # the kernel's, over all T tokens

    @property
    def world(self) -> int:
        return len(self.rank_rows)


def ulysses_forward(kernel, q, k, v, tables: UlyssesTables, group) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward on every rank of ``group`` (None: a single rank).

    Args:
        q: [n, Hq, D].
        k, v: [n, Hk, D].

    Returns:
        out [n, Hq, D] and what `ulysses_backward` needs: the shard's tensors, so that backward moves only gradients.

    Raises:
        ValueError: on every rank, before anything moves, for head counts that cannot be divided.
    """
    times = kv_repeats(q.shape[1], k.shape[1], tables.world)
    if times > 1:
        k, v = repeat_kv_heads(k, times), repeat_kv_heads(v, times)
    shard = tokens_to_heads((q, k, v), tables, group)
    out, lse = kernel(*shard, tables.intervals, accumulate=False)
    (local,) = heads_to_tokens((out,), tables, group)
    return local, (*shard, out, lse)


def ulysses_backward(kernel_backward, saved, dout, kv_heads: int, tables: UlyssesTables, group):
    """dq [n, Hq, D], dk, dv [n, Hk, D] in the accumulation dtype; a repeated kv head gets the sum over its copies."""
    q, k, v, out, lse = saved
    (shard_dout,) = tokens_to_heads((dout,), tables, group)
    grads = kernel_backward(q, k, v, out, lse, shard_dout, tables.intervals)
    dq, dk, dv = heads_to_tokens(grads, tables, group)
    copies = dk.shape[1] // kv_heads
    return dq, dk.unflatten(1, (kv_heads, copies)).sum(2), dv.unflatten(1, (kv_heads, copies)).sum(2)


def kv_repeats(query_heads: int, kv_heads: int, world: int) -> int:
    """How often each kv head is repeated so that every rank gets one.

    Raises:
        ValueError: for head counts that cannot be dealt to ``world`` ranks.
    """
    if query_heads % world or (kv_heads % world and world % kv_heads):
        raise ValueError(
            f"exchange ulysses on {world} context-parallel ranks needs query heads divisible by {world}, and kv heads "
            f"that {world} divides or that divide {world}; the model has {query_heads} query heads and {kv_heads} kv "
            "heads. "
            "Use exchange gather or ring, or another number of ranks"
        )
    return max(world // kv_heads, 1)


def repeat_kv_heads(kv: torch.Tensor, times: int) -> torch.Tensor:
    """[n, Hk, D] -> [n, Hk * times, D], copies of one head side by side.

    Interleaved, not tiled: rank p computes query heads [p * hq, (p + 1) * hq), which all belong to kv head p // times.
    """
    return kv.repeat_interleave(times, dim=1)


def tokens_to_heads(parts, tables: UlyssesTables, group) -> tuple[torch.Tensor, ...]:
    """Local rows of all heads -> all tokens in depth-first order of a head shard: [n, H, D] each -> [T, H / P, D] each.

    The parts share a dtype and travel in one message.
    """
    world, rows = tables.world, tables.rank_rows[tables.rank]
    heads = [part.shape[1] // world for part in parts]
    packed = torch.cat([part.unflatten(1, (world, -1)) for part in parts], 2)  # [n, P, heads, D]
    sent = packed.transpose(0, 1).flatten(0, 1)
    received = all_to_all_rows(sent, [rows] * world, tables.rank_rows, group)
    return received[tables.dfs_order].split(heads, 1)


def heads_to_tokens(parts, tables: UlyssesTables, group) -> tuple[torch.Tensor, ...]:
    """Inverse of `tokens_to_heads`: [T, H / P, D] each -> [n, H, D] each. Padding rows come back as zeros."""
    world, rows = tables.world, tables.rank_rows[tables.rank]
    heads = [part.shape[1] for part in parts]
    packed = torch.cat(parts, 1)
    sent = packed.new_zeros((sum(tables.rank_rows), *packed.shape[1:]))
    sent[tables.dfs_order] = packed
    received = all_to_all_rows(sent, tables.rank_rows, [rows] * world, group)
    by_head = received.unflatten(0, (world, rows)).transpose(0, 1)  # [n, P, heads, D]
    return tuple(part.flatten(1, 2) for part in by_head.split(heads, 2))
