"""Moving the hidden states of all tokens from one layout to another, and their gradients back.

Shapes: n local rows before the move, m after it (padding rows included), C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from cp_engine.sharding.exchange.kept import kept
from cp_engine.sharding.exchange.rows import all_to_all_rows
from cp_engine.sharding.relayout import Relayout


@dataclass(frozen=True, eq=False)
class RelayTables:
    """A `Relayout` ready to execute: row indices on the device, counts on the host."""

    rows_before: int  # n
    rows_after: int  # m
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
            stay_from=self.stay_to,
            stay_to=self.stay_from,
            send_rows=self.recv_rows,
            send_counts=self.recv_counts,
            recv_rows=self.send_rows,
            recv_counts=self.send_counts,
        )

    @property
    def padded_after(self) -> bool:
        """Whether the one row after the move is a padding row."""
        return not (len(self.stay_to) or sum(self.recv_counts))


def relay_tables(plan: Relayout, device: torch.device | str = "cpu") -> RelayTables:
    def rows(array) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    return RelayTables(
        rows_before=plan.rows_before,
        rows_after=plan.rows_after,
        stay_from=rows(plan.stay_from),
        stay_to=rows(plan.stay_to),
        send_rows=rows(plan.send_rows),
        send_counts=plan.send_counts.tolist(),
        recv_rows=rows(plan.recv_rows),
        recv_counts=plan.recv_counts.tolist(),
    )


def relay_rows(x: torch.Tensor, tables: RelayTables, group) -> torch.Tensor:
    """Rows of this rank's tokens in the layout after the move: [n, C] -> [m, C]. Differentiable.

    Every rank of ``group`` must call it, and call backward. Rows and gradients move bit by bit in their own dtype: each
    token has one row in either layout, so nothing is added. A padding row is zero after the move, and so is its
    gradient before it.
    """
    return _Relay.apply(x, tables, group)


class _Relay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, tables: RelayTables, group) -> torch.Tensor:
        ctx.tables, ctx.group = tables, group
        (moved,) = kept("exchange", lambda: (_move(x, tables, group),), x)
        return moved

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        return _move(dy, ctx.tables.back, ctx.group), None, None


def _move(x: torch.Tensor, tables: RelayTables, group) -> torch.Tensor:
    assert len(x) == tables.rows_before, f"{len(x)} rows where the plan has {tables.rows_before}"
    received = all_to_all_rows(x.index_select(0, tables.send_rows), tables.send_counts, tables.recv_counts, group)
    make = x.new_zeros if tables.padded_after else x.new_empty
    out = make((tables.rows_after, *x.shape[1:]))
    out.index_copy_(0, tables.stay_to, x.index_select(0, tables.stay_from))
    return out.index_copy_(0, tables.recv_rows, received)
