"""Model shapes that training steps are measured on, with random weights drawn on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from cp_engine.config import LoraSection
from cp_engine.models.load import float32_parameters
from cp_engine.models.presets import PRESETS

# Sizes as the released models' configurations have them.
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
QWEN3_5_4B = {
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Shape:
    """A model to train: its sizes, its class in `transformers`, and what of it is trained."""

    config: str
    sizes: dict
    lora: LoraSection | None


SHAPES = {
    "qwen3-8b": Shape("Qwen3Config", QWEN3_8B, LoraSection(r=16)),
    "qwen3-8b-full": Shape("Qwen3Config", QWEN3_8B, None),
    "qwen3.5-4b": Shape("Qwen3_5TextConfig", QWEN3_5_4B, None),
}
MODELS = (*SHAPES, *PRESETS)  # the presets are small enough for a CPU


def shape_config(name: str, layers: int | None = None):
    """The `transformers` configuration of a shape.

    Args:
        layers: of all layers only the first so many.
    """
    import transformers

    shape = SHAPES[name]
    cut = {} if layers is None else {"num_hidden_layers": layers}
    return getattr(transformers, shape.config)(**shape.sizes | cut)


def random_model(config, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """A causal LM with the library's initial weights, drawn on the device: nothing passes through host memory.

    Decays of GDN layers are slow (alpha between 0.97 and 0.9999), since with the library's own a wrong state would not
    show, and stay float32.
    """
    from transformers import AutoModelForCausalLM

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in float32_parameters(model, torch.bfloat16):
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            parameter.data = torch.empty(parameter.shape, dtype=wide, device=device)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                nn.init.uniform_(parameter, -5.0, -2.0)
            elif name.endswith("dt_bias"):
                nn.init.uniform_(parameter, -3.0, -1.0)
    return model
