"""Which models the tree layers compute exactly; all others are refused by name and reason."""

from __future__ import annotations

from cp_engine.model_sizes import KINDS

# Architectures (text model types) that the tests compare with the unmodified model.
ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Those among them with a sliding window in the layers that `layer_types` says.
WINDOWED = ("qwen3",)
# RoPE types whose rotation is a function of the position alone. dynamic and longrope change all rotations with the
# length of the sequence, so a token shared by a short and a long rollout would need two.
POSITION_ROPE = ("default", "linear", "llama3", "yarn")
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SINK_FIELDS = ("attention_sinks", "add_full_attention_sink_bias", "add_swa_attention_sink_bias")
_SINK_ARCHITECTURES = ("gpt_oss",)
_ROUTER_NOISE = ("router_jitter_noise", "moe_jitter_eps")


def check_supported(config) -> None:
    """Refuse a model that the tree layers would not compute exactly.

    Args:
        config: the text config of a `transformers` model.

    Raises:
        ValueError: naming the layer or config field, its value and the reason.
    """
    for field in _SOFTCAPS:
        if getattr(config, field, None):
            raise _refusal(field, getattr(config, field), "the tree attention has no softcap")
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        raise _refusal("attention_dropout", dropout, "a shared token would be dropped differently in each rollout")
    for field in _ROUTER_NOISE:
        if getattr(config, field, None):
            reason = "a shared token would be sent to other experts in each rollout"
            raise _refusal(field, getattr(config, field), reason)
    for field in _SINK_FIELDS:
        if getattr(config, field, None):
            raise _refusal(field, getattr(config, field), "the tree attention has no attention sinks")
    if config.model_type in _SINK_ARCHITECTURES:
        raise _refusal("model_type", config.model_type, "the tree attention has no attention sinks")
    _check_layers(config)
    _check_rope(getattr(config, "rope_parameters", None) or {})
    if config.model_type not in ARCHITECTURES:
        raise _refusal("model_type", config.model_type, f"supported architectures are {', '.join(ARCHITECTURES)}")


def _check_layers(config) -> None:
    types = getattr(config, "layer_types", None) or []
    # Without layer_types (Qwen3-MoE) one window holds for all layers; with them a config may carry one that none uses.
    window = getattr(config, "sliding_window", None)
    if not types and window and getattr(config, "use_sliding_window", True):
        reason = f"sliding windows are computed for {', '.join(WINDOWED)}, where layer_types names their layers"
        raise _refusal("sliding_window", window, reason)
    for index, kind in enumerate(types):
        if kind == "sliding_attention" and not (window and config.model_type in WINDOWED):
            reason = f"sliding windows are computed for {', '.join(WINDOWED)} (sliding_window is {window})"
            raise _refusal(f"layer_types[{index}]", kind, reason)
        if kind not in KINDS:
            raise _refusal(f"layer_types[{index}]", kind, f"the tree layers are {', '.join(KINDS)}")
    if "linear_attention" in types and config.hidden_act not in ("silu", "swish"):
        raise _refusal("hidden_act", config.hidden_act, "the GDN convolution is followed by SiLU")


def _check_rope(parameters: dict) -> None:
    # Some models hold one set of parameters for each kind of layer.
    sets = {"": parameters} if "rope_type" in parameters else {f"[{kind!r}]": p for kind, p in parameters.items()}
    for key, values in sets.items():
        rope_type = values.get("rope_type", "default") if isinstance(values, dict) else "default"
        if rope_type not in POSITION_ROPE:
            reason = f"rotations must depend on the position alone, as with {', '.join(POSITION_ROPE)}"
            raise _refusal(f"rope_parameters{key}['rope_type']", rope_type, reason)


def _refusal(field: str, value, reason: str) -> ValueError:
    return ValueError(f"cannot train this model on packed trees: config field {field} is {value!r}: {reason}")
