"""The planner's sizes of a model against the modules of the model itself."""

import pytest
import torch

from cp_engine.models.hf_gdn import gdn_layers
from cp_engine.models.load import load_model
from cp_engine.models.presets import PRESETS
from cp_engine.models.shape import conv_width, model_shape


@pytest.mark.parametrize("preset", PRESETS)
def test_shape_counts_what_one_token_goes_through(preset):
    model = load_model(preset, torch.float32)
    shape = model_shape(model.config, 4)
    gdn = list(gdn_layers(model))
    assert (shape.attention_layers, shape.gdn_layers, shape.element_bytes) == (4 - len(gdn), len(gdn), 4)
    assert conv_width(model.config) == (4 if gdn else None)
    assert (shape.query_heads, shape.kv_heads) == (8, 2) and shape.head_dim == (32 if gdn else 16)
    width = 0
    for layer in model.model.layers:
        weights = dict(layer.mlp.named_parameters())
        dense = sum(
            weight.numel() for name, weight in weights.items() if "experts." not in name and "gate." not in name
        )
        active = sum(2 * weight[0].numel() for name, weight in weights.items() if "experts." in name)
        width += (dense + active) // (3 * 64)
    assert shape.mlp_width == width // 4
    if gdn:
        assert (shape.gdn_key_heads, shape.gdn_value_heads) == (4, 8)
        assert shape.gdn_head_dim**2 <= 16 * 32 < (shape.gdn_head_dim + 1) ** 2
