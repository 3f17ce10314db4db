"""Moving token rows between ranks, and bringing their gradients back.

Shapes: n local rows, K_out rows sent, K_in rows received; trailing axes are free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_engine.sharding.exchange.transport import Part, Transport, ship
from cp_engine.sharding.exchange.waits import waiting
from cp_engine.sharding.row_exchange import Moves, RowExchange


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class RowTables:
    """A `RowExchange` ready to execute."""

    moves: Moves
    send_rows: torch.Tensor  # int64 [K_out]


def row_tables(exchange: RowExchange, device: torch.device | str = "cpu") -> RowTables:
    return RowTables(exchange.moves, torch.as_tensor(exchange.send_rows, device=device))


WIDE = torch.complex128  # the widest dtype: 16 bytes an element


def take_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``x[rows]`` into ``out``: [n, .., D] -> [len(rows), .., D], each of any strides; bits are copied, not numbers."""
    if x.dtype == out.dtype and _can_widen(x) and _can_widen(out):
        x, wide = x.view(WIDE), out.view(WIDE)
        torch.index_select(x, 0, rows, out=wide)
        return out
    return torch.index_select(x, 0, rows, out=out)


def put_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out[rows] = x``: [len(rows), .., D] into [n, .., D], no row twice, each of any strides; bits are copied."""
    if x.dtype == out.dtype and _can_widen(x) and _can_widen(out):
        out.view(WIDE).index_copy_(0, rows, x.view(WIDE))
        return out
    return out.index_copy_(0, rows, x)


def _can_widen(x: torch.Tensor) -> bool:
    times = WIDE.itemsize // x.element_size()
    spans = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
    return x.stride(-1) == 1 and all(span % times == 0 for span in spans) and x.data_ptr() % WIDE.itemsize == 0


def all_to_all_rows(x: torch.Tensor, send_counts: list[int], recv_counts: list[int], group) -> torch.Tensor:
    """All-to-all-v along the first axis. ``group`` None means a single rank, which moves nothing."""
    out = x.new_empty((sum(recv_counts), *x.shape[1:]))
    if group is None:
        return out.copy_(x)
    x = x.contiguous()
    with waiting(x.device):
        dist.all_to_all_single(out, x, recv_counts, send_counts, group=group)
    return out


def fetch_rows_raw(x: torch.Tensor, tables: RowTables, transport: Transport | None) -> torch.Tensor:
    """Rows of the peers that this rank needs: [n, ...] -> [K_in, ...]. Not differentiable; every rank must call it."""
    part = Part(tables.moves, tuple(x.shape[1:]))
    (rows,) = ship([part], [lambda out: take_rows(x, tables.send_rows, out)], x, transport)
    return rows


def send_rows_home(grad: torch.Tensor, tables: RowTables, transport: Transport | None) -> torch.Tensor:
    """Gradients of fetched rows to their owners: [K_in, ...] -> [K_out, ...] for ``send_rows``, peers in rank order."""
    part = Part(tables.moves.back, tuple(grad.shape[1:]))
    (rows,) = ship([part], [lambda out: out.copy_(grad)], grad, transport)
    return rows
