"""Tree attention over context-parallel ranks: an exchange and a kernel as one differentiable operation.

Shapes: n local rows (the padding row of an empty rank included), Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cp_engine.kernels.attention import Intervals, attention, attention_backward, prepare
from cp_engine.sharding.attention_plan import AttentionPlan, GatherPlan
from cp_engine.sharding.exchange.gather import GatherTables, gather_backward, gather_forward
from cp_engine.sharding.exchange.kept import kept
from cp_engine.sharding.exchange.ring import RingTables, ring_backward, ring_forward
from cp_engine.sharding.exchange.rows import accumulation_dtype
from cp_engine.sharding.exchange.transport import transport_for
from cp_engine.sharding.exchange.ulysses import (
    HeadShards,
    UlyssesGatherTables,
    UlyssesTables,
    ulysses_backward,
    ulysses_forward,
    ulysses_gather_backward,
    ulysses_gather_forward,
)
from cp_engine.sharding.layer_time import best_head_groups
from cp_engine.sharding.row_exchange import Moves, TokenOrder


@dataclass(frozen=True)
class AttentionTables:
    """An `AttentionPlan` on a device. Made once for a pack and used by all its attention layers."""

    world: int
    exchange: GatherTables | RingTables | UlyssesTables | UlyssesGatherTables
    transport: str  # see `cp_engine.sharding.exchange.transport.transport_for`


@dataclass(frozen=True)
class Heads:
    """What kernels have to know of a model's attention."""

    query: int
    kv: int
    size: int
    dtype: torch.dtype


def kernel_intervals(
    plan: AttentionPlan, device: torch.device | str = "cpu", heads: Heads | None = None
) -> list[Intervals]:
    """The intervals of a rank's kernel calls, for `attention_tables`.

    Args:
        device: of the calls. Nothing is put there, so that a planning thread waits for no kernel.
        heads: build the lists of the backends that `auto` will call for them; None leaves that to the first layer.
    """
    merged = plan.ring is not None and bool(plan.fetch.moves.counts.any())
    if plan.ring is not None:
        parts = plan.ring.intervals
    else:
        parts = [(plan.gather or plan.ulysses or plan.ulysses_gather.gather).intervals]
    made = [Intervals.from_arrays(part, device) for part in parts]
    if heads is not None:
        query, kv = _heads_of_a_call(plan, heads)
        for intervals in made:
            prepare(intervals, query_heads=query, kv_heads=kv, size=heads.size, dtype=heads.dtype, accumulate=merged)
    return made


