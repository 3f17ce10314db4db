"""One rank's tree against every rollout run alone, both models, with every parameter gradient."""

import contextlib
import copy

import pytest
import torch

from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.hf_gdn import gdn_layers
from cp_engine.models.load import load_model, prepare_for_trees
from cp_engine.models.precision import keep_float64
from cp_engine.models.presets import PRESETS
from cp_engine.models.shape import attention_window, conv_width
from cp_engine.models.tree_causal_lm import TreeCausalLM
from tests.models.flat import branching_rollouts, flat_run, one_rank_pack, tree_run, worst_error

TEMPERATURE = 0.8


def compare(preset: str, dtype: torch.dtype, context, spoil=lambda model: None) -> tuple[float, float, float, str]:
    """Largest log-prob, entropy and gradient error of the tree, and the gradient's name."""
    flat = load_model(preset, dtype, seed=3)
    make_cpu_runnable(flat)
    tree = copy.deepcopy(flat)
    prepare_for_trees(tree)
    spoil(tree)
    rollouts = branching_rollouts()
    with context():
        expected = flat_run(flat, rollouts, TEMPERATURE)
        found = tree_run(TreeCausalLM(tree), rollouts, TEMPERATURE)
    log_prob, entropy = (float((a - b).abs().max()) for a, b in zip(found[:2], expected[:2], strict=True))
    return log_prob, entropy, *worst_error(found[2], expected[2])


@pytest.mark.parametrize("preset", PRESETS)
def test_float64_tree_equals_the_rollouts_alone(preset):
    log_prob, entropy, gradient, worst = compare(preset, torch.float64, keep_float64)
    print(f"{preset}: log-prob {log_prob:.1e}, entropy {entropy:.1e}, gradient {gradient:.1e} ({worst})")
    assert log_prob <= 1e-10 and entropy <= 1e-10 and gradient <= 1e-10, worst


@pytest.mark.parametrize("preset", PRESETS)
def test_without_the_context_float32_casts_show(preset):
    *_, gradient, _ = compare(preset, torch.float64, contextlib.nullcontext)
    assert gradient > 1e-8


@pytest.mark.parametrize("preset", PRESETS)
def test_float32_tree_equals_the_rollouts_alone_without_the_context(preset):
    log_prob, entropy, gradient, worst = compare(preset, torch.float32, contextlib.nullcontext)
    print(f"{preset}: log-prob {log_prob:.1e}, entropy {entropy:.1e}, gradient {gradient:.1e} ({worst})")
    assert log_prob <= 2e-5 and entropy <= 2e-5 and gradient <= 2e-5, worst


def test_a_tiny_change_of_one_decay_is_seen():
    def spoil(model):
        with torch.no_grad():
            next(gdn_layers(model)).A_log[0] += 1e-7

    _, _, gradient, _ = compare("tiny-qwen3.5", torch.float64, keep_float64, spoil)
    assert gradient > 1e-9


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_with_two_packs_in_flight_sees_its_own(preset, use_reentrant):
    model = load_model(preset, torch.float64, seed=3)
    prepare_for_trees(model)
    sizes = conv_width(model.config), attention_window(model.config)
    tree = TreeCausalLM(model).train()
    packs = [one_rank_pack(branching_rollouts(seed=seed)[3:8], *sizes) for seed in (0, 1)]

    def gradients():
        tree.zero_grad()
        outputs = [tree(pack)[0].sum() for pack in packs]
        for output in outputs:
            output.backward()
        return {name: parameter.grad.clone() for name, parameter in tree.named_parameters()}

    with keep_float64():
        expected = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:  # gradients reach a reentrant checkpoint only through its inputs
            model.enable_input_require_grads()
        error, worst = worst_error(gradients(), expected)
    assert error <= 1e-13, worst


def test_a_rank_without_edges_gives_zero_gradients_to_every_parameter():
    model = load_model("tiny-qwen3.5", torch.float32)
    prepare_for_trees(model)
    tree = TreeCausalLM(model)
    log_prob, entropy = tree(one_rank_pack([[7], [9]], 4))
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in tree.parameters())


@pytest.mark.parametrize(("preset", "layer"), [("tiny-qwen3", "attention layer 0"), ("tiny-qwen3.5", "GDN layer 0")])
def test_a_prepared_model_called_plainly_says_what_to_do(preset, layer):
    model = load_model(preset, torch.float32)
    prepare_for_trees(model)
    with pytest.raises(ValueError, match=f"{layer} got no packed tree.*TreeCausalLM"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
