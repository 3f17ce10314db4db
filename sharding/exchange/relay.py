"""Moving hidden states of tokens to other ranks or other places, and their gradients back.

Shapes: n local rows before the move, m after it (padding rows included), C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.autograd.function import once_differentiable

from cp_engine.sharding.exchange.kept import kept
from cp_engine.sharding.exchange.rows import all_to_all_rows, put_rows
from cp_engine.sharding.relayout import Relayout


@dataclass(frozen=True, eq=False)
class RelayTables:
    """A `Relayout` ready to execute: row indices on the device, counts on the host."""

    rows_before: int  # n
    rows_after: int  # m
    moved: int  # of all ranks
    stay_from: torch.Tensor  # int64
    stay_to: torch.Tensor  # int64
    send_rows: torch.Tensor  # int64
    send_counts: list[int]
    recv_rows: torch.Tensor  # int64
    recv_counts: list[int]

    @cached_property
    def back(self) -> RelayTables:
        """The inverse move."""
        return RelayTables(
            rows_before=self.rows_after,
            rows_after=self.rows_before,
            moved=self.moved,
            stay_from=self.stay_to,
            stay_to=self.stay_from,
            send_rows=self.recv_rows,
            send_counts=self.recv_counts,
            recv_rows=self.send_rows,
            recv_counts=self.send_counts,
        )

    @property
    def whole_after(self) -> bool:
        """Whether every row after the move comes from somewhere; others are zero."""
        return len(self.stay_to) + sum(self.recv_counts) == self.rows_after


def relay_tables(plan: Relayout, device: torch.device | str = "cpu") -> RelayTables:
    def rows(array) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    return RelayTables(
        rows_before=plan.rows_before,
        rows_after=plan.rows_after,
        moved=plan.moved,
        stay_from=rows(plan.stay_from),
        stay_to=rows(plan.stay_to),
        send_rows=rows(plan.send_rows),
        send_counts=plan.send_counts.tolist(),
        recv_rows=rows(plan.recv_rows),
        recv_counts=plan.recv_counts.tolist(),
    )


def relay_rows(x: torch.Tensor, tables: RelayTables, group) -> torch.Tensor:
    """This rank's rows after the move: [n, C] -> [m, C]. Differentiable.

    Every rank of ``group`` must call it, and call backward. Rows and gradients move bit by bit in their own dtype: each
    row goes to one place, so nothing is added. A padding row after the move is zero, and so is the gradient of a row
    that goes nowhere.
    """
    return _Relay.apply(x, tables, group)


class _Relay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, tables: RelayTables, group) -> torch.Tensor:
        ctx.tables, ctx.group = tables, group
        (moved,) = kept("exchange", lambda: (_move(x, tables, group),), x)
        return moved

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        return _move(dy, ctx.tables.back, ctx.group), None, None


def _move(x: torch.Tensor, tables: RelayTables, group) -> torch.Tensor:
    assert len(x) == tables.rows_before, f"{len(x)} rows where the plan has {tables.rows_before}"
    if not tables.moved and tables.whole_after:
        return x.index_select(0, tables.stay_from)  # ``stay_to`` ascends
    make = x.new_empty if tables.whole_after else x.new_zeros
    out = make((tables.rows_after, *x.shape[1:]))
    put_rows(x.index_select(0, tables.stay_from), tables.stay_to, out)
    if not tables.moved:
        return out
    packed = x.index_select(0, tables.send_rows)
    return put_rows(all_to_all_rows(packed, tables.send_counts, tables.recv_counts, group), tables.recv_rows, out)
