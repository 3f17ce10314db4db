"""Tiny random models for tests, `verify` and the sample run: small, but with nothing that hides an error.

Default initialisation does hide errors: recurrent states decay within a few tokens, attention is uniform, and experts
weigh the same. Here states live for hundreds of tokens, attention is far from uniform, and no norm weight is one.

Router logits have a standard deviation of about 1.5, where the default is 0.16: the last expert that a token takes is
then as a rule far from the first that it leaves, compared with the rounding that tree and flat rows differ by. A tie
closer than that sends the token to another expert in one of the two, which is a rightful difference and no rounding.
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
_HYBRID = {
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _tiny_llama(vocab_size: int):
    from transformers import LlamaConfig

    # Llama 3 stretches the wavelengths beyond 64 tokens; the sample's rollouts are longer than that.
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return LlamaConfig(vocab_size=vocab_size, head_dim=16, rope_parameters=rope, **_SIZES)


def _tiny_qwen3(vocab_size: int):
    from transformers import Qwen3Config

    return Qwen3Config(vocab_size=vocab_size, head_dim=16, **_SIZES)


def _tiny_qwen3_window(vocab_size: int):
    from transformers import Qwen3Config

    # Shorter than the sample's rollouts, so that windows slide, and over branch points.
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_sliding_window": True}
    return Qwen3Config(vocab_size=vocab_size, head_dim=16, sliding_window=24, **layers, **_SIZES)


def _tiny_qwen3_moe(vocab_size: int):
    from transformers import Qwen3MoeConfig

    # One dense layer among sparse ones.
    sparse = {"mlp_only_layers": [1], "norm_topk_prob": True, **_EXPERTS}
    return Qwen3MoeConfig(vocab_size=vocab_size, head_dim=16, **_SIZES, **sparse)


def _tiny_qwen3_5(vocab_size: int):
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(vocab_size=vocab_size, **_HYBRID, **_SIZES)


def _tiny_qwen3_5_moe(vocab_size: int):
    from transformers import Qwen3_5MoeTextConfig

    sizes = {name: size for name, size in _SIZES.items() if name != "intermediate_size"}  # all layers are sparse
    sparse = {"shared_expert_intermediate_size": 48, **_EXPERTS}
    return Qwen3_5MoeTextConfig(vocab_size=vocab_size, **_HYBRID, **sizes, **sparse)


def _tiny_qwen3_next(vocab_size: int):
    from transformers import Qwen3NextConfig

    # Its own router setting: probabilities of the chosen experts are not scaled to sum to one.
    sparse = {"shared_expert_intermediate_size": 48, "norm_topk_prob": False, **_EXPERTS}
    return Qwen3NextConfig(vocab_size=vocab_size, **_HYBRID, **_SIZES, **sparse)


PRESETS = {
    "tiny-llama": _tiny_llama,
    "tiny-qwen3": _tiny_qwen3,
    "tiny-qwen3-window": _tiny_qwen3_window,
    "tiny-qwen3-moe": _tiny_qwen3_moe,
    "tiny-qwen3.5": _tiny_qwen3_5,
    "tiny-qwen3.5-moe": _tiny_qwen3_5_moe,
    "tiny-qwen3-next": _tiny_qwen3_next,
}


# Gains over the fan-in; 1, of all others, keeps the size of what passes. That of a is small: inputs leave decays slow.
_GAINS = {"in_proj_a": 0.5, "in_proj_ba": 0.5, "lm_head": 1.5, "gate": 1.5}
# Without norms of queries and keys, for scores of the size that `_draw` gives others through the norms' weights.
_UNNORMED_HEAD_GAINS = {"q_proj": 1.4, "k_proj": 1.4}


def preset_model(name: str, dtype: torch.dtype, vocab_size: int | None, seed: int) -> nn.Module:
    """A random causal LM: the same weights, up to rounding to ``dtype``, for a seed on every rank and machine."""
    from transformers import AutoModelForCausalLM

    config = PRESETS[name](DEFAULT_VOCAB if vocab_size is None else vocab_size)
    with torch.random.fork_rng(devices=[]):  # the library's own initialisation, overwritten below
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    numbers = np.random.default_rng(seed)
    parameters = sorted(model.named_parameters())
    normed_heads = any(parameter_name.endswith("q_norm.weight") for parameter_name, _ in parameters)
    gains = _GAINS if normed_heads else {**_GAINS, **_UNNORMED_HEAD_GAINS}
    with torch.no_grad():
        for parameter_name, parameter in parameters:
            kind = parameter_name.removesuffix(".weight").rpartition(".")[2]
            drawn = torch.from_numpy(_draw(numbers, kind, tuple(parameter.shape), gains))
            # Norm weights are drawn around the library's initial value: 1, or 0 where the norm multiplies by 1 + w.
            parameter.copy_(parameter.double() + drawn if "norm" in kind else drawn)
    return model


def _draw(numbers: np.random.Generator, kind: str, shape: tuple[int, ...], gains: dict[str, float]) -> np.ndarray:
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
    # The last dimension is the fan-in: of matrices, of stacked experts, and of a convolution of single channels.
    return numbers.normal(0.0, gains.get(kind, 1.0) / math.sqrt(shape[-1]), shape)


def state_half_life(model: nn.Module) -> float | None:
    """Median over GDN heads of the tokens after which half of a recurrent state is left; None without GDN layers.

    A head's decay at an input of zero is ``exp(-exp(A_log) * softplus(dt_bias))`` a token.
    """
    half_lives: list[float] = []
    for layer in gdn_layers(model):
        rate = layer.A_log.detach().double().exp() * nn.functional.softplus(layer.dt_bias.detach().double())
        half_lives += (math.log(2.0) / rate).tolist()
    return median(half_lives) if half_lives else None
