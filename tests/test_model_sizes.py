"""Sizes that `plan --model` reads from configuration files, against the presets and against hand counts."""

from __future__ import annotations

import json

import pytest

from cp_engine.model_sizes import model_sizes
from cp_engine.sharding.cost import PRESETS

DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 151936,
}


def written(tmp_path, config) -> str:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


LLAMA = {**DENSE, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
EXPERTS = {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "moe_intermediate_size": 768}
EXPERTS = {**DENSE, **EXPERTS, "num_local_experts": 128, "num_experts_per_tok": 8}
HYBRID_35B = {
    **HYBRID,
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 248320,
}
RELEASED = {
    "qwen3-8b": DENSE,
    "llama-3.1-8b": LLAMA,
    "qwen3-30b-a3b": EXPERTS,
    "qwen3.5-35b-a3b": HYBRID_35B,
    "qwen3-next-80b-a3b": HYBRID,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_gives_the_preset(preset, tmp_path):
    config = RELEASED[preset]
    known, folder = model_sizes(preset), written(tmp_path, config)
    read = model_sizes(folder)
    assert read.shape == known.shape == PRESETS[preset]
    # Norms, gates and convolutions are not counted.
    assert read.parameters == pytest.approx(known.parameters, rel=0.02)
    assert model_sizes(folder + "/config.json") == read
    assert model_sizes(written(tmp_path, {"text_config": config, "vision_config": {}})).shape == read.shape


def test_small_configurations(tmp_path):
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 5,
        "vocab_size": 3,
    }
    read = model_sizes(written(tmp_path, {**small, "tie_word_embeddings": True}))
    assert (read.shape.kv_heads, read.shape.head_dim, read.shape.mlp_width) == (2, 4, 5)
    assert read.parameters == 2 * (4 * 8 * 8 + 3 * 8 * 5) + 3 * 8
    kinds = ["linear_attention", "full_attention"]
    linear = {f"linear_{name}": value for name, value in {"num_key_heads": 2, "num_value_heads": 4}.items()}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 64}
    read = model_sizes(written(tmp_path, {**small, **linear, "layer_types": kinds}))
    assert (read.shape.attention_layers, read.shape.gdn_layers, read.shape.gdn_head_dim) == (1, 1, 32)
    # One of four layers has experts: 2 of 6 active.
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 3, "decoder_sparse_step": 2}
    moe |= {"mlp_only_layers": [1], "num_hidden_layers": 4, "intermediate_size": 10}
    read = model_sizes(written(tmp_path, {**small, **moe}))
    assert read.shape.mlp_width == (3 * 10 + 2 * 3) // 4
    assert read.parameters == 4 * 4 * 8 * 8 + 3 * 8 * (3 * 10 + 6 * 3) + 2 * 3 * 8


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {k: v for k, v in DENSE.items() if k != "hidden_size"},
            "field hidden_size: expected a whole number, but it is",
        ),
        ({**DENSE, "num_hidden_layers": "many"}, "field num_hidden_layers: expected a whole number, got 'many'"),
        ({**DENSE, "num_attention_heads": 0}, "must be at least 1"),
        ({**DENSE, "layer_types": ["full_attention"]}, "expected a list of 36 layers"),
        (
            {**DENSE, "layer_types": ["chunked_attention"] * 36},
            "expected full_attention, sliding_attention, linear_attention, got 'chunked",
        ),
        ({**HYBRID, "layer_types": ["linear_attention"] * 48}, "at least one layer of attention"),
        ("{", "expected a JSON object, but it cannot be read"),
        ([1], "expected a JSON object, got list"),
    ],
)
def test_wrong_configurations_are_refused(config, match, tmp_path):
    with pytest.raises(ValueError, match=match) as caught:
        model_sizes(written(tmp_path, config))
    assert "config.json" in str(caught.value)


def test_random_presets_are_read_from_a_run(tmp_path):
    with pytest.raises(
        ValueError, match="got 'tiny-qwen3.5', and there is no file .*: give the folder `final` in its out"
    ):
        model_sizes("tiny-qwen3.5")
    with pytest.raises(ValueError, match="got 'absent', and there is no file absent$"):
        model_sizes("absent")
