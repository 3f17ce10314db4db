"""Replayed routes: exact against the unmodified model with the same experts, shared only where routes are equal."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

import cp_engine.models.hf_routers as hf_routers
import cp_engine.placement as placement
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.models.load import load_model, prepare_for_trees
from cp_engine.models.precision import keep_float64
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.rollouts import Rollout, RolloutError, flatten_rollouts
from cp_engine.routes import row_routes
from cp_engine.sharding.packing import pack_rollouts
from cp_engine.verify.run import VerifyOptions, run_flat, verify_tree
from tests.models.flat import branching_rollouts, one_rank_pack, worst_error
from tests.verify.test_routers import crowded
from tests.verify.test_verify import on_ranks, sample, this_rank

LAYERS = {"tiny-qwen3-moe": 3, "tiny-qwen3.5-moe": 4, "tiny-qwen3-next": 4}
ONE = Ranks(0, 1, None, torch.device("cpu"))


def drawn_routes(count: int, layers: int, seed: int = 0) -> np.ndarray:
    """Two of eight experts, [count, layers, 2]."""
    return np.random.default_rng(seed).random((count, layers, 8)).argsort(-1)[..., :2]


def routed(layers: int, limit: int = 8) -> list[Rollout]:
    """Sample rollouts whose routes are a function of token and position, but for the last one, which branches off early
    by its routes alone."""
    rollouts = sample(limit)
    table = drawn_routes(997, layers)
    found = [replace(r, routes=table[(r.input_ids * 31 + np.arange(r.length)) % 997]) for r in rollouts]
    other = found[-1].routes.copy()
    other[5] = (other[5] + 1) % 8
    return [*found, replace(found[-1], routes=other, rollout="same ids, other routes")]


def options(model: str) -> VerifyOptions:
    return VerifyOptions(model=model, loss="grpo", max_pack_tokens=130)


def verify_routed(model: str, layout: str) -> dict:
    flat = run_flat(routed(LAYERS[model]), options(model), this_rank())
    with mock.patch.object(placement, "choose_layout", crowded if layout == "crowded" else placement.choose_layout):
        return verify_tree(flat, options(model), this_rank())


@pytest.mark.parametrize(
    ("model", "world", "layout"),
    [
        *((model, 1, "balanced") for model in LAYERS),
        ("tiny-qwen3-moe", 2, "balanced"),
        ("tiny-qwen3-next", 3, "crowded"),
    ],
)
def test_tree_equals_flat_rows_with_the_same_experts(model, world, layout):
    result = on_ranks(world, verify_routed, model, layout)
    assert result["ok"] and result["packs"] > 1, result["reasons"]


def test_routers_that_ignore_the_routes_are_found():
    flat = run_flat(routed(3), options("tiny-qwen3-moe"), ONE)
    with mock.patch.object(hf_routers, "_replay", lambda *args: None):
        assert verify_tree(flat, options("tiny-qwen3-moe"), ONE)["max_grad_err"] > 1e-2


def test_equal_ids_share_only_where_routes_are_equal():
    rollouts = routed(3)
    flat = flatten_rollouts(rollouts)
    (pack,) = pack_rollouts(flat.token, flat.row_start, flat.group, flat.loss_mask, share_key=flat.share_key)
    plain = flatten_rollouts([replace(r, routes=None) for r in rollouts])
    assert pack.forest.tokens == plain.forest().tokens + rollouts[-1].length - 5
    # Every tree token has the route of every (rollout, position) that it stands for.
    routes = row_routes(flat, pack, np.arange(pack.forest.tokens))
    found = routes.transpose(1, 0, 2)[pack.forest.flat_to_tree()]
    assert (found == np.concatenate([np.sort(r.routes, -1) for r in rollouts])).all()
    assert (row_routes(flat, pack, np.empty(0, np.int64)) == np.arange(2)).all()
    # Keys that the user gives still keep tokens apart, and the order of experts does not.
    keyed = [replace(r, share_key=np.full(r.length, i)) for i, r in enumerate(rollouts)]
    assert flatten_rollouts(keyed).forest().tokens == len(flat.token)
    swapped = [replace(r, routes=r.routes[..., ::-1]) for r in rollouts]
    assert (flatten_rollouts(swapped).share_key == flat.share_key).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_with_two_packs_in_flight_takes_each_packs_routes(use_reentrant):
    model = load_model("tiny-qwen3-moe", torch.float64)
    prepare_for_trees(model)
    tree = TreeCausalLM(model).train()
    packs = [one_rank_pack(branching_rollouts(seed=seed)[3:8], None) for seed in (0, 1)]
    for seed, pack in enumerate(packs):
        pack.routes = torch.from_numpy(drawn_routes(pack.token_id.shape[1], 3, seed).swapaxes(0, 1).copy())

    def gradients():
        tree.zero_grad()
        for output in [tree(pack)[0].sum() for pack in packs]:
            output.backward()
        return {name: p.grad.clone() for name, p in tree.named_parameters() if p.grad is not None}

    with keep_float64():
        expected = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
        error, worst = worst_error(gradients(), expected)
    assert error <= 1e-13, worst


@pytest.mark.parametrize(
    ("model", "routes", "message"),
    [
        ("tiny-qwen3", drawn_routes(3, 4), "field routes: expected none, because the model has no expert routers"),
        ("tiny-qwen3-moe", drawn_routes(3, 4), "expected 3 MoE layers with 2 experts for each token, .* got 4 with 2"),
        ("tiny-qwen3-moe", drawn_routes(3, 3)[..., :1], "expected 3 MoE layers with 2 experts .* got 3 with 1"),
        ("tiny-qwen3-moe", drawn_routes(3, 3) + 7, r"expected experts below 8, as the model has, got \d+"),
    ],
)
def test_routes_of_another_model_are_refused(model, routes, message):
    rollout = Rollout([1, 2, 3], [0, 1, 1], "g", "r", reward=1.0, routes=routes)
    engine = Engine(VerifyOptions(model=model).config(1, 64), ONE)
    with pytest.raises(RolloutError, match=message):
        engine.train_step([rollout])


def test_routes_with_load_balancing_are_refused():
    rollout = Rollout([1, 2, 3], [0, 1, 1], "g", "r", routes=drawn_routes(3, 3))
    engine = Engine(VerifyOptions(model="tiny-qwen3-moe", router_aux_coef=0.1).config(1, 64), ONE)
    with pytest.raises(ValueError, match="router_aux_coef is 0.1, but the rollouts carry routes: .*set it to 0"):
        engine.train_step([rollout])


def test_a_batch_has_routes_of_one_size_or_none():
    with_routes = Rollout([1, 2], [0, 1], "g", "a", routes=drawn_routes(2, 3))
    with pytest.raises(RolloutError, match="field routes: expected it on all rollouts of a batch or on none; 'a' of"):
        flatten_rollouts([with_routes, replace(with_routes, routes=None, rollout="b")])
    with pytest.raises(
        RolloutError, match="'b' of group 'g': field routes: expected 3 MoE layers with 2 .* got 4 with 2"
    ):
        flatten_rollouts([with_routes, replace(with_routes, routes=drawn_routes(2, 4), rollout="b")])
