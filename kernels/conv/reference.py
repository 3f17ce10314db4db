"""Causal depthwise convolution over a forest, by index, in eager torch, and the stages of `cp_engine.kernels.conv.api`
made of it.

Shapes: n local rows, m fetched rows, M rows sent to other ranks, N = n + m rows of ``x_ext``, W taps, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cp_engine.kernels.conv.tables import Channels, ConvTables
from cp_engine.kernels.shared.dtypes import accumulation_dtype

NORM_EPS = 1e-6  # of the L2 norms in the models of `transformers`


def _with_zero_row(x: torch.Tensor) -> torch.Tensor:
    dtype = accumulation_dtype(x.dtype)
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


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, as the models of `transformers` normalise q and k."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _split(mixed: torch.Tensor, channels: Channels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, C] after the convolution -> normalised q and k [n, Hk, K] and v [n, H, V]."""
    q, k, v = F.silu(mixed).split(channels.splits, dim=1)
    q, k = (l2_normalise(x.unflatten(1, (channels.key_heads, channels.key_dim))) for x in (q, k))
    return q, k, v.unflatten(1, (channels.value_heads, channels.value_dim))


def _convolved(x, fetched, weight, tables: ConvTables) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with the fetched ones [N, C], and the convolution [n, C] in the accumulation dtype."""
    x_ext = torch.cat([x, fetched])
    return x_ext, conv_forward(x_ext.to(accumulation_dtype(x_ext.dtype)), weight, tables.taps)


def qkv(x, fetched, weight, tables: ConvTables, channels: Channels):
    """See `cp_engine.kernels.conv.api.qkv`."""
    return _split(_convolved(x, fetched(), weight, tables)[1], channels)


def qkv_backward(x, fetched, weight, grads, tables: ConvTables, channels: Channels):
    """See `cp_engine.kernels.conv.api.qkv_backward`; the rows are the local part of the gradient of ``x_ext``."""
    x_ext, mixed = _convolved(x, fetched, weight, tables)
    with torch.enable_grad():
        leaf = mixed.requires_grad_()
        (dmixed,) = torch.autograd.grad(_split(leaf, channels), leaf, grads)
    dx_ext, dweight = conv_backward(x_ext.to(dmixed.dtype), weight, tables.taps, dmixed)
    return dx_ext[: len(x)], dx_ext[len(x) :], dweight


def rows_backward(rows, home, dtype: torch.dtype, weight, tables: ConvTables) -> torch.Tensor:
    """See `cp_engine.kernels.conv.api.rows_backward`."""
    return rows.index_add(0, tables.sent, home()).to(dtype)
