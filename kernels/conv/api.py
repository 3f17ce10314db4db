"""Causal depthwise convolution over a forest: the last W inputs of the root path, not of memory.

Shapes: n local rows, m fetched rows, W taps, C channels, F fragments. The output has no activation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cp_engine.kernels.conv.reference import conv_backward, conv_forward


@dataclass(frozen=True, eq=False)
class ConvTables:
    """Which rows each output row reads; made once per pack."""

    taps: torch.Tensor  # int64 [n, W] row of x_ext for each tap, oldest first; n + m reads zero
    width: int


def conv_tables(
    fragment_row: np.ndarray, history: np.ndarray, rows: int, fetched: int, device: torch.device | str = "cpu"
) -> ConvTables:
    """Tap tables of one rank.

    Args:
        fragment_row: int [F + 1] row boundaries of the fragments. Rows after the last one are padding and give zero.
        history: int [F, W - 1] rows above each fragment's first row, oldest first; -1 above a root.
        rows: n, padding row included.
        fetched: m.
    """
    width = history.shape[1] + 1
    zero = rows + fetched
    taps = np.full((rows, width), zero, np.int64)
    used = np.arange(int(fragment_row[-1]))
    fragment = np.repeat(np.arange(len(history)), np.diff(fragment_row))
    offset = used - np.asarray(fragment_row)[fragment]
    for tap in range(width):
        back = width - 1 - tap
        above = history[fragment, np.minimum(offset + tap, width - 2)] if width > 1 else used
        taps[used, tap] = np.where(offset >= back, used - back, np.where(above < 0, zero, above))
    return ConvTables(torch.as_tensor(taps, device=device), width)


class _TreeConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ext: torch.Tensor, weight: torch.Tensor, tables: ConvTables) -> torch.Tensor:
        ctx.save_for_backward(x_ext, weight)
        ctx.tables = tables
        return conv_forward(x_ext, weight, tables.taps)

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        x_ext, weight = ctx.saved_tensors
        return *conv_backward(x_ext, weight, ctx.tables.taps, dout), None


def tree_conv(x_ext: torch.Tensor, weight: torch.Tensor, tables: ConvTables) -> torch.Tensor:
    """Convolve along root paths; differentiable in ``x_ext`` and ``weight``.

    Args:
        x_ext: [n + m, C] local rows, then fetched history rows.
        weight: [C, W]; tap W - 1 multiplies the token itself, as in a causal torch Conv1d.

    Returns:
        [n, C] in the dtype of ``x_ext``; sums are in float32, or float64 for float64.

    Raises:
        ValueError: if ``weight`` has another number of taps than the plan or of channels than ``x_ext``.
    """
    if weight.shape != (x_ext.shape[1], tables.width):
        raise ValueError(
            f"the convolution weight must be [channels, taps] = [{x_ext.shape[1]}, {tables.width}], got "
            f"{list(weight.shape)}: plan with conv_width equal to the model's convolution width"
        )
    return _TreeConv.apply(x_ext, weight, tables)
