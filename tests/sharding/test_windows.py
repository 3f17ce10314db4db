"""Plans of sliding-window layers: every row sees the last tokens of its path, on random forests and layouts."""

from __future__ import annotations

import numpy as np
import pytest

from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.intervals import visible_intervals, visible_tokens
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.plan import shard_plan
from tests.forests import chain_forest, closed_form_rows
from tests.sharding.plan_cases import case, check_exchange, keys_of_row, rank_rows, received

SEEDS = range(40)


def window_of(seed: int) -> int:
    return (1, 2, 3, 5, 9, 40)[seed % 6]


def seen(rows, token: int, window: int) -> list[int]:
    return [] if token < 0 else rows.paths[token][-window:]


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_are_counted_along_the_path(seed):
    rows, layout = case(seed)
    for window in (1, 2, 4, 7, 1000):
        for rank in range(layout.world):
            intervals = visible_intervals(rows.forest, layout, rank, window)
            tokens = rank_rows(layout, rank)
            for row, token in enumerate(tokens):
                assert keys_of_row(intervals, row) == seen(rows, token, window)
            assert intervals.pairs() == sum(len(seen(rows, token, window)) for token in tokens)
            wanted = {key for token in tokens for key in seen(rows, token, window)}
            assert visible_tokens(rows.forest, layout, rank, window).tolist() == sorted(wanted)


def test_a_chain_under_a_window_is_two_runs():
    """Rows of one segment that see all of their path, then rows whose window slides: no run is cut without need."""
    forest = chain_forest(50)
    intervals = visible_intervals(forest, contiguous_layout(forest, 1), 0, 8)
    assert intervals.run_row.tolist() == [0, 7] and intervals.slide.tolist() == [False, True]
    assert intervals.of_row(20) == [(13, 21)]


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_on_any_subset_of_remote_keys(seed):
    rows, layout = case(seed)
    rng = np.random.default_rng(seed)
    window = window_of(seed)
    for rank in range(layout.world):
        intervals = visible_intervals(rows.forest, layout, rank, window)
        kept = rng.random(rows.forest.tokens) < 0.5
        kept[layout.rank_tokens(rank)] = rng.random() < 0.5
        keys = np.flatnonzero(kept)
        moved = intervals.on_keys(keys)
        for row, token in enumerate(rank_rows(layout, rank)):
            assert keys[keys_of_row(moved, row)].tolist() == [k for k in seen(rows, token, window) if kept[k]]
        assert moved.pairs() == sum(kept[seen(rows, token, window)].sum() for token in rank_rows(layout, rank))


@pytest.mark.parametrize("exchange", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_windowed_layers_move_what_a_window_holds(seed, exchange):
    rows, layout = case(seed)
    window = window_of(seed)
    plans = [attention_plan(rows.forest, layout, rank, exchange, window) for rank in range(layout.world)]
    needed = [{k for t in layout.rank_tokens(rank) for k in seen(rows, t, window)} for rank in range(layout.world)]
    check_exchange(layout, [plan.fetch for plan in plans], needed)
    for rank, plan in enumerate(plans):
        local = rank_rows(layout, rank)
        if exchange == "gather":
            sources = [np.array(local + plan.fetch.recv_tokens.tolist())[plan.gather.key_order]]
            parts = [plan.gather.intervals]
        elif exchange == "ring":
            sources = [np.array(part, np.int64) for part in received(plan.fetch)]
            sources[rank] = layout.rank_tokens(rank)
            parts = plan.ring.intervals
        else:
            local, sources = list(range(rows.forest.tokens)), [np.arange(rows.forest.tokens)]
            parts = [plan.ulysses.intervals]
        for row, token in enumerate(local):
            found = [keys[keys_of_row(part, row)].tolist() for keys, part in zip(sources, parts, strict=True)]
            assert sorted(sum(found, [])) == seen(rows, token, window)


def test_a_plan_holds_full_and_windowed_layers():
    rows = closed_form_rows()
    layout = contiguous_layout(rows.forest, 2)
    mask = np.ones(len(rows.token), bool)
    full, both = (shard_plan(rows.forest, layout, 1, mask, window=window) for window in (None, 2))
    assert full.window_attention is None and both.attention.pairs == full.attention.pairs
    assert both.window_attention.pairs == sum(len(seen(rows, t, 2)) for t in layout.rank_tokens(1))
    assert both.digest != full.digest
    with pytest.raises(ValueError, match="an attention window holds at least 1 token, the query's own; got 0"):
        shard_plan(rows.forest, layout, 0, mask, window=0)
