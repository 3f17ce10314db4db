"""Tree attention over context-parallel ranks: an exchange and a kernel as one differentiable operation.

Shapes: n local rows (the padding row of an empty rank included), Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from cp_engine.kernels.attention import Intervals, attention, attention_backward
from cp_engine.sharding.attention_plan import AttentionPlan
from cp_engine.sharding.exchange.gather import GatherTables, gather_backward, gather_forward
from cp_engine.sharding.exchange.ring import RingTables, ring_backward, ring_forward
from cp_engine.sharding.exchange.rows import row_tables
from cp_engine.sharding.exchange.ulysses import UlyssesTables, ulysses_backward, ulysses_forward


@dataclass(frozen=True)
class AttentionTables:
    """An `AttentionPlan` on a device. Made once for a pack and used by all its attention layers."""

    world: int
    exchange: GatherTables | RingTables | UlyssesTables


def attention_tables(plan: AttentionPlan, rank: int, device: torch.device | str = "cpu") -> AttentionTables:
    """Put one rank's plan on a device."""
    on_device = partial(Intervals.from_arrays, device=device)
    world = len(plan.fetch.send_counts)
    if plan.gather is not None:
        order = torch.as_tensor(plan.gather.key_order, device=device)
        fetch = row_tables(plan.fetch, device)
        return AttentionTables(world, GatherTables(fetch, order, on_device(plan.gather.intervals)))
    if plan.ring is not None:
        intervals = tuple(on_device(part) for part in plan.ring.intervals)
        return AttentionTables(world, RingTables(rank, row_tables(plan.fetch, device), intervals))
    assert plan.ulysses is not None
    order = plan.ulysses.order
    tokens = torch.as_tensor(order.dfs_order, device=device)
    intervals = on_device(plan.ulysses.intervals)
    return AttentionTables(world, UlyssesTables(rank, order.rank_rows.tolist(), tokens, intervals))


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
        ValueError: for a group of another size than the plan's, or what the kernel or the exchange refuses.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks != tables.world:
        raise ValueError(f"the attention plan is for {tables.world} ranks; the process group has {ranks}")
    return _TreeAttention.apply(q, k, v, tables.exchange, group, scale, backend)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, tables, group, scale, backend):
        kernel = partial(attention, scale=scale, backend=backend)
        if isinstance(tables, GatherTables):
            out, saved = gather_forward(kernel, q, k, v, tables, group)
        elif isinstance(tables, RingTables):
            out, saved = ring_forward(kernel, q, k, v, tables, group)
        else:
            out, saved = ulysses_forward(kernel, q, k, v, tables, group)
        ctx.save_for_backward(*saved)
        ctx.tables, ctx.group, ctx.kv_heads = tables, group, k.shape[1]
        ctx.kernel_backward = partial(attention_backward, scale=scale, backend=backend, accumulate=True)
        return out

    @staticmethod
    def backward(ctx, dout):
        arguments = ctx.kernel_backward, ctx.saved_tensors, dout
        if isinstance(ctx.tables, GatherTables):
            grads = gather_backward(*arguments, ctx.tables, ctx.group)
        elif isinstance(ctx.tables, RingTables):
            grads = ring_backward(*arguments, ctx.tables, ctx.group)
        else:
            grads = ulysses_backward(*arguments, ctx.kv_heads, ctx.tables, ctx.group)
        return *(grad.to(dout.dtype) for grad in grads), None, None, None, None
