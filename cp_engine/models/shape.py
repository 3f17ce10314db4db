"""The sizes of a model that planning depends on, read from its `transformers` config."""

from __future__ import annotations

from cp_engine.sharding.cost import ModelShape


def conv_width(config) -> int | None:
    """Taps of the GDN convolution; None for a model without GDN layers."""
    return config.linear_conv_kernel_dim if _gdn_layers(config) else None


def model_shape(config, element_bytes: int) -> ModelShape:
    """Sizes of a supported text config, for the planner's cost model.

    Args:
        element_bytes: of an activation.
    """
    gdn_layers = _gdn_layers(config)
    recurrent = {}
    if gdn_layers:
        recurrent = {
            "gdn_layers": gdn_layers,
            "gdn_key_heads": config.linear_num_key_heads,
            "gdn_value_heads": config.linear_num_value_heads,
            "gdn_head_dim": config.linear_value_head_dim,
        }
    return ModelShape(
        hidden=config.hidden_size,
        mlp_width=config.intermediate_size,
        attention_layers=config.num_hidden_layers - gdn_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        element_bytes=element_bytes,
        **recurrent,
    )


def _gdn_layers(config) -> int:
    return list(getattr(config, "layer_types", None) or []).count("linear_attention")
