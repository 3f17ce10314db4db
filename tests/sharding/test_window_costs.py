"""What layers with a sliding window are priced at: pairs exactly, tiles and rows near those of the plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cp_engine.machines import MACHINES
from cp_engine.prediction import Predictor, flat_time, one_gpu_time, place
from cp_engine.sharding.attention_plan import attention_plan, pairs_by_rank
from cp_engine.sharding.cost import PRESETS, ModelShape
from cp_engine.sharding.exchange_choice import choose_exchange
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.intervals import visible_tokens
from cp_engine.sharding.layer_time import rank_time, step_time
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.measure import TILE, Survey, measure
from cp_engine.sharding.search import balanced_layout
from tests.forests import chain_forest, random_layout, random_variety

MODEL, H200 = PRESETS["qwen3-8b"], MACHINES["h200"]


def windowed(window: int, layers: int = 18) -> ModelShape:
    return replace(MODEL, window_layers=layers, window=window)


def trunk_and_leaves():
    rows = [np.concatenate([np.zeros(4096), np.full(1024, 1 + leaf)]).astype(np.int64) for leaf in range(8)]
    return build_forest(np.concatenate(rows), np.arange(9) * 5120)


def plan_counts(forest, layout, rank: int, window: int) -> tuple[int, int, int]:
    """Attention tiles, rows in and rows out of a rank, from its plan."""
    query, key = layout.rank_tokens(rank), visible_tokens(forest, layout, rank, window)
    end, depth, tiles = forest.subtree_end[forest.segment_of], forest.position, 0
    for first in range(0, len(query), TILE):
        rows = query[first : first + TILE, None]
        sees = (key[None] <= rows) & (rows < end[key][None]) & (depth[rows] - depth[key][None] < window)
        tiles += len(np.unique(np.flatnonzero(sees.any(0)) // TILE))
    fetch = attention_plan(forest, layout, rank, "gather", window).fetch
    return tiles, fetch.rows_in, fetch.rows_out


@pytest.mark.parametrize("seed", range(60))
def test_pairs_are_those_of_the_plans(seed):
    forest = random_variety(seed).forest
    layout, survey = random_layout(forest, seed), Survey(forest)
    for window in (1, 2, 3, 7, 40, 10_000):
        figures = measure(survey, layout, False, window)
        assert figures.windowed.pairs.tolist() == pairs_by_rank(forest, layout, window).tolist()
        for name in ("tiles", "rows_in", "rows_out"):
            full, seen = getattr(figures, name), getattr(figures.windowed, name)
            assert (seen <= full).all() if name != "rows_out" else seen.sum() <= full.sum()
            assert window < 10_000 or (seen == full).all()
    assert measure(survey, layout, False).windowed is None


@pytest.mark.parametrize("window", [128, 1024, 4096])
@pytest.mark.parametrize("forest", [chain_forest(16_384), trunk_and_leaves()], ids=["chain", "tree"])
def test_tiles_and_rows_are_near_those_of_the_plans(forest, window):
    for world in (1, 4):
        layout, survey = contiguous_layout(forest, world), Survey(forest)
        found = measure(survey, layout, False, window).windowed
        tiles, rows_in, rows_out = np.array([plan_counts(forest, layout, rank, window) for rank in range(world)]).T
        assert (np.abs(found.tiles - tiles) <= 0.03 * tiles + 2 * world).all(), (found.tiles, tiles)
        assert found.rows_in.tolist() == rows_in.tolist()
        # Rows go out of the ranks in the proportion of layers without a window.
        assert abs(found.rows_out.sum() - rows_out.sum()) <= world


def test_a_step_is_the_sum_of_both_kinds_of_layers():
    forest = trunk_and_leaves()
    survey, layout = Survey(forest), contiguous_layout(forest, 4)

    def step(model: ModelShape) -> int:
        time = step_time(measure(survey, layout, False, model.window), model)
        assert rank_time(time, model).max() <= time.step
        return time.step

    narrow, none, wide = step(windowed(256, 36)), step(MODEL), step(windowed(5120, 36))
    assert wide == none > 1.05 * narrow
    assert step(windowed(256, 18)) == (narrow + none) / 2


def test_the_exchange_is_chosen_and_predicted_for_both_kinds_of_layers():
    forest = trunk_and_leaves()
    for window in (64, 1024):
        model = windowed(window, 27)
        placement = place(forest, 4, "balanced", model, H200)
        times = Predictor(placement, model).times(H200)
        predicted = choose_exchange(placement.survey, placement.layout, model=model).predicted
        assert times["gather"].step == step_time(placement.figures, model).step
        full, narrow = (
            choose_exchange(placement.survey, placement.layout, model=each).predicted
            for each in (MODEL, windowed(window, 36))
        )
        for name, time in predicted.items():
            assert time == (9 * full[name] + 27 * narrow[name]) // 36 and narrow[name] < full[name]
            assert times[name].step == 9 * full[name] + 27 * narrow[name]


def test_one_gpu_and_flat_rows_have_windows_too():
    forest, model = chain_forest(16_384), windowed(1024)
    alone = one_gpu_time(forest, model, H200)
    assert alone < one_gpu_time(forest, MODEL, H200)
    assert flat_time(np.array([16_384]), model, H200) == alone
    assert flat_time(np.array([512, 1024]), model, H200) == flat_time(np.array([512, 1024]), MODEL, H200)


def test_the_search_prices_windows():
    forest, model = trunk_and_leaves(), windowed(128, 36)
    found = balanced_layout(forest, 4, model=model)
    known = measure(Survey(found.forest), found.layout, False, 128)
    assert found.time.step == step_time(known, model).step < balanced_layout(forest, 4, model=MODEL).time.step
