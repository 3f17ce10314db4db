"""Routers of the MoE presets, and Qwen3-Next's fused projections: nothing that the exactness tests could not see."""

import copy

import pytest
import torch

from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.hf_gdn import gdn_layers
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from cp_engine.models.presets import PRESETS
from tests.models.flat import branching_rollouts
from tests.models.test_exactness import compare

MOE = [preset for preset in PRESETS if "moe" in preset or "next" in preset]


def router_logits(preset: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    model = load_model(preset, dtype, seed=seed)
    make_cpu_runnable(model)
    with torch.no_grad():
        rows = [
            model(torch.tensor([row]), use_cache=False, output_router_logits=True).router_logits
            for row in branching_rollouts()
        ]
    return tuple(torch.cat(layer) for layer in zip(*rows, strict=True))


@pytest.mark.parametrize("preset", MOE)
@pytest.mark.parametrize("seed", [0, 3])
def test_router_margins_are_far_above_rounding(preset, seed):
    layers = router_logits(preset, torch.float64, seed)
    narrow = router_logits(preset, torch.float32, seed)
    assert len(layers) == (3 if preset == "tiny-qwen3-moe" else 4)
    for logits, rounded in zip(layers, narrow, strict=True):
        assert 1.0 < logits.std(-1).mean() < 2.5  # measured: 1.3 to 1.6
        ordered = logits.sort(-1, descending=True).values
        margin = (ordered[:, 1] - ordered[:, 2]).min()
        rounding = (logits - rounded).abs().max()
        # Measured: margins from 9e-4, float32 rounding up to 7e-6.
        assert margin > 10 * rounding and margin > 1e-4
        used = logits.topk(2, -1).indices.flatten().bincount(minlength=8)
        assert used.min() > 0


@pytest.mark.parametrize("preset", MOE)
def test_a_tiny_change_of_one_expert_is_seen(preset):
    def spoil(model):
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj[5, 0, 0] += 1e-7

    *_, gradient, _ = compare(preset, torch.float64, keep_float64, spoil)
    assert gradient > 1e-9


def swap_blocks(weight: torch.Tensor, first: int, second: int, size: int) -> None:
    with torch.no_grad():
        a, b = (slice(start, start + size) for start in (first, second))
        weight[a], weight[b] = weight[b].clone(), weight[a].clone()


@pytest.mark.parametrize(
    ("projection", "first", "second", "size"),
    [("in_proj_qkvz", 32, 64, 32), ("in_proj_qkvz", 32, 96, 64), ("in_proj_ba", 0, 2, 2), ("in_proj_ba", 0, 4, 2)],
    ids=["v of two heads", "v and z", "b and a", "b of two key heads"],
)
def test_a_wrong_order_inside_a_fused_projection_is_seen(projection, first, second, size):
    """A key head's rows are q 16, k 16, v 2 x 32, z 2 x 32 of ``in_proj_qkvz``, and b 2, a 2 of ``in_proj_ba``."""

    def spoil(model):
        swap_blocks(getattr(next(gdn_layers(model)), projection).weight, first, second, size)

    log_prob, *_ = compare("tiny-qwen3-next", torch.float64, keep_float64, spoil)
    assert log_prob > 1e-4


def test_float64_models_loop_over_experts_and_others_take_grouped_products():
    for dtype, implementation in ((torch.float64, "eager"), (torch.float32, "grouped_mm")):
        assert load_model("tiny-qwen3-moe", dtype).config._experts_implementation == implementation


def test_grouped_products_and_the_loop_are_one_function():
    grouped = load_model("tiny-qwen3-moe", torch.float32)
    looped = copy.deepcopy(grouped)
    looped.set_experts_implementation("eager")
    ids = torch.tensor([branching_rollouts()[0]])
    torch.testing.assert_close(grouped(ids).logits, looped(ids).logits, rtol=0, atol=1e-5)
