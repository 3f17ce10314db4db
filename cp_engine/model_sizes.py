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

KINDS = ("full_attention", "sliding_attention", "linear_attention")  # of layers


@dataclass(frozen=True)
class ModelSizes:
    """What a prediction needs to know of a model."""

    name: str
    shape: ModelShape
    parameters: int  # all of them, experts that are not active included
    vocab: int
    tied: bool = False  # embedding and head share their weight
    gdn_key_dim: int = 128
    gdn_value_dim: int = 128
    head_norms: bool = False  # norms of queries and keys by head
    wide_norms: bool = False  # norms multiply by their weight in float32
    gated_attention: bool = False  # a gate of the size of the queries on the output
    expert_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_expert: bool = False

    @property
    def layers(self) -> int:
        return self.shape.attention_layers + self.shape.gdn_layers

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding and the head."""
        return self.vocab * self.shape.hidden * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> int:
        """Of a decoder layer, in the mean."""
        return (self.parameters - self.embedding_parameters) // self.layers


_QWEN3 = {"head_norms": True}
_QWEN3_5 = {"head_norms": True, "wide_norms": True, "gated_attention": True}
_TRAITS = {
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
# Parameters, vocabulary, and what a configuration file would say, of released models; of Qwen3.5 the text part.
_RELEASED = {
    "qwen3-8b": (8_190_000_000, 151_936, _QWEN3),
    "llama-3.1-8b": (8_030_000_000, 128_256, {}),
    "qwen3-30b-a3b": (30_530_000_000, 151_936, {**_QWEN3, "expert_layers": 48, "experts": 128, "experts_per_token": 8}),
    "qwen3.5-35b-a3b": (
        34_660_000_000,
        248_320,
        {**_QWEN3_5, "expert_layers": 40, "experts": 256, "experts_per_token": 8, "shared_expert": True},
    ),
    "qwen3-next-80b-a3b": (
        80_000_000_000,
        151_936,
        {**_QWEN3_5, "expert_layers": 48, "experts": 512, "experts_per_token": 10, "shared_expert": True},
    ),
}

_OF_RUNS = (
    ". The random presets of train, logprobs and verify have none before a run saves one: give the folder `final` in "
    "its output_dir"
)


def model_sizes(name: str) -> ModelSizes:
    """The sizes of a preset, a ``config.json``, or a folder that holds one.

    Raises:
        ValueError: for an unknown name, or a configuration that cannot be predicted.
    """
    if name in PRESETS:
        parameters, vocab, traits = _RELEASED[name]
        return ModelSizes(name, PRESETS[name], parameters, vocab, **traits)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--model expects {', '.join(PRESETS)}, or a Hugging Face config.json or a folder that holds one; "
            f"got {name!r}, and there is no file {path}{_OF_RUNS if name.startswith('tiny-') else ''}"
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
        raise ValueError(f"{where}: field layer_types: expected at least one layer of attention, got none")
    windows = kinds.count("sliding_attention")
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
            "gdn_own_gate": config.get("model_type") != "qwen3_next",  # it projects q, k, v and the gate as one
        }
    shape = ModelShape(
        hidden=hidden,
        mlp_width=active // layers,
        attention_layers=layers - recurrent,
        window_layers=windows,
        window=field("sliding_window") if windows else None,
        query_heads=heads,
        kv_heads=field("num_key_value_heads", heads),
        head_dim=field("head_dim", hidden // heads),
        **sizes,
    )
    # Products of one token are weights, those of the MLPs aside, whose stored width may exceed the active one.
    weights = shape.attention_products * shape.attention_layers + shape.gdn_products * shape.gdn_layers
    weights += 3 * hidden * (stored - shape.mlp_width * layers)
    traits = dict(_TRAITS.get(config.get("model_type"), {}))
    if traits.get("gated_attention"):
        weights += hidden * shape.query_heads * shape.head_dim * shape.attention_layers
    if recurrent:
        traits |= {"gdn_key_dim": field("linear_key_head_dim"), "gdn_value_dim": field("linear_value_head_dim")}
    experts = field("num_experts", field("num_local_experts", 0))
    if experts:
        shared = field("shared_expert_intermediate_size", 0) > 0
        traits |= {"expert_layers": _expert_layers(config, field, layers), "experts": experts}
        traits |= {"experts_per_token": field("num_experts_per_tok"), "shared_expert": shared}
    vocab, tied = field("vocab_size"), bool(config.get("tie_word_embeddings"))
    embeddings = vocab * hidden * (1 if tied else 2)
    return ModelSizes(where, shape, weights + embeddings, vocab, tied, **traits)


def _layer_kinds(config: dict, field: _Fields, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        if "linear_num_value_heads" not in config:
            return ["full_attention"] * layers
        every = max(1, field("full_attention_interval", 4))
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"{field.where}: field layer_types: expected a list of {layers} layers, got {kinds!r}")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"{field.where}: field layer_types: expected {', '.join(KINDS)}, got {unknown[0]!r}")
    return kinds


def _mlp_widths(config: dict, field: _Fields, layers: int) -> tuple[int, int]:
    """Widths of the MLPs that a token goes through, and of all of them, both summed over the layers."""
    experts = field("num_experts", field("num_local_experts", 0))  # the library writes Qwen3-MoE's under this name
    if not experts:
        width = field("intermediate_size")
        return width * layers, width * layers
    sparse = _expert_layers(config, field, layers)
    width, shared = field("moe_intermediate_size"), field("shared_expert_intermediate_size", 0)
    plain = field("intermediate_size") * (layers - sparse) if sparse < layers else 0
    active = plain + sparse * (field("num_experts_per_tok") * width + shared)
    return active, plain + sparse * (experts * width + shared)


def _expert_layers(config: dict, field: _Fields, layers: int) -> int:
    step, dense = max(1, field("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    return sum((i + 1) % step == 0 and i not in dense for i in range(layers))
