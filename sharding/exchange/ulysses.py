"""Attention by head shards: one all-to-all gives every rank all tokens of a share of the heads, one brings them back.

In two dimensions, `ulysses_gather`, only the ranks of a team trade tokens for heads; ranks that hold the same heads in
different teams then exchange keys by `gather`. Both steps are moves inside one process group.

Callables as in `gather`. Shapes: n local rows, T tokens and N rows (padding included) of a team, P ranks of a team, Hq
query heads, Hk kv heads, hq = Hq / P and hk = max(Hk, P) / P heads of a shard, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cp_engine.sharding.exchange.gather import GatherTables, gather_backward, gather_forward
from cp_engine.sharding.exchange.rows import accumulation_dtype, take_rows
from cp_engine.sharding.exchange.transport import Part, Shipment, Transport
from cp_engine.sharding.row_exchange import Moves


@dataclass(frozen=True, eq=False)
class HeadShards:
    """How the ranks of a team trade the rows of all heads for all rows of a share of the heads."""

    team: int  # ranks that share the heads
    moves: Moves  # of rows towards head shards: each rank's rows to every rank of its team, itself included
    order: torch.Tensor  # int64 [T] row of each of the team's tokens in the concatenation of its ranks' rows
    tokens: torch.Tensor  # int64 [N] token of each of these rows, any for a padding row
    padding: torch.Tensor  # int64: which of these rows are padding rows


@dataclass(frozen=True, eq=False)
class UlyssesTables:
    """A `UlyssesPlan` on a device: one team."""

    shards: HeadShards
    intervals: Any  # the kernel's, over all T tokens


@dataclass(frozen=True, eq=False)
class UlyssesGatherTables:
    """A `UlyssesGatherPlan` on a device."""

    shards: HeadShards
    gather: GatherTables  # of a head shard, between the teams


def ulysses_forward(
    kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: UlyssesTables, transport: Transport | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward on every rank; ``transport`` is None on a single rank.

    Args:
        q: [n, Hq, D].
        k, v: [n, Hk, D].

    Returns:
        out [n, Hq, D] and what `ulysses_backward` needs: the shard's tensors, so that backward moves only gradients.

    Raises:
        ValueError: on every rank, before anything moves, for head counts that cannot be divided.
    """
    shard = _shard(q, k, v, tables.shards, transport)
    out, lse = kernel(*shard, tables.intervals, accumulate=False)
    (local,) = heads_to_tokens((out,), tables.shards, transport)
    return local, (*shard, out, lse)


def ulysses_backward(
    kernel_backward, saved, dout: torch.Tensor, kv_heads: int, tables: UlyssesTables, transport: Transport | None
) -> tuple[torch.Tensor, ...]:
    """dq [n, Hq, D], dk, dv [n, Hk, D]; a repeated kv head gets the sum over its copies, in the accumulation dtype."""
    q, k, v, out, lse = saved
    (shard_dout,) = tokens_to_heads((dout,), tables.shards, transport)
    repeated = _copies(k, kv_heads, tables.shards) > 1
    grads = kernel_backward(q, k, v, out, lse, shard_dout, tables.intervals, accumulate_kv=repeated)
    return _bring_home(grads, q.dtype, kv_heads, tables.shards, transport)


