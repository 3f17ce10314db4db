"""Causal depthwise convolution over a forest: the last W inputs of the root path, not of memory.

`qkv` and `qkv_backward` are the stages of a Gated DeltaNet layer: convolution, SiLU, and L2 norm of q and k, without an
autograd graph, so that a layer sends fetched rows' gradients home in the middle.

Shapes: n local rows, m fetched rows, M rows sent to other ranks, W taps, C channels, F fragments; Hk key heads and
H value heads of sizes K and V, C = 2 Hk K + H V in the order [q | k | v].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from cp_engine.kernels.conv.tables import Channels, ConvTables

BACKENDS = {"reference": "cp_engine.kernels.conv.reference", "triton": "cp_engine.kernels.conv.triton"}


class RowGradients(NamedTuple):
    """Gradients of `qkv` before those that other ranks hold for this rank's rows have come home."""

    rows: torch.Tensor  # what `rows_backward` of the same backend takes
    fetched: torch.Tensor  # [m, C] in the accumulation dtype
    weight: torch.Tensor  # [C, W] in the weight's dtype


def qkv(
    x: torch.Tensor,
    fetched: Callable[[], torch.Tensor],
    weight: torch.Tensor,
    tables: ConvTables,
    channels: Channels,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised q and k [n, Hk, K] and v [n, H, V] of projections x [n, C].

    ``reference`` returns the accumulation dtype, ``triton`` that of x. Rows outside fragments are zero.

    Args:
        fetched: gives the rows of other ranks [m, C]; called late.
        weight: [C, W].

    Raises:
        ValueError: if ``weight`` has another number of taps than the plan or of channels than x.
    """
    _check_weight(weight, x.shape[1], tables)
    return _backend(backend).qkv(x, fetched, weight, tables, channels)


def qkv_backward(
    x: torch.Tensor,
    fetched: torch.Tensor,
    weight: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: ConvTables,
    channels: Channels,
    backend: str,
) -> RowGradients:
    """First half of the backward; ``grads`` are those of q, k and v."""
    return RowGradients(*_backend(backend).qkv_backward(x, fetched, weight, grads, tables, channels))


def rows_backward(
    gradients: RowGradients,
    home: Callable[[], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    tables: ConvTables,
    backend: str,
) -> torch.Tensor:
    """Gradient of x [n, C], in its dtype. Every row's contributions add up in a fixed order in the accumulation dtype.

    Args:
        home: gives what came back for the rows that were sent [M, C], accumulation dtype; called late.
    """
    return _backend(backend).rows_backward(gradients.rows, home, x.dtype, weight, tables)


def _backend(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name])


def _check_weight(weight: torch.Tensor, channels: int, tables: ConvTables) -> None:
    if weight.shape != (channels, tables.width):
        raise ValueError(
            f"the convolution weight must be [channels, taps] = [{channels}, {tables.width}], got "
            f"{list(weight.shape)}: plan with conv_width equal to the model's convolution width"
        )
