"""Bytes that a rank sends to others in one pack's forward and backward, from its plan alone.

Activation recompute sends nothing again. e is an element's size, a that of the accumulation dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.layers.attention import moved_bytes
from cp_engine.layers.gdn_tables import GdnHeads
from cp_engine.sharding.cost import ModelShape
from cp_engine.sharding.exchange.rows import accumulation_dtype
from cp_engine.sharding.gdn_plan import GdnPlan
from cp_engine.sharding.plan import ShardPlan


@dataclass(frozen=True, kw_only=True)
class ExchangedSizes:
    """Sizes of a model that its exchanges depend on."""

    shape: ModelShape
    gdn_heads: GdnHeads | None  # None for a model without GDN layers
    gdn_runs: int  # runs of consecutive GDN layers
    dtype: torch.dtype


def attention_bytes(plan: ShardPlan, sizes: ExchangedSizes) -> int:
    """Of all softmax-attention layers."""
    shape, total = sizes.shape, 0
    full_layers = shape.attention_layers - shape.window_layers
    for attention, layers in ((plan.attention, full_layers), (plan.window_attention, shape.window_layers)):
        if layers:
            moved = moved_bytes(attention, plan.rank, shape.query_heads, shape.kv_heads, shape.head_dim, sizes.dtype)
            total += layers * (moved.forward_out + moved.backward_out)
    return total


def gdn_bytes(plan: ShardPlan, sizes: ExchangedSizes) -> int:
    """Of all GDN layers, and of the hidden states that move into their layout and back."""
    if plan.gdn is None or sizes.gdn_heads is None:
        return 0
    of_layer = _affine_bytes if plan.gdn.order is None else _ulysses_bytes
    total = sizes.shape.gdn_layers * of_layer(plan.gdn, plan.rank, sizes.gdn_heads, sizes.dtype)
    if plan.relayout is not None:
        # There and back, and so their gradients.
        rows = 2 * int(plan.relayout.send_counts.sum() + plan.relayout.recv_counts.sum())
        total += sizes.gdn_runs * rows * sizes.shape.hidden * sizes.dtype.itemsize
    return total


def head_bytes(plan: ShardPlan, sizes: ExchangedSizes) -> int:
    """Of hidden states to the ranks that score what they predict, and of their gradients."""
    moved = plan.loss.hidden
    return int(moved.send_counts.sum() + moved.recv_counts.sum()) * sizes.shape.hidden * sizes.dtype.itemsize


def _affine_bytes(plan: GdnPlan, rank: int, heads: GdnHeads, dtype: torch.dtype) -> int:
    """History rows and states that are handed on, and the gradients of both; or for these states affine maps to the
    ranks that fold a head, states back, and both gradients."""
    e, a = dtype.itemsize, accumulation_dtype(dtype).itemsize
    fetch, fold, count = plan.history_fetch, plan.fold, heads.value_heads
    history = heads.channels * (fetch.rows_out * e + fetch.rows_in * a)
    state, transition = heads.key_dim * heads.value_dim, heads.key_dim**2
    if plan.rounds or not fold.rounds:
        return history + a * count * state * sum(each.moves.rows_out + each.moves.rows_in for each in plan.rounds)
    world = len(fold.exit_counts)
    folded = count * (rank + 1) // world - count * rank // world  # heads that this rank folds, as `FoldTables` says
    exits, entries = int(fold.exit_counts[rank]), int(fold.entry_counts[rank])
    through = int((plan.exit_entry >= 0).sum())
    to_owners = (count - folded) * ((exits + entries) * state + through * transition)
    others = int(fold.exit_counts.sum() + fold.entry_counts.sum()) - exits - entries
    return history + a * (to_owners + folded * others * state)


def _ulysses_bytes(plan: GdnPlan, rank: int, heads: GdnHeads, dtype: torch.dtype) -> int:
    """Channels and gates to head shards and outputs back, then the same for their gradients."""
    e, a = dtype.itemsize, accumulation_dtype(dtype).itemsize
    rows, world = plan.order.rank_rows, len(plan.order.rank_rows)
    away = int(rows[rank]) * (world - 1)  # own rows, to every other shard
    back = int(rows.sum() - rows[rank])  # the others' rows of the own shard
    values = heads.value_heads // world
    share = 2 * max(1, heads.key_heads // world) * heads.key_dim + values * heads.value_dim
    there = share * e + 2 * values * a
    return (away + back) * (there + values * heads.value_dim * e)
