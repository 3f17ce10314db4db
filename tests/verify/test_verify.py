"""`verify` on sample rollouts and small random forests, and the faults that it has to find.

Every case of a world size runs in one call to the rank pool; flat rows are computed once for all exchanges.
"""

import contextlib
import itertools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cp_engine.kernels.gdn.state_pass as state_pass
import cp_engine.models.tree_causal_lm as tree_causal_lm
import cp_engine.placement as placement
import cp_engine.sharding.exchange.gather as gather
import cp_engine.sharding.exchange.ulysses as ulysses
from cp_engine.distributed.ranks import Ranks
from cp_engine.rollouts import Rollout, read_rollouts
from cp_engine.verify.run import VerifyOptions, run_flat, verify, verify_tree
from tests.forests import closed_form_rows, random_layout, random_variety
from tests.ranks import run_ranks

SAMPLE = Path(__file__).parent.parent.parent / "launch" / "data" / "sample.jsonl"
ALL = ("gather", "ring", "ulysses")
EXCHANGES = {1: ALL[:2], 2: ALL, 3: ALL[:2], 4: ALL}  # 8 query heads do not divide by 3


def this_rank() -> Ranks:
    if not dist.is_initialized():
        return Ranks(0, 1, None, torch.device("cpu"))
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))


def on_ranks(world: int, fn, *args) -> dict:
    """Result of the first rank; all ranks must agree on what `verify` returns."""
    if world == 1:
        return fn(*args)
    return run_ranks(world, fn, *args)[0]


def combinations(model: str, world: int):
    gdn = ("affine", "ulysses") if model == "tiny-qwen3.5" and world in (2, 4) else ("affine",)
    return itertools.product(EXCHANGES[world], gdn)


def sample(limit: int = 20) -> list[Rollout]:
    return read_rollouts(SAMPLE, limit=limit)


def three_branches() -> list[Rollout]:
    """A trunk of four tokens and two branches of four: in contiguous thirds each lies on another of three ranks."""
    rows = ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 8, 9, 10, 11])
    return [
        Rollout(input_ids=row, loss_mask=[1] * 8, group="g", rollout=str(i), reward=float(i))
        for i, row in enumerate(rows)
    ]


def small_forests() -> dict[str, list[Rollout]]:
    """Duplicates, strict prefixes, one-token rows, several roots, segments of 1 to 3 tokens, more ranks than tokens."""
    forests = {"closed form": closed_form_rows().rollouts(), "three branches": three_branches()}
    forests["two tokens"] = [Rollout(input_ids=[3, 1], loss_mask=[0, 1], group="g", rollout="r", reward=1.0)]
    for seed in (1, 3, 4, 8):
        forests[f"random {seed}"] = random_variety(seed).rollouts(seed)
    return forests


def verify_exchanges(model: str, dtype: str, loss: str, extra: dict) -> dict:
    ranks, results = this_rank(), {}
    base = VerifyOptions(model=model, dtype=dtype, loss=loss, **extra)
    flat = run_flat(sample(), base, ranks)
    for exchange, gdn in combinations(model, ranks.world):
        options = VerifyOptions(model=model, dtype=dtype, loss=loss, exchange=exchange, gdn_exchange=gdn, **extra)
        results[exchange, gdn] = verify_tree(flat, options, ranks)
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3.5"])
@pytest.mark.parametrize(
    ("dtype", "loss", "extra"),
    [
        ("float64", "sft", {}),
        ("float64", "sft", {"max_pack_tokens": 130}),
        # Cut into packs with replayed ancestors, one trie a group, weights that differ per rollout.
        ("float64", "grpo", {"aggregation": "seq-mean-token-mean", "max_pack_tokens": 120, "share": "group"}),
        ("float32", "grpo", {"temperature": 0.7}),
    ],
    ids=["f64-sft", "f64-sft-packs", "f64-grpo-packs", "f32-grpo"],
)
def test_tree_equals_flat_rows_on_the_sample(world, model, dtype, loss, extra):
    results = on_ranks(world, verify_exchanges, model, dtype, loss, extra)
    assert len(results) == len(list(combinations(model, world)))
    for case, result in results.items():
        assert result["ok"], (case, result["reasons"])
        assert result["bound"] == {"float64": 1e-10, "float32": 2e-5}[dtype]
        assert (result["packs"] > 1) == ("max_pack_tokens" in extra)
        assert 0 < result["edges"] <= result["occurrences"]
        if loss == "grpo":
            assert 0.2 <= result["clipped_high"] <= 0.6 and 0.2 <= result["clipped_low"] <= 0.6


