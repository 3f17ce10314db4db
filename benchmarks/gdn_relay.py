"""Moves of hidden states around a run of GDN layers that have a layout of their own, beside the prediction.

Shapes: n local rows before a move, m after it, C hidden size.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from benchmarks.attention_ranks import layer_times
from cp_engine.sharding.cost import H200, ModelShape
from cp_engine.sharding.exchange.relay import relay_rows, relay_tables
from cp_engine.sharding.gdn_layout import PlacedLayers
from cp_engine.sharding.layer_time import relay_time
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.measure import rows_moved
from cp_engine.sharding.relayout import relayout

NO_MOVES = {"relay_ms": None, "predicted_relay_ms": None, "relay_right": None}


class Run:
    """Both borders of a run, with nothing between them, in the shape of a benchmarked layer."""

    def __init__(self, before: Layout, after: Layout, hidden: int, device: torch.device, dtype: torch.dtype):
        self.problem = SimpleNamespace(device=device)
        self.tables = relay_tables(relayout(before, after, dist.get_rank()), device)
        shape = (self.tables.rows_before, hidden)
        self.x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn(shape, device=device, dtype=dtype)
        self.tokens = int(before.rank_token_count[dist.get_rank()])

    def forward(self) -> None:
        group = dist.group.WORLD
        self.y = relay_rows(relay_rows(self.x, self.tables, group), self.tables.back, group)

    def backward(self) -> None:
        (self.dx,) = torch.autograd.grad(self.y, self.x, self.dy)

    def right(self) -> bool:
        """Whether all ranks have their rows and gradients back, bit for bit."""
        rows = slice(self.tokens)
        same = torch.equal(self.y[rows], self.x[rows]) and torch.equal(self.dx[rows], self.dy[rows])
        agreed = torch.tensor(int(same), device=self.x.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed)


def measure_moves(placed: PlacedLayers, model: ModelShape, device: torch.device, dtype: torch.dtype) -> dict:
    """Forward and backward of both borders of one run, ms of the slowest rank, `NO_MOVES` where there is one layout.

    Every rank must call it.
    """
    if placed.gdn_layout is None:
        return NO_MOVES
    run = Run(placed.layout, placed.gdn_layout, model.hidden, device, dtype)
    times = layer_times(run)
    parts = relay_time(rows_moved(placed.layout, placed.gdn_layout), model, H200)
    return {
        "relay_ms": round(times.layer, 3),
        "predicted_relay_ms": round(sum(int(part.total.max()) for part in parts) / 1e6, 3),
        "relay_right": run.right(),
    }
