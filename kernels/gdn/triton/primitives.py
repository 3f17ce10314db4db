"""Tile sizes and loads that the kernels of the state pass and of its gradients share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.kernels.attention.triton.compiler import tl, triton


@dataclass(frozen=True)
class Sizes:
    """Launch options of a kernel."""

    columns: int  # state columns of a program
    warps: int
    stages: int  # depth of the software pipeline


# A program holds K x columns of the state in float32 registers. Compiled for sm_90 these spill nothing (64 columns with
# 4 warps do in the backward); no option has been timed yet.
STATE = Sizes(32, 4, 2)
# float32 products are exact (no tf32), without matrix units: more columns spill.
FLOAT32 = Sizes(16, 8, 1)


def state_sizes(value_dim: int, dtype: torch.dtype) -> Sizes:
    """Sizes of the state pass and its backward."""
    chosen = FLOAT32 if dtype == torch.float32 else STATE
    return Sizes(min(chosen.columns, padded(value_dim)), chosen.warps, chosen.stages)


def padded(size: int) -> int:
    """A power of two that matrix units accept."""
    return max(16, triton.next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


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
