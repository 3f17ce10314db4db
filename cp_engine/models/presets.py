"""Tiny random models for tests, `verify` and the sample run: small, but with nothing that hides an error.

Default initialisation does hide errors: recurrent states decay within a few tokens, and attention is uniform. Here
states live for hundreds of tokens, attention is far from uniform, and no norm weight is one.
"""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import torch
from torch import nn

from cp_engine.models.hf_gdn import gdn_layers

DEFAULT_VOCAB = 512
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def _tiny_qwen3(vocab_size: int):
    from transformers import Qwen3Config

    return Qwen3Config(vocab_size=vocab_size, head_dim=16, **_SIZES)


def _tiny_qwen3_5(vocab_size: int):
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        head_dim=32,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        **_SIZES,
    )


PRESETS = {"tiny-qwen3": _tiny_qwen3, "tiny-qwen3.5": _tiny_qwen3_5}


def preset_model(name: str, dtype: torch.dtype, vocab_size: int | None, seed: int) -> nn.Module:
    """A random causal LM: the same weights, up to rounding to ``dtype``, for a seed on every rank and machine."""
    from transformers import AutoModelForCausalLM

    config = PRESETS[name](DEFAULT_VOCAB if vocab_size is None else vocab_size)
    with torch.random.fork_rng(devices=[]):  # the library's own initialisation, overwritten below
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    numbers = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            kind = parameter_name.removesuffix(".weight").rpartition(".")[2]
            drawn = torch.from_numpy(_draw(numbers, kind, tuple(parameter.shape)))
            # Norm weights are drawn around the library's initial value: 1, or 0 where the norm multiplies by 1 + w.
            parameter.copy_(parameter.double() + drawn if "norm" in kind else drawn)
    return model


def _draw(numbers: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float64 weights of a parameter; ``kind`` is the last part of its name that is not "weight"."""
    if kind == "A_log":
        return numbers.uniform(-5.0, -2.0, shape)
    if kind == "dt_bias":
        return numbers.uniform(-3.0, -1.0, shape)
    if kind in ("q_norm", "k_norm"):
        # Components of queries and keys get a size of about 1.4, attention scores a standard deviation of about 2.
        return numbers.uniform(0.2, 0.6, shape)
    if "norm" in kind:
        return numbers.uniform(-0.3, 0.3, shape)
    if kind == "embed_tokens":
        return numbers.normal(0.0, 1.0, shape)
    # A gain of 1 over the fan-in keeps the size of what passes. in_proj_a is small, so that inputs leave decays slow.
    gain = {"in_proj_a": 0.5, "lm_head": 1.5}.get(kind, 1.0)
    return numbers.normal(0.0, gain / math.sqrt(math.prod(shape[1:])), shape)


def state_half_life(model: nn.Module) -> float | None:
    """Median over GDN heads of the tokens after which half of a recurrent state is left; None without GDN layers.

    A head's decay at an input of zero is ``exp(-exp(A_log) * softplus(dt_bias))`` a token.
    """
    half_lives: list[float] = []
    for layer in gdn_layers(model):
        rate = layer.A_log.detach().double().exp() * nn.functional.softplus(layer.dt_bias.detach().double())
        half_lives += (math.log(2.0) / rate).tolist()
    return median(half_lives) if half_lives else None