def _heads_of_a_call(plan: AttentionPlan, heads: Heads) -> tuple[int, int]:
    """Query and kv heads of one kernel call: of a rank's share where heads are dealt out, of a group of `gather`."""
    both, moves = plan.ulysses_gather, plan.fetch.moves
    team = both or plan.ulysses
    ranks = 1 if team is None else len(team.order.rank_rows)
    dealt = max(heads.kv, ranks)  # kv heads fewer than ranks are repeated
    query, kv = max(1, heads.query // dealt) * (dealt // ranks), dealt // ranks
    gather = plan.gather
    if both is not None:
        gather, moves = both.gather, both.fetch.moves
    if gather is None:
        return query, kv
    groups = best_head_groups(
        max(moves.most_out, moves.back.most_out),
        gather.most_pairs,
        query_heads=query,
        kv_heads=kv,
        head_dim=heads.size,
        element_bytes=heads.dtype.itemsize,
    )
    return query // groups, kv // groups


def attention_tables(
    plan: AttentionPlan,
    rank: int,
    device: torch.device | str = "cpu",
    *,
    intervals: Sequence[Intervals] | None = None,
    transport: str = "auto",
    head_groups: int | None = None,
) -> AttentionTables:
    """Put one rank's plan on a device.

    Args:
        intervals: of `kernel_intervals` for this plan and the device of the calls; None makes them here.
        transport: what carries the rows: `peer` (reads over symmetric memory), `collective` (NCCL or gloo), or `auto`.
        head_groups: in how many groups `gather` works off the kv heads; by default from the bytes that move.
    """
    intervals = kernel_intervals(plan, device) if intervals is None else intervals
    world = plan.fetch.moves.world
    if plan.ulysses is not None:
        order = plan.ulysses.order
        exchange = UlyssesTables(_head_shards(order, plan.rank_rows, rank, device), intervals[0])
    elif plan.ulysses_gather is not None:
        exchange = _ulysses_gather_tables(plan, rank, intervals[0], device, head_groups)
    else:
        moves, send_rows = plan.fetch.moves, plan.fetch.send_rows
        if plan.ring is not None:
            exchange = RingTables(moves, torch.as_tensor(send_rows, device=device), tuple(intervals))
        else:
            exchange = _gather_tables(plan.gather, moves, send_rows, intervals[0], device, head_groups)
    return AttentionTables(world, exchange, transport)


def _head_shards(order: TokenOrder, rank_rows: np.ndarray, rank: int, device) -> HeadShards:
    team, world = len(order.rank_rows), len(rank_rows)
    team_of = np.arange(world) // team
    counts = np.where(team_of[:, None] == team_of, rank_rows, 0)
    rows = int(order.rank_rows.sum())
    tokens, padding = np.zeros(rows, np.int64), np.ones(rows, bool)
    tokens[order.dfs_order], padding[order.dfs_order] = np.arange(len(order.dfs_order)), False
    tables = (torch.as_tensor(table, device=device) for table in (order.dfs_order, tokens, np.flatnonzero(padding)))
    return HeadShards(team, Moves(rank, counts), *tables)


def _ulysses_gather_tables(plan: AttentionPlan, rank: int, intervals, device, head_groups) -> UlyssesGatherTables:
    both = plan.ulysses_gather
    shards = _head_shards(both.order, plan.rank_rows, rank, device)
    # A shard's rows move between the ranks that hold it, one in each team.
    counts = np.kron(both.fetch.moves.counts, np.eye(shards.team, dtype=np.int64))
    moves, send_rows = Moves(rank, counts), both.fetch.send_rows
    gather = _gather_tables(both.gather, moves, send_rows, intervals, device, head_groups)
    return UlyssesGatherTables(shards, gather)


def _gather_tables(gather: GatherPlan, moves: Moves, send_rows, intervals, device, head_groups) -> GatherTables:
    rows, order = gather.intervals.rows, gather.key_order
    remote = order >= rows
    local_keys, remote_keys = np.flatnonzero(~remote), np.empty(moves.rows_in, np.int64)
    assert (order[local_keys] == np.arange(len(local_keys))).all(), "every local token is seen, by itself"
    remote_keys[order[remote] - rows] = np.flatnonzero(remote)
    tables = (send_rows, *np.unique(send_rows, return_inverse=True), local_keys, remote_keys)
    on_device = (torch.as_tensor(table, device=device) for table in tables)
    return GatherTables(moves, gather.most_pairs, len(order), *on_device, intervals, head_groups)


@dataclass(frozen=True)
class MovedBytes:
    """What one rank sends to and receives from other ranks in one attention call."""

    forward_out: int
    forward_in: int
    backward_out: int
    backward_in: int


def moved_bytes(
    plan: AttentionPlan, rank: int, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> MovedBytes:
    """Bytes that an exchange moves for a rank in one call's forward and backward, from its plan alone."""
    value, gradient = dtype.itemsize, accumulation_dtype(dtype).itemsize
    both = plan.ulysses_gather
    fetch, order, heads = plan.fetch, None, kv_heads
    if both is not None:
        fetch, order = both.fetch, both.order
        heads = max(kv_heads, len(order.rank_rows)) // len(order.rank_rows)
    elif plan.ulysses is not None:
        order = plan.ulysses.order
    moved = np.zeros(4, np.int64)
    if plan.ulysses is None:
        # Keys and values come in both passes, their gradients go home in backward.
        row = 2 * heads * head_dim
        there, here = fetch.rows_out * row, fetch.rows_in * row
        moved += (
            there * value, here * value, there * value + here * gradient, here * value + there * gradient
        )  # fmt: skip
    if order is not None:
        rows, team = order.rank_rows, len(order.rank_rows)
        mine, others = int(rows[rank % team]), int(rows.sum() - rows[rank % team])
        query, kv = query_heads // team, 2 * (max(kv_heads, team) // team)
        away, here = mine * (team - 1) * head_dim, others * head_dim  # elements of one head of a shard
        returned = query * value + kv * (gradient if team > kv_heads else value)
        moved += (
            away * (query + kv) * value + here * query * value,
            here * (query + kv) * value + away * query * value,
            away * query * value + here * returned,
            here * query * value + away * returned,
        )
    return MovedBytes(*moved.tolist())


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: AttentionTables,
    group: dist.ProcessGroup | None,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention of every local row over all tokens on its root path, wherever they live. Differentiable.

    Every rank of ``group`` must call it, and its backward, in the same order. A padding row has output 0 and
    gradient 0.

    Args:
        q: [n, Hq, D] with rotary positions applied.
        k, v: [n, Hk, D].
        group: the context-parallel process group; None on a single rank.
        scale: factor on ``q . k``.
        backend: attention kernel; `auto` picks by device, dtype and shape.

    Returns:
        [n, Hq, D] in q's dtype.

    Raises:
        ValueError: for a group of another size than the plan's, or what the kernel, the exchange or the
            transport refuses.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks != tables.world:
        raise ValueError(f"the attention plan is for {tables.world} ranks; the process group has {ranks}")
    transport = None if group is None else transport_for(group, q.device, tables.transport)
    return _TreeAttention.apply(q, k, v, tables.exchange, transport, scale, backend)


def _crosses_ranks(exchange) -> bool:
    """Whether a call moves anything between ranks; the same on all of them."""
    if isinstance(exchange, GatherTables):
        return bool(exchange.moves.counts.any())
    if isinstance(exchange, RingTables):
        return bool(exchange.rounds)
    return len(exchange.shards.moves.counts) > 1


class _TreeAttention(torch.autograd.Function):
    """Exchange and kernel in one piece, whose results activation recompute takes from the forward pass: see `kept`."""

    @staticmethod
    def forward(ctx, q, k, v, tables, transport, scale, backend):
        kernel = partial(attention, scale=scale, backend=backend)
        kind = "exchange" if _crosses_ranks(tables) else "mixer"

        def run() -> tuple[torch.Tensor, ...]:
            if isinstance(tables, GatherTables):
                out, saved = gather_forward(kernel, q, k, v, tables, transport)
                return saved[3:]
            if isinstance(tables, RingTables):
                out, saved = ring_forward(kernel, q, k, v, tables, transport)
                return saved[3:]
            ulysses = ulysses_forward if isinstance(tables, UlyssesTables) else ulysses_gather_forward
            out, saved = ulysses(kernel, q, k, v, tables, transport)
            return out, *saved

        results = kept(kind, run, q)
        in_tokens = isinstance(tables, (GatherTables, RingTables))
        ctx.save_for_backward(*((q, k, v, *results) if in_tokens else results[1:]))
        ctx.tables, ctx.transport, ctx.kv_heads = tables, transport, k.shape[1]
        ctx.kernel_backward = partial(attention_backward, scale=scale, backend=backend)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        arguments = ctx.kernel_backward, ctx.saved_tensors, dout
        if isinstance(ctx.tables, GatherTables):
            grads = gather_backward(*arguments, ctx.tables, ctx.transport)
        elif isinstance(ctx.tables, RingTables):
            grads = ring_backward(*arguments, ctx.tables, ctx.transport)
        elif isinstance(ctx.tables, UlyssesTables):
            grads = ulysses_backward(*arguments, ctx.kv_heads, ctx.tables, ctx.transport)
        else:
            grads = ulysses_gather_backward(*arguments, ctx.kv_heads, ctx.tables, ctx.transport)
        return *(grad.to(dout.dtype) for grad in grads), None, None, None, None
