"""Sizes of a model for predictions: a preset, or a Hugging Face ``config.json`` read as plain JSON.

Nothing here imports transformers or torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from cp_engine.sharding.cost import PRESETS, ModelShape

_PARAMETERS = {
    "qwen3-8b": 8_190_000_000,
    "llama-3.1-8b": 8_030_000_000,
    "qwen3-30b-a3b": 30_530_000_000,
    "qwen3.5-35b-a3b": 34_660_000_000,  # the text part
    "qwen3-next-80b-a3b": 80_000_000_000,
}
_KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class ModelSizes:
    """What a prediction needs to know of a model."""

    name: str
    shape: ModelShape
    parameters: int  # all of them, experts that are not active included


def model_sizes(name: str) -> ModelSizes:
    """The sizes of a preset, a ``config.json``, or a folder that holds one.

    Raises:
        ValueError: for an unknown name, or a configuration that cannot be predicted.
    """
    if name in PRESETS:
        return ModelSizes(name, PRESETS[name], _PARAMETERS[name])
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--model expects {', '.join(PRESETS)}, or a Hugging Face config.json or a folder that holds one; "
            f"got {name!r}, and there is no file {path}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON object, but it cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return sizes_of_config(config, str(path))


class _Fields:
    """Whole numbers of a configuration; errors name where it came from and the field."""

    def __init__(self, config: dict, where: str):
        self.config, self.where = config, where

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.where}: field {name}: expected a whole number, but it is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.where}: field {name}: expected a whole number, got {value!r}")
        return value


def sizes_of_config(config: dict, where: str) -> ModelSizes:
    """The sizes in a configuration, as ``config.json`` has it.

    Args:
        where: names the configuration in errors and in the result.

    Raises:
        ValueError: for a configuration that cannot be predicted.
    """
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    field = _Fields(config, where)
    hidden, layers, heads = field("hidden_size"), field("num_hidden_layers"), field("num_attention_heads")
    if not (hidden and layers and heads):
        raise ValueError(f"{where}: hidden_size, num_hidden_layers and num_attention_heads must be at least 1")
    kinds = _layer_kinds(config, field, layers)
    recurrent = kinds.count("linear_attention")
    if recurrent == layers:
        raise ValueError(f"{where}: field layer_types: expected at least one full_attention layer, got none")
    active, stored = _mlp_widths(config, field, layers)
    sizes = {}
    if recurrent:
        state = field("linear_key_head_dim") * field("linear_value_head_dim")
        # A shape holds one head size: that of a square state with as many elements.
        sizes = {
            "gdn_layers": recurrent,
            "gdn_runs": sum(kind == "linear_attention" for kind, _ in groupby(kinds)),
            "gdn_key_heads": field("linear_num_key_heads"),
            "gdn_value_heads": field("linear_num_value_heads"),
            "gdn_head_dim": math.isqrt(state),
        }
    shape = ModelShape(
        hidden=hidden,
        mlp_width=active // layers,
        attention_layers=layers - recurrent,
        query_heads=heads,
        kv_heads=field("num_key_value_heads", heads),
        head_dim=field("head_dim", hidden // heads),
        **sizes,
    )
    # Products of one token are weights, those of the MLPs aside, whose stored width may exceed the active one.
    weights = shape.attention_products * shape.attention_layers + shape.gdn_products * shape.gdn_layers
    weights += 3 * hidden * (stored - shape.mlp_width * layers)
    embeddings = field("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSizes(where, shape, weights + embeddings)


def _layer_kinds(config: dict, field: _Fields, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        if "linear_num_value_heads" not in config:
            return ["full_attention"] * layers
        every = max(1, field("full_attention_interval", 4))
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"{field.where}: field layer_types: expected a list of {layers} layers, got {kinds!r}")
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise ValueError(f"{field.where}: field layer_types: expected {' or '.join(_KINDS)}, got {unknown[0]!r}")
    return kinds


def _mlp_widths(config: dict, field: _Fields, layers: int) -> tuple[int, int]:
    """Widths of the MLPs that a token goes through, and of all of them, both summed over the layers."""
    experts = field("num_experts", field("num_local_experts", 0))  # the library writes Qwen3-MoE's under this name
    if not experts:
        width = field("intermediate_size")
        return width * layers, width * layers
    step, dense = max(1, field("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    sparse = sum((i + 1) % step == 0 and i not in dense for i in range(layers))
    width, shared = field("moe_intermediate_size"), field("shared_expert_intermediate_size", 0)
    plain = field("intermediate_size") * (layers - sparse) if sparse < layers else 0
    active = plain + sparse * (field("num_experts_per_tok") * width + shared)
    return active, plain + sparse * (experts * width + shared)
