"""Times of the element-wise kernels of a Gated DeltaNet layer under several launch options.

Each option is a tuple of constants of the kernels' module, the present ones first; its results are compared with those
of the first.

Shapes: T tokens, C channels of the convolution, H value heads, V size of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from unittest import mock

import torch

from benchmarks.clock import median_ms
from benchmarks.gdn_stages import tensors_in
from cp_engine.kernels.conv import triton as conv
from cp_engine.kernels.gates import triton as gates
from cp_engine.layers.gdn_tables import GdnHeads, GdnTables

# Stages whose launches read these constants, and what to try besides the values that they have.
OPTIONS: dict[str, tuple[ModuleType, tuple[str, ...], list[tuple[int, ...]]]] = {
    "qkv": (conv, ("ROWS", "WARPS"), [(32, 4), (16, 2), (8, 1)]),
    "qkv_backward": (
        conv,
        ("VALUE_ROWS", "VALUE_WARPS", "SPLITS"),
        [(8, 1, 128), (8, 1, 512), (4, 1, 256), (16, 2, 128), (32, 4, 64)],
    ),
    "rows_backward": (conv, ("ROWS", "WARPS"), [(32, 4), (8, 2), (8, 1)]),
    "norm": (gates, ("ROWS", "WARPS"), [(16, 4), (16, 2), (64, 8)]),
    "norm_backward": (
        gates,
        ("BACKWARD_ROWS", "WARPS", "NORM_PROGRAMS"),
        [(16, 4, 1024), (16, 4, 16384), (8, 4, 4096), (8, 2, 8192), (32, 4, 4096)],
    ),
}
ROUNDING = 1e-2  # relative root mean square of results that are rounded to bf16 at other places


def stage_calls(
    weight: torch.Tensor, tables: GdnTables, heads: GdnHeads, eps: float
) -> dict[str, Callable[[], object]]:
    """The stages on random rows; ``weight`` [C, W] gives device and dtype."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=weight.device, generator=made).to(weight.dtype)

    made = torch.Generator(weight.device).manual_seed(0)
    rows, channels = tables.mixed_rows, heads.of_channels
    x, dy = normal(rows, heads.channels), normal(rows, heads.channels)
    keys, values = (rows, heads.key_heads, heads.key_dim), (rows, heads.value_heads, heads.value_dim)
    grads = tuple(normal(*shape) for shape in (keys, keys, values))
    nothing = x.new_empty((0, x.shape[1]))
    o, z, dout = (normal(rows * heads.value_heads, heads.value_dim) for _ in range(3))
    scale = normal(heads.value_dim)
    return {
        "qkv": lambda: conv.qkv(x, lambda: nothing, weight, tables.conv, channels),
        "qkv_backward": lambda: conv.qkv_backward(x, nothing, weight, grads, tables.conv, channels),
        "rows_backward": lambda: conv.rows_backward(dy, lambda: nothing, dy.dtype, weight, tables.conv),
        "norm": lambda: gates.gated_norm(o, z, scale, eps),
        "norm_backward": lambda: gates.gated_norm_backward(o, z, scale, eps, dout),
    }


def differs(found, truth) -> float:
    """Largest relative root mean square between results."""
    pairs = zip(tensors_in(found), tensors_in(truth), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs if b.numel())


def time_options(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, dict[tuple, float | None]]:
    """Median ms of every stage under each of its options; None where the results are others."""
    found: dict[str, dict[tuple, float | None]] = {}
    for stage, (module, names, options) in OPTIONS.items():
        present = tuple(getattr(module, name) for name in names)
        truth, found[stage] = calls[stage](), {}
        for option in (present, *options):
            with mock.patch.multiple(module, **dict(zip(names, option, strict=True))):
                right = differs(calls[stage](), truth) <= ROUNDING
                found[stage][option] = median_ms(calls[stage], device) if right else None
    return found


def show_options(found: dict[str, dict[tuple, float | None]]) -> None:
    for stage, times in found.items():
        names = ", ".join(OPTIONS[stage][1])
        shown = "  ".join(f"{option} {'wrong' if ms is None else f'{ms:.3f}'}" for option, ms in times.items())
        print(f"{stage} ({names}): {shown}")
