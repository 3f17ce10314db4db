"""Tile sizes, loads and masks that the kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.kernels.shared.triton import tl, triton

HOPPER = 9


@dataclass(frozen=True)
class Sizes:
    """Launch options of a kernel."""

    columns: int  # state columns of a program
    warps: int
    stages: int  # depth of the software pipeline


def on_hopper(device: torch.device) -> bool:
    """Whether kernels get the launch options tuned for Hopper. The interpreter, on a CPU, runs those too."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == HOPPER


@triton.jit
def load_rows(source, start, row, head, column, live, HEADS: tl.constexpr, D: tl.constexpr):
    """Rows start + row of one head, [len(row), len(column)]; zero where not ``live`` and beyond D."""
    at = source + start * (HEADS * D) + head * D + row[:, None] * (HEADS * D) + column[None, :]
    return tl.load(at, mask=live[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def load_columns(source, start, row, head, column, live, HEADS: tl.constexpr, D: tl.constexpr):
    """`load_rows` transposed by its addresses, [len(column), len(row)]: no product reads a transposed register."""
    at = source + start * (HEADS * D) + head * D + row[None, :] * (HEADS * D) + column[:, None]
    return tl.load(at, mask=live[None, :] & (column < D)[:, None], other=0.0)


@triton.jit
def load_each(source, start, row, head, live, HEADS: tl.constexpr):
    """One number of each row for a head, [len(row)], zero where not ``live``."""
    return tl.load(source + start * HEADS + head + row * HEADS, mask=live, other=0.0)


@triton.jit
def load_seen(ancestors, start, row, live):
    """[i, j]: whether token j of the chunk is i or above it on its root path."""
    bits = tl.load(ancestors + start + row, mask=live, other=0)
    return ((bits[:, None] >> tl.cast(row, tl.int64)[None, :]) & 1) != 0


@triton.jit
def load_seers(ancestors, start, row, live):
    """`load_seen` transposed, [j, i]."""
    bits = tl.load(ancestors + start + row, mask=live, other=0)
    return ((bits[None, :] >> tl.cast(row, tl.int64)[:, None]) & 1) != 0


@triton.jit
def decay_between(later, earlier, seen):
    """2^(later - earlier) where ``seen``, else 0. Masked before the exponential: elsewhere it may overflow."""
    return tl.where(seen, tl.exp2(tl.where(seen, later - earlier, 0.0)), 0.0)
