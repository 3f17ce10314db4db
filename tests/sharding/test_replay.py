"""Share or replay: the cheapest choice against all choices, and forests built from it."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest

from cp_engine.sharding.cost import PRESETS
from cp_engine.sharding.forest import Forest, build_forest
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.packing import pack_rollouts
from cp_engine.sharding.replay import RunPrices, run_prices, share_or_replay, split_key
from tests.forests import Rows, chain_forest, comb_rows, random_layout, random_rows, random_variety
from tests.sharding import test_attention_plan, test_gdn_plan, test_plans

FREE = RunPrices(token=7, pair=2, chunk=0, fragment=0)
DEAR = RunPrices(token=1, pair=0, chunk=0, fragment=10**9)
MIXED = (
    RunPrices(token=10, pair=0, chunk=0, fragment=35),
    RunPrices(token=10, pair=1, chunk=30, fragment=20),
    RunPrices(token=0, pair=1, chunk=0, fragment=25),
    RunPrices(token=9, pair=0, chunk=0, fragment=4),
    RunPrices(token=3, pair=0, chunk=200, fragment=0),
)


def split_forest(rows: Rows, replayed: np.ndarray) -> Forest:
    group = rows.group if rows.share == "group" else None
    return build_forest(rows.token, rows.row_start, group, split_key(rows.forest, replayed))


def forest_cost(forest: Forest, prices: RunPrices) -> int:
    return int(prices.run(forest.depth, forest.depth + forest.segment_length).sum())


def chosen_forest(rows: Rows, replayed: list[bool]) -> Forest:
    """The forest of a choice, with keys made by walking each rollout's path in plain Python."""
    forest, key = rows.forest, []
    for end in forest.end_segment.tolist():
        path = [end]
        while forest.parent[path[-1]] >= 0:
            path.append(int(forest.parent[path[-1]]))
        below, keys = end, []
        for segment in path:
            below = below if replayed[segment] else segment
            keys = [below] * int(forest.segment_length[segment]) + keys
        key += keys
    group = rows.group if rows.share == "group" else None
    return build_forest(rows.token, rows.row_start, group, np.array(key))


def small_rows(seed: int) -> Rows:
    """Rows with at most 8 branch points, some of them where a rollout ends."""
    for attempt in range(1000):
        rows = random_rows(1000 * seed + attempt, rows=10, longest=8 if seed % 2 else 90, vocabulary=3)
        inner = len(set(rows.forest.parent.tolist()) - {-1})
        if 3 <= inner <= 8:
            return rows
    raise AssertionError("no small trie")


@pytest.mark.parametrize("seed", range(24))
def test_the_choice_is_the_best_of_all(seed):
    """Branch points where a rollout ends may be replayed in the enumeration, too: that is never better."""
    rows = small_rows(seed)
    forest = rows.forest
    inner = sorted(set(forest.parent.tolist()) - {-1})
    tries = []
    for choice in product([False, True], repeat=len(inner)):
        replayed = np.zeros(forest.segments, bool)
        replayed[inner] = choice
        tries.append(chosen_forest(rows, replayed.tolist()))
    for prices in (FREE, DEAR, *MIXED):
        found = share_or_replay(forest, prices)
        assert found.cost == forest_cost(split_forest(rows, found.replayed), prices)
        assert found.cost == min(forest_cost(each, prices) for each in tries)


@pytest.mark.parametrize("seed", range(60))
def test_never_dearer_than_all_shared_or_all_flat(seed):
    rows = random_variety(seed)
    forest = rows.forest
    lengths = [len(row) for row in rows.rows]
    for prices in (FREE, DEAR, *MIXED):
        found = share_or_replay(forest, prices)
        assert found.all_shared == forest_cost(forest, prices)
        assert found.all_flat == sum(int(prices.run(np.array(0), np.array(length))) for length in lengths)
        assert found.cost == forest_cost(split_forest(rows, found.replayed), prices)
        assert found.cost <= min(found.all_shared, found.all_flat)


def test_without_overheads_everything_is_shared():
    for seed in range(40):
        assert not share_or_replay(random_variety(seed).forest, FREE).replayed.any()


def test_with_huge_fragment_costs_the_forest_is_the_flat_rows():
    """But for rows that are equal to, or begin, another row: these ride along and save tokens at no fragment."""
    for seed in range(40):
        rows = random_variety(seed)
        forest = rows.forest
        built = split_forest(rows, share_or_replay(forest, DEAR).replayed)
        assert built.segments == len(set(forest.end_segment.tolist()))
        nested = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.segments) > 0
        if not nested[forest.end_segment].any():  # no row begins another one
            lengths = {int(end): int(n) for end, n in zip(forest.end_segment, forest.rollout_length, strict=True)}
            assert (built.parent < 0).all()
            assert sorted(built.segment_length.tolist()) == sorted(lengths.values())


