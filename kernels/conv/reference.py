"""Causal depthwise convolution over a forest, by index, in eager torch.

Shapes: n local rows, N rows of ``x_ext``, W taps, C channels.
"""

from __future__ import annotations

import torch


def _with_zero_row(x: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.cat([x.to(dtype), x.new_zeros((1, x.shape[1]), dtype=dtype)])


def conv_forward(x_ext: torch.Tensor, weight: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """[N, C], [C, W], int64 [n, W] -> [n, C] in the dtype of ``x_ext``; sums in the accumulation dtype."""
    x = _with_zero_row(x_ext)
    out = x.new_zeros((taps.shape[0], x.shape[1]))
    for tap in range(taps.shape[1]):
        out.addcmul_(x[taps[:, tap]], weight[:, tap].to(x.dtype))
    return out.to(x_ext.dtype)


def conv_backward(
    x_ext: torch.Tensor, weight: torch.Tensor, taps: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``x_ext`` [N, C] and ``weight`` [C, W], each in its own dtype.

    Siblings read the same history rows; their gradients add up in the accumulation dtype.
    """
    x = _with_zero_row(x_ext)
    dout = dout.to(x.dtype)
    dx = torch.zeros_like(x)
    dweight = []
    for tap in range(taps.shape[1]):
        dx.index_add_(0, taps[:, tap], dout * weight[:, tap].to(x.dtype))
        dweight.append((dout * x[taps[:, tap]]).sum(0))
    return dx[:-1].to(x_ext.dtype), torch.stack(dweight, dim=1).to(weight.dtype)
