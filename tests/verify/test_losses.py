"""Every loss with every aggregation, over cut packs and ranks: the flat rows' loss and gradients.

The flat rows of a loss run once, here, and are handed to the ranks of every world size.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest

import cp_engine.losses.rollout_sums as rollout_sums
import cp_engine.placement as placement
from cp_engine.losses.settings import AGGREGATIONS, LOSSES
from cp_engine.sharding.layout import layout_from_cuts
from cp_engine.verify.run import FlatRun, VerifyOptions, run_flat, verify_tree
from tests.ranks import run_ranks
from tests.verify.test_verify import on_ranks, sample, this_rank

Case = tuple[VerifyOptions, FlatRun]


@cache
def flat_runs(model: str, losses: tuple[str, ...], aggregations: tuple[str, ...]) -> list[Case]:
    made = []
    for loss, aggregation in itertools.product(losses, aggregations):
        options = VerifyOptions(model=model, loss=loss, aggregation=aggregation, max_pack_tokens=120)
        made.append((options, run_flat(sample(10), options, this_rank())))
    return made


def verify_all(cases: list[Case]) -> list[dict]:
    return [verify_tree(flat, options, this_rank()) for options, flat in cases]


def assert_exact(cases: list[Case], results: list[dict]) -> None:
    for (options, flat), result in zip(cases, results, strict=True):
        assert result["ok"], (options.loss, options.aggregation, result["reasons"])
        assert result["bound"] == 1e-10 and result["packs"] > 1
        assert max(float(g.abs().max()) for g in flat.gradient.values()) > 1e-6
        assert np.isfinite(result["loss"]) and result["loss"] != 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_loss_with_every_aggregation_is_exact(world):
    cases = flat_runs("tiny-qwen3", LOSSES, AGGREGATIONS)
    assert_exact(cases, on_ranks(world, verify_all, cases))


def test_losses_are_exact_on_the_hybrid():
    cases = flat_runs("tiny-qwen3.5", ("gspo", "cispo", "ppo", "dpo"), ("seq-mean-token-mean",))
    assert_exact(cases, on_ranks(2, verify_all, cases))


def test_sharded_weights_are_verified_too():
    cases = [
        (replace(options, engine="fsdp2"), flat) for options, flat in flat_runs("tiny-qwen3", ("ppo",), AGGREGATIONS)
    ]
    results = on_ranks(2, verify_all, cases)
    assert_exact(cases, results)
    assert all(result["engine"] == "fsdp2" for result in results)


def verify_on_last_rank(cases: list[Case]) -> list[dict]:
    """All tokens lie on the last rank: the others have none, and no occurrences."""

    def crowded(forest, parallel, shape, hosts):
        last = layout_from_cuts(np.array([0, forest.tokens]), np.array([parallel.cp - 1]), parallel.cp)
        return forest, last, None

    with mock.patch.object(placement, "choose_layout", crowded):
        return verify_all(cases)


def test_ranks_without_tokens_join_the_sums_over_rollouts():
    cases = flat_runs("tiny-qwen3", ("gspo", "dpo", "ppo"), ("seq-mean-token-sum-norm",))
    assert_exact(cases, run_ranks(3, verify_on_last_rank, cases)[0])


def verify_without_backward_sum(cases: list[Case]) -> list[dict]:
    def kept(ctx, grad):
        return grad, None

    with mock.patch.object(rollout_sums._AllReduce, "backward", staticmethod(kept)):
        return verify_all(cases)


def test_a_sum_that_is_not_summed_backward_is_found():
    cases = flat_runs("tiny-qwen3", ("gspo", "dpo"), ("token-mean",))
    for result in run_ranks(2, verify_without_backward_sum, cases)[0]:
        assert not result["ok"] and result["max_grad_err"] > 1e-3


def test_a_loss_in_float32_is_within_its_bound():
    for loss in ("gspo", "dpo"):
        options = VerifyOptions(model="tiny-qwen3", dtype="float32", loss=loss, temperature=0.7)
        result = verify_tree(run_flat(sample(10), options, this_rank()), options, this_rank())
        assert result["ok"], result["reasons"]