def split_case(seed: int) -> tuple[Rows, Layout]:
    rows = random_variety(seed)
    key = split_key(rows.forest, share_or_replay(rows.forest, MIXED[seed % len(MIXED)]).replayed)
    keys = [part.tolist() for part in np.split(key, rows.row_start[1:-1])]
    split = Rows(rows.rows, rows.groups, rows.share, keys)
    return split, random_layout(split.forest, 1_000 + seed)


@pytest.mark.parametrize("seed", range(20))
def test_plans_of_split_forests(seed, monkeypatch):
    """Every plan against its definition, on forests with replayed runs."""
    for module in (test_attention_plan, test_gdn_plan, test_plans):
        monkeypatch.setattr(module, "case", split_case)
    test_attention_plan.test_visible_intervals(seed)
    for exchange in ("gather", "ring", "ulysses"):
        test_attention_plan.test_attention_plan(seed, exchange)
    test_gdn_plan.test_gdn_affine_plan(seed, 4)
    test_gdn_plan.test_gdn_ulysses_plan(seed)
    test_plans.test_loss_plan(seed)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_packs_report_what_is_unshared_and_replayed(seed, coupled):
    rows, prices = random_variety(seed), MIXED[seed % len(MIXED)]
    sets = np.random.default_rng(seed).integers(0, len(rows.rows), len(rows.rows)) if coupled else None
    numbers = np.arange(len(rows.rows)) if sets is None else sets
    seen = [[rows.prefix(r, p) for p in range(len(row))] for r, row in enumerate(rows.rows)]
    budget = max(len({t for r in np.flatnonzero(numbers == n) for t in seen[r]}) for n in numbers)
    packs = pack_rollouts(
        rows.token,
        rows.row_start,
        rows.group,
        rows.mask(0),
        share=rows.share,
        share_key=rows.share_key,
        max_pack_tokens=budget,
        coupled=sets,
        run_prices=prices,
    )
    assert sorted(r for pack in packs for r in pack.rollouts.tolist()) == list(range(len(rows.rows)))
    assert all(len({i for i, p in enumerate(packs) if (numbers[p.rollouts] == n).any()}) == 1 for n in numbers)
    assert all(pack.tokens <= budget and min(pack.replayed_tokens, pack.unshared_tokens) >= 0 for pack in packs)
    assert sum(p.tokens - p.replayed_tokens - p.unshared_tokens for p in packs) == rows.forest.tokens
    if sets is None:
        split = split_forest(rows, share_or_replay(rows.forest, prices).replayed)
        assert sum(p.unshared_tokens for p in packs) == split.tokens - rows.forest.tokens
        assert sum(p.tokens - p.replayed_tokens for p in packs) == split.tokens
    for pack in packs:
        tree = pack.forest.flat_to_tree()
        flat = [t for r in pack.rollouts for t in rows.rows[r]]
        assert pack.forest.token[tree].tolist() == flat


def test_a_coupled_set_keeps_the_sharing_that_it_needs_to_fit():
    token, start = np.array([1] * 6 + [2] + [1] * 6 + [3]), np.array([0, 7, 14])
    options = {"max_pack_tokens": 8, "coupled": np.zeros(2, np.int64), "run_prices": DEAR}
    (pack,) = pack_rollouts(token, start, np.zeros(2, np.int64), token > 0, **options)
    assert pack.tokens == 8 and pack.unshared_tokens == 0


def test_deep_forests_take_near_linear_time():
    prices = RunPrices(token=10, pair=0, chunk=100, fragment=200)
    began = time.process_time()
    assert not share_or_replay(chain_forest(20_000), prices).replayed.any()
    comb = comb_rows(2_000)
    found = share_or_replay(comb.forest, prices)
    assert found.replayed.any() and found.cost <= min(found.all_shared, found.all_flat)
    assert time.process_time() - began < 12


def test_prices_of_a_model():
    dense, hybrid = run_prices(PRESETS["qwen3-8b"]), run_prices(PRESETS["qwen3-next-80b-a3b"])
    assert dense.chunk == 0 and hybrid.chunk > hybrid.token > 0
    assert dense.token > dense.pair > 0 and dense.fragment > 0
    with pytest.raises(ValueError, match="run prices must be at least 0, got pair = -1"):
        RunPrices(token=0, pair=-1, chunk=0, fragment=0)