def verify_teams(model: str) -> dict:
    options = VerifyOptions(model=model, loss="grpo", exchange="ulysses_gather", ulysses_ranks=2)
    return verify(sample(), options, this_rank())


@pytest.mark.parametrize("model", ["tiny-qwen3.5", "tiny-qwen3-window"])
def test_tree_equals_flat_rows_with_heads_shared_in_teams(model):
    result = on_ranks(4, verify_teams, model)
    assert result["ok"] and (result["exchange"], result["ulysses_ranks"]) == ("ulysses_gather", 2), result


def verify_small_forests(model: str, layouts: bool) -> dict:
    ranks, results = this_rank(), {}
    for name, rollouts in small_forests().items():
        if not any(r.loss_mask[1:].any() for r in rollouts):
            continue
        flat = run_flat(rollouts, VerifyOptions(model=model, loss="grpo"), ranks)
        for seed, (exchange, gdn) in enumerate(combinations(model, ranks.world)):
            options = VerifyOptions(model=model, loss="grpo", exchange=exchange, gdn_exchange=gdn)
            drawn = mock.patch.object(
                placement,
                "choose_layout",
                lambda forest, parallel, *_, s=seed: (forest, random_layout(forest, s, parallel.cp), None),
            )
            with drawn if layouts else contextlib.nullcontext():
                results[name, exchange, gdn] = verify_tree(flat, options, ranks)
    return results


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3.5"])
@pytest.mark.parametrize(("world", "layouts"), [(1, False), (2, True), (3, False), (3, True), (4, False), (4, True)])
def test_tree_equals_flat_rows_on_small_forests(world, layouts, model):
    results = on_ranks(world, verify_small_forests, model, layouts)
    assert len(results) >= 12
    for case, result in results.items():
        # Few occurrences: one side of the clipping may happen to be empty, the errors must not be.
        reasons = [r for r in result["reasons"] if "clipped" not in r]
        assert not reasons, (case, reasons)


def verify_with_fault(fault: str, model: str, options: dict) -> dict:
    ranks = this_rank()
    chosen = VerifyOptions(model=model, loss="grpo", **options)
    with FAULTS[fault]():
        return verify(sample(), chosen, ranks)


def forgotten_entry_state():
    place = state_pass.place_entry_states
    return mock.patch.object(
        state_pass, "place_entry_states", lambda states, entries: place(states, torch.zeros_like(entries))
    )


def forgotten_parent_state():
    read = state_pass.read_states
    return mock.patch.object(state_pass, "read_states", lambda states, reads: torch.zeros_like(read(states, reads)))


def tiled_kv_heads():
    return mock.patch.object(ulysses, "repeat_kv_heads", lambda kv, times: kv.repeat(1, times, 1))


def detached_exchange():
    # Gradients of fetched rows come home and are thrown away.
    return mock.patch.object(gather, "add_home", lambda *arguments: arguments[-1].wait())


