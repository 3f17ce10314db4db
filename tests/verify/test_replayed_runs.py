"""Packs whose short shared runs are replayed give the flat rows' loss and gradients, too."""

from __future__ import annotations

from unittest import mock

import pytest

import cp_engine.step as step_module
from cp_engine.sharding.packing import pack_rollouts
from cp_engine.sharding.replay import RunPrices
from cp_engine.verify.run import VerifyOptions, run_flat, verify_tree
from tests.ranks import run_ranks
from tests.verify.test_verify import sample, this_rank

# A run of up to about 60 tokens with two continuations is cheaper as two copies.
PRICES = RunPrices(token=10, pair=0, chunk=100, fragment=500)


def replaying(*rows, **options):
    return pack_rollouts(*rows, **{**options, "run_prices": PRICES})


def verify_replayed(model: str, budget: int | None) -> tuple[dict, int, int]:
    ranks = this_rank()
    options = VerifyOptions(
        model=model, loss="grpo", aggregation="seq-mean-token-mean", max_pack_tokens=budget, gdn_exchange="affine"
    )
    with mock.patch.object(step_module, "pack_rollouts", replaying):
        flat = run_flat(sample(), options, ranks)
    packs = flat.step.packs
    figures = verify_tree(flat, options, ranks)
    figures.pop("tree_seconds")
    return figures, sum(p.unshared_tokens for p in packs), sum(p.replayed_tokens for p in packs)


@pytest.mark.parametrize("budget", [None, 120])
@pytest.mark.parametrize(("model", "world"), [("tiny-qwen3", 2), ("tiny-qwen3.5", 3)])
def test_replayed_runs_are_exact(model, world, budget):
    figures, unshared, replayed = run_ranks(world, verify_replayed, model, budget)[0]
    assert figures["ok"], figures["reasons"]
    assert unshared > 0 and (replayed > 0) == (budget is not None)
