"""All rows for a share of the channels: the exchange between token shards and head shards, for recurrent layers.

Shapes: n local rows, N rows of all ranks (padding included), T tokens, P ranks, c channels of one rank's share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from cp_engine.sharding.exchange.kept import kept
from cp_engine.sharding.exchange.rows import accumulation_dtype, all_to_all_rows
from cp_engine.sharding.row_exchange import TokenOrder


@dataclass(frozen=True, eq=False)
class HeadTables:
    """A `TokenOrder` ready to execute on one rank."""

    rank: int
    rank_rows: list[int]
    dfs_order: torch.Tensor  # int64 [T]

    @property
    def world(self) -> int:
        return len(self.rank_rows)

    @property
    def rows(self) -> int:
        return self.rank_rows[self.rank]


def head_tables(order: TokenOrder, rank: int, device: torch.device | str = "cpu") -> HeadTables:
    return HeadTables(rank, order.rank_rows.tolist(), torch.as_tensor(order.dfs_order, device=device))


def _collect(x: torch.Tensor, tables: HeadTables, group) -> torch.Tensor:
    """[n, P, c] -> [T, c]: my share of the channels, tokens in depth-first order."""
    sent = x.transpose(0, 1).reshape(-1, x.shape[2])
    return all_to_all_rows(sent, [tables.rows] * tables.world, tables.rank_rows, group)[tables.dfs_order]


def _spread(y: torch.Tensor, tables: HeadTables, group) -> torch.Tensor:
    """[T, c] -> [n, P, c]: the adjoint of `_collect`; zero on padding rows."""
    rows = y.new_zeros((sum(tables.rank_rows), y.shape[1]))
    rows[tables.dfs_order] = y
    received = all_to_all_rows(rows, tables.rank_rows, [tables.rows] * tables.world, group)
    return received.view(tables.world, tables.rows, y.shape[1]).transpose(0, 1)


class _RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, columns: torch.Tensor, tables: HeadTables, group) -> torch.Tensor:
        ctx.save_for_backward(columns)
        ctx.tables, ctx.group, ctx.channels = tables, group, x.shape[1]
        (share,) = kept("exchange", lambda: (_collect(x[:, columns], tables, group),), x)
        return share

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        (columns,) = ctx.saved_tensors
        dx = _spread(dy, ctx.tables, ctx.group).to(accumulation_dtype(dy.dtype))
        # Ranks that share a key head both return a gradient for it: one rank at a time, so that the order is fixed.
        total = dx.new_zeros((dx.shape[0], ctx.channels))
        for own, part in zip(columns, dx.unbind(1), strict=True):
            total[:, own] += part
        return total.to(dy.dtype), None, None, None


class _HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: torch.Tensor, tables: HeadTables, group) -> torch.Tensor:
        ctx.tables, ctx.group = tables, group
        (rows,) = kept("exchange", lambda: (_spread(y, tables, group),), y)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: torch.Tensor):
        return _collect(dx, ctx.tables, ctx.group), None, None


def rows_to_heads(x: torch.Tensor, columns: torch.Tensor, tables: HeadTables, group) -> torch.Tensor:
    """[n, channels] of this rank's rows -> [T, c] of all tokens, in depth-first order. Differentiable.

    Args:
        columns: int64 [P, c] channels that each rank gets; a channel may go to several ranks.
    """
    return _RowsToHeads.apply(x, columns, tables, group)


def heads_to_rows(y: torch.Tensor, tables: HeadTables, group) -> torch.Tensor:
    """[T, c] of all tokens -> [n, P, c] of this rank's rows, shares in rank order. Differentiable."""
    return _HeadsToRows.apply(y, tables, group)