def dropped_branch_edges():
    """The log-prob of every second child of a branch point is right, but carries no gradient."""
    score = tree_causal_lm.edge_logprobs

    def cut(hidden, head, edges, *rest):
        log_prob, entropy = score(hidden, head, edges, *rest)
        second = torch.zeros_like(edges.edge_predictor, dtype=torch.bool)
        second[1:] = edges.edge_predictor[1:] == edges.edge_predictor[:-1]
        return torch.where(second, log_prob.detach(), log_prob), entropy

    return mock.patch.object(tree_causal_lm, "edge_logprobs", cut)


def lost_predictor_gradients():
    """Gradients of hidden states that another rank's head read do not come home."""
    move = tree_causal_lm.relay_rows

    def lost(x, tables, group):
        rows = move(x, tables, group)
        stays = torch.zeros(len(rows), 1, dtype=torch.bool)
        stays[tables.stay_to] = True
        return torch.where(stays, rows, rows.detach())

    return mock.patch.object(tree_causal_lm, "relay_rows", lost)


FAULTS = {
    f.__name__: f
    for f in (
        forgotten_entry_state,
        forgotten_parent_state,
        tiled_kv_heads,
        detached_exchange,
        dropped_branch_edges,
        lost_predictor_gradients,
    )
}


@pytest.mark.parametrize(
    ("fault", "world", "model", "options"),
    [
        ("forgotten_entry_state", 3, "tiny-qwen3.5", {}),
        ("forgotten_parent_state", 1, "tiny-qwen3.5", {}),
        ("tiled_kv_heads", 4, "tiny-qwen3", {"exchange": "ulysses"}),
        ("detached_exchange", 2, "tiny-qwen3", {}),
        ("dropped_branch_edges", 1, "tiny-qwen3", {}),
        ("dropped_branch_edges", 2, "tiny-qwen3.5", {}),
        ("lost_predictor_gradients", 3, "tiny-qwen3", {"layout": "contiguous"}),
    ],
)
def test_planted_faults_make_verify_fail(fault, world, model, options):
    result = on_ranks(world, verify_with_fault, fault, model, options)
    assert not result["ok"]
    assert result["max_grad_err"] > 1e-3, result


def verify_poisoned() -> dict:
    """All uninitialised memory is NaN: an element that nobody wrote would reach a result."""
    ranks, results = this_rank(), {}
    flat = run_flat(sample(8), VerifyOptions(model="tiny-qwen3.5"), ranks)
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def poison(make):
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return made

    with (
        mock.patch.object(torch, "empty", poison(empty)),
        mock.patch.object(torch, "empty_like", poison(empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poison(new_empty)),
    ):
        for exchange, gdn in combinations("tiny-qwen3.5", ranks.world):
            options = VerifyOptions(model="tiny-qwen3.5", exchange=exchange, gdn_exchange=gdn)
            results[exchange, gdn] = verify_tree(flat, options, ranks)
    return results


def test_uninitialised_memory_reaches_no_result():
    for case, result in on_ranks(4, verify_poisoned).items():
        assert result["ok"], (case, result["reasons"])


def test_a_bound_below_rounding_is_not_ok():
    result = verify(sample(4), VerifyOptions(model="tiny-qwen3", bound=1e-30), this_rank())
    assert not result["ok"]
    assert any(reason.startswith("max_logprob_err") for reason in result["reasons"])


def test_a_side_of_the_clipping_that_nothing_reaches_is_not_ok():
    result = verify(small_forests()["two tokens"], VerifyOptions(model="tiny-qwen3", loss="grpo"), this_rank())
    (reason,) = result["reasons"]
    assert not result["ok"] and "side, so clipping was not compared: verify more rollouts" in reason


def test_reindexing_keeps_which_ids_are_equal():
    from cp_engine.verify.run import reindex

    rollouts, vocabulary = reindex(sample(6))
    before = np.concatenate([r.input_ids for r in sample(6)])
    after = np.concatenate([r.input_ids for r in rollouts])
    assert vocabulary == len(np.unique(before)) == after.max() + 1
    assert ((before[:, None] == before) == (after[:, None] == after)).all()
