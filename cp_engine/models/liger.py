"""Liger's kernels for norms, SwiGLU and rotary embeddings of a `transformers` model; modules and weights stay.

Its own `apply_liger_kernel_to_*` would replace experts and classes too, and refuses rotary embeddings of a part of the
head (Qwen3.5), which its function computes. Its fused losses are not used: the head is ours.
"""

from __future__ import annotations

import os
import sys
from types import MethodType

import torch
from torch import nn

# Norms of these models multiply by 1 + weight, in float32; those of the others by the weight, in the row's dtype.
_ZERO_CENTRED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def use_liger(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Let RMSNorm, the products of SwiGLU and the rotary embedding run on Liger's kernels, in place.

    Norms and MLPs (shared experts too) are replaced one by one; routed experts and the gated norm of Gated DeltaNet
    stay. The rotary embedding is a function of the library's module, so it changes for every model of the
    architecture in this process.

    Args:
        dtype: that the model computes with.
        device: of the ranks.

    Raises:
        ValueError: for float64, CPUs, another activation than SiLU, or where the package is missing.
    """
    if dtype == torch.float64:
        raise ValueError("model.liger: its kernels compute in float32, and dtype is float64; leave it out")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"model.liger: its kernels need GPUs, and these ranks run on {device}; leave it out")
    if model.config.hidden_act not in ("silu", "swish"):
        raise ValueError(
            f"model.liger: its SwiGLU has SiLU as activation, and the model's hidden_act is "
            f"{model.config.hidden_act!r}; leave it out"
        )
    try:
        from liger_kernel.transformers.functional import liger_rms_norm, liger_rope, liger_swiglu
    except ImportError as error:
        raise ValueError("model.liger needs its package: pip install 'cp-engine[liger]'") from error

    zero_centred = model.config.model_type in _ZERO_CENTRED
    offset, casting = (1.0, "gemma") if zero_centred else (0.0, "llama")

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.eps if zero_centred else self.variance_epsilon
        # In place, its backward would write over a gradient that others may hold.
        return liger_rms_norm(x, self.weight, eps, offset, casting, False)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x)))

    def rotary(q, k, cos, sin, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        return liger_rope(q, k, cos, sin, None, unsqueeze_dim)

    norms, mlps = _norms(model), _mlps(model)
    assert norms, f"no norm of {type(model).__name__} was found"
    for module in norms:
        module.forward = MethodType(norm, module)
    for module in mlps:
        module.forward = MethodType(mlp, module)
    sys.modules[type(model).__module__].apply_rotary_pos_emb = rotary


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


def _mlps(model: nn.Module) -> list[nn.Module]:
    """Dense MLPs and shared experts, known by what our forward reads; routed experts hold joined weights."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return [module for module in model.modules() if all(isinstance(getattr(module, n, None), nn.Module) for n in names)]