def ulysses_gather_forward(
    kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: UlyssesGatherTables, transport: Transport | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """As `ulysses_forward`, with a gather between the teams for each head shard."""
    shard = _shard(q, k, v, tables.shards, transport)
    out, saved = gather_forward(kernel, *shard, tables.gather, transport)
    (local,) = heads_to_tokens((out,), tables.shards, transport)
    return local, saved


def ulysses_gather_backward(
    kernel_backward, saved, dout: torch.Tensor, kv_heads: int, tables: UlyssesGatherTables, transport: Transport | None
) -> tuple[torch.Tensor, ...]:
    """As `ulysses_backward`."""
    (shard_dout,) = tokens_to_heads((dout,), tables.shards, transport)
    repeated = _copies(saved[1], kv_heads, tables.shards) > 1
    grads = gather_backward(kernel_backward, saved, shard_dout, tables.gather, transport, accumulate_kv=repeated)
    return _bring_home(grads, dout.dtype, kv_heads, tables.shards, transport)


def _shard(q, k, v, shards: HeadShards, transport: Transport | None) -> tuple[torch.Tensor, ...]:
    times = kv_repeats(q.shape[1], k.shape[1], shards.team)
    if times > 1:
        k, v = repeat_kv_heads(k, times), repeat_kv_heads(v, times)
    return tokens_to_heads((q, k, v), shards, transport)


def _bring_home(grads, dtype: torch.dtype, kv_heads: int, shards: HeadShards, transport: Transport | None):
    dq, dk, dv = grads
    copies = _copies(dk, kv_heads, shards)
    if copies == 1:
        # Nothing is added to these: rounded before the move they are the same, and half as many bytes.
        return heads_to_tokens((dq.to(dtype), dk.to(dtype), dv.to(dtype)), shards, transport)
    (dq,) = heads_to_tokens((dq.to(dtype),), shards, transport)
    # Backends differ in what they accumulate in, and ranks may differ in their backends.
    wide = accumulation_dtype(dtype)
    dk, dv = heads_to_tokens((dk.to(wide), dv.to(wide)), shards, transport)
    return dq, dk.unflatten(1, (kv_heads, copies)).sum(2), dv.unflatten(1, (kv_heads, copies)).sum(2)


def _copies(shard_k: torch.Tensor, kv_heads: int, shards: HeadShards) -> int:
    """How many ranks of a team hold each kv head."""
    return shard_k.shape[1] * shards.team // kv_heads


def kv_repeats(query_heads: int, kv_heads: int, world: int) -> int:
    """How often each kv head is repeated so that every rank gets one.

    Raises:
        ValueError: for head counts that cannot be dealt to ``world`` ranks.
    """
    if query_heads % world or (kv_heads % world and world % kv_heads):
        raise ValueError(
            f"dealing heads to {world} ranks (exchange ulysses or ulysses_gather) needs query heads divisible by "
            f"{world}, and kv heads that {world} divides or that divide {world}; the model has {query_heads} query "
            f"heads and {kv_heads} kv heads. Use exchange gather or ring, or another number of ranks"
        )
    return max(world // kv_heads, 1)


def repeat_kv_heads(kv: torch.Tensor, times: int) -> torch.Tensor:
    """[n, Hk, D] -> [n, Hk * times, D], copies of one head side by side.

    Interleaved, not tiled: rank p computes query heads [p * hq, (p + 1) * hq), which all belong to kv head p // times.
    """
    return kv.repeat_interleave(times, dim=1)


def tokens_to_heads(parts, shards: HeadShards, transport: Transport | None) -> tuple[torch.Tensor, ...]:
    """Local rows of all heads -> all tokens of the team, ascending, of a head shard: [n, H, D] -> [T, H / P, D].

    The parts share a dtype and travel in one message.
    """
    heads = [part.shape[1] // shards.team for part in parts]
    size = parts[0].shape[2]
    shipment, packed = _open(shards.moves, sum(heads), parts[0], transport)
    by_rank = packed.unflatten(0, (shards.team, -1))  # [P, n, heads, D]
    for part, rows in zip(parts, by_rank.split(heads, 2), strict=True):
        rows.copy_(part.unflatten(1, (shards.team, -1)).transpose(0, 1))
    received = _move(shipment, packed)
    # Apart, so that each is contiguous for the kernel.
    return tuple(
        take_rows(rows, shards.order, rows.new_empty((len(shards.order), rows.shape[1], size)))
        for rows in received.split(heads, 1)
    )


def heads_to_tokens(parts, shards: HeadShards, transport: Transport | None) -> tuple[torch.Tensor, ...]:
    """Inverse of `tokens_to_heads`: [T, H / P, D] each -> [n, H, D] each. Padding rows come back as zeros."""
    heads = [part.shape[1] for part in parts]
    shipment, packed = _open(shards.moves.back, sum(heads), parts[0], transport)
    if len(shards.order):
        for part, rows in zip(parts, packed.split(heads, 1), strict=True):
            take_rows(part, shards.tokens, rows)
    packed.index_fill_(0, shards.padding, 0)
    received = _move(shipment, packed)
    by_head = received.unflatten(0, (shards.team, -1)).transpose(0, 1)  # [n, P, heads, D]
    return tuple(part.flatten(1, 2) for part in by_head.split(heads, 2))


def _open(moves: Moves, heads: int, like: torch.Tensor, transport: Transport | None):
    """A shipment of one part, None on a single rank, and the rows to pack."""
    row_shape = (heads, like.shape[2])
    if transport is None:
        return None, like.new_empty((moves.rows_out, *row_shape))
    shipment = transport.open([Part(moves, row_shape)], like.dtype, like.device)
    return shipment, shipment.outgoing(0)


def _move(shipment: Shipment | None, packed: torch.Tensor) -> torch.Tensor:
    if shipment is None:
        return packed
    shipment.publish()
    return shipment.start(0).wait()
