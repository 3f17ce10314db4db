import math

import pytest
import torch

from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.hf_gdn import gdn_layers
from cp_engine.models.load import load_model
from cp_engine.models.presets import PRESETS, state_half_life

LENGTH = 200


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_depend_on_the_seed_alone(preset):
    torch.manual_seed(1)
    first = load_model(preset, torch.float64, seed=4)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = load_model(preset, torch.float32, seed=4), load_model(preset, torch.float32, seed=5)
    assert torch.equal(torch.get_rng_state(), state)  # loading leaves the caller's random numbers alone
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter.float(), again.get_parameter(name)), name
        assert not torch.equal(again.get_parameter(name), other.get_parameter(name)), name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_attention_is_far_from_uniform_and_hidden_states_keep_their_size(preset, seed):
    model = load_model(preset, torch.float32, seed=seed)
    make_cpu_runnable(model)
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 512, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, output_attentions=True, use_cache=False)
    for weights in (layer for layer in out.attentions if layer is not None):
        # Uniform attention of the last row would give each of its 200 keys 0.005; measured: 0.12 to 0.19.
        last = weights[0, :, -1]
        last = last[:, last[0] > 0]  # a window hides keys
        assert last.amax(-1).mean() > 0.08
        assert 1.0 < last.log().std(-1).mean() < 2.5  # standard deviation of the scores; measured: 1.7 to 2.2
    assert all(0.5 < state.std() < 3.0 for state in out.hidden_states)
    assert 1.0 < out.logits.std() < 2.5


HYBRIDS = ("tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")


@pytest.mark.parametrize("preset", HYBRIDS)
def test_hybrids_have_one_softmax_layer_and_the_dense_model_four(preset):
    hybrid, dense = load_model(preset, torch.float32), load_model("tiny-qwen3", torch.float32)
    assert hybrid.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert dense.config.layer_types == ["full_attention"] * 4
    assert len(list(gdn_layers(hybrid))) == 3 and not list(gdn_layers(dense))


@pytest.mark.parametrize("preset", HYBRIDS)
@pytest.mark.parametrize("seed", range(5))
def test_states_of_random_hybrids_live_for_more_than_64_tokens(preset, seed):
    assert 64 < state_half_life(load_model(preset, torch.float32, seed=seed)) < 2000


def test_state_half_life_is_the_median_over_heads():
    model = load_model("tiny-qwen3.5", torch.float64)
    softplus = math.log1p(math.exp(-2.0))
    with torch.no_grad():
        for rate, layer in zip((1.0, 10.0, 100.0), gdn_layers(model), strict=True):
            layer.A_log.fill_(math.log(1.0 / rate))
            layer.dt_bias.fill_(-2.0)
    assert state_half_life(model) == pytest.approx(10 * math.log(2) / softplus, rel=1e-12)
    assert state_half_life(load_model("tiny-qwen3", torch.float32)) is None


def test_vocabulary_of_a_preset():
    assert load_model("tiny-qwen3", torch.float32).lm_head.weight.shape == (512, 64)
    assert load_model("tiny-qwen3.5", torch.float32, vocab_size=77).lm_head.weight.shape == (77, 64)
