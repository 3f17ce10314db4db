import pytest
from transformers import AutoConfig

from cp_engine.models.presets import PRESETS
from cp_engine.models.support import check_supported


def config(preset: str = "tiny-qwen3", **changes):
    made = PRESETS[preset](512)
    for field, value in changes.items():
        setattr(made, field, value)
    return made


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_rope_that_depends_on_the_position_alone_is_supported(preset, rope_type):
    made = config(preset)
    check_supported(config(preset, rope_parameters={**made.rope_parameters, "rope_type": rope_type}))


REFUSED = [
    ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0: .*softcap"),
    ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30.0: .*softcap"),
    ({"attention_dropout": 0.1}, r"attention_dropout is 0.1: .*dropped differently in each rollout"),
    ({"attention_sinks": True}, r"attention_sinks is True: .*no attention sinks"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        r"rope_parameters\['rope_type'\] is 'dynamic': .*pos",
    ),
    ({"rope_parameters": {"rope_type": "longrope"}}, r"rope_parameters\['rope_type'\] is 'longrope'"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        r"rope_parameters\['full_attention'\]\['rope_type'\] is 'dynamic'",
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": None},
        r"layer_types\[1\] is 'sliding_attention': .*\(sliding_window is None\)",
    ),
    ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, r"layer_types\[3\] is 'chunked_attention'"),
    ({"router_jitter_noise": 0.01}, r"router_jitter_noise is 0.01: .*other experts in each rollout"),
    ({"model_type": "qwen9"}, r"model_type is 'qwen9': supported architectures are llama, qwen3, .*, qwen3_next$"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_inexact_models_are_refused_by_field_and_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        check_supported(config(**changes))


@pytest.mark.parametrize("preset", ["tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next"])
def test_gdn_with_another_activation_is_refused(preset):
    with pytest.raises(ValueError, match="hidden_act is 'gelu': the GDN convolution is followed by SiLU"):
        check_supported(config(preset, hidden_act="gelu"))


def test_windows_of_an_architecture_that_is_not_compared_are_refused():
    changes = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 128}
    check_supported(config("tiny-qwen3", **changes))
    with pytest.raises(
        ValueError, match=r"layer_types\[1\] is 'sliding_attention': sliding windows are computed for qwen3"
    ):
        check_supported(config("tiny-llama", **changes))


def test_a_window_for_all_layers_is_refused():
    with pytest.raises(ValueError, match="sliding_window is 64: .*where layer_types names"):
        check_supported(config("tiny-qwen3-moe", sliding_window=64, use_sliding_window=True))
    check_supported(config("tiny-qwen3-moe", sliding_window=64, use_sliding_window=False))


def test_sliding_window_that_no_layer_uses_is_no_obstacle():
    check_supported(config(sliding_window=4096))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gpt_oss", "model_type is 'gpt_oss': .*attention sinks"),
        ("gemma2", "attn_logit_softcapping is 50.0"),
        ("mistral", "sliding_window is 4096: .*computed for qwen3, where layer_types names"),
        ("olmo", "model_type is 'olmo'"),
    ],
)
def test_other_architectures_of_the_library_are_refused(model_type, message):
    with pytest.raises(ValueError, match=message):
        check_supported(AutoConfig.for_model(model_type))
