"""The sizes of a model that planning depends on, read from its `transformers` config."""

from __future__ import annotations

from dataclasses import replace

from cp_engine.model_sizes import sizes_of_config
from cp_engine.sharding.cost import ModelShape


def conv_width(config) -> int | None:
    """Taps of the GDN convolution; None for a model without GDN layers."""
    has_gdn_layers = "linear_attention" in (getattr(config, "layer_types", None) or [])
    return config.linear_conv_kernel_dim if has_gdn_layers else None


def attention_window(config) -> int | None:
    """Tokens that a row of a sliding-window layer sees, itself included; None for a model without such layers."""
    has_windows = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    return config.sliding_window if has_windows else None


def longest_sequence(config) -> int | None:
    """Tokens of the longest sequence that the config is made for, stretched by YaRN if it says so; None if unknown."""
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if longest is not None and rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, int(original * rope["factor"]))
    return longest


def model_shape(config, element_bytes: int) -> ModelShape:
    """Sizes of a supported text config, for the planner's cost model.

    Args:
        element_bytes: of an activation.
    """
    return replace(sizes_of_config(config.to_dict(), config.model_type).shape, element_bytes=element_bytes)
