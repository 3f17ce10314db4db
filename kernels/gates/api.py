"""Gates of a Gated DeltaNet layer, with their gradients.

Shapes: n rows, H value heads, R rows of heads (n H), D size of a head.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from cp_engine.kernels.gates import reference, triton
from cp_engine.kernels.shared import packages

FUSED_DTYPES = (torch.bfloat16, torch.float16)


def why_not(x: torch.Tensor) -> str | None:
    """Why Triton does not compute the gates of rows like these, in the user's words; None when it does."""
    if x.device.type != "cuda":
        return f"needs a GPU; rows are on {x.device}"
    if x.dtype not in FUSED_DTYPES:
        return f"computes bfloat16 and float16; got {x.dtype}"
    return None if packages.installed("triton") else "needs the package triton (pip install triton)"


def choose(x: torch.Tensor) -> str:
    """``triton`` for 16-bit rows on a GPU where Triton is installed, else ``reference``."""
    return "triton" if why_not(x) is None else "reference"


def input_gates(
    a: torch.Tensor, b: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay ``g = -exp(decay_rate) softplus(a + dt_bias)`` [n, H] in float32 and write strength
    ``beta = sigmoid(b)`` [n, H] in the dtype of b.

    Args:
        a: [n, H].
        b: [n, H].
        decay_rate: [H], logarithms.
        dt_bias: [H].
    """
    if choose(a) == "triton":
        return _InputGates.apply(a, b, decay_rate, dt_bias)
    return reference.input_gates(a, b, decay_rate, dt_bias)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * rms_norm(x) * silu(gate)`` over the last axis, in the dtype of x, by Triton.

    The rows are normalised and multiplied by the gate in float32; the normalised row, and what the weight makes of it,
    are rounded where `Qwen3_5RMSNormGated` and `Qwen3NextRMSNormGated` of `transformers` round them. Backward reads x
    and gate again and keeps nothing else; sums of the weight's gradient are float32, in a fixed order.

    Args:
        x: [R, D].
        gate: [R, D].
        weight: [D].
    """
    return _GatedNorm.apply(x, gate, weight, eps)


class _InputGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, decay_rate, dt_bias):
        g, beta = triton.input_gates(a, b, decay_rate, dt_bias)
        ctx.save_for_backward(a, b, decay_rate, dt_bias, g)  # the recurrence keeps g too: no more memory
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx, dg, dbeta):
        return triton.input_gates_backward(*ctx.saved_tensors, dg, dbeta)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps: float):
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return triton.gated_norm(x, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return *triton.gated_norm_backward(*ctx.saved_tensors, ctx.eps, dout), None
