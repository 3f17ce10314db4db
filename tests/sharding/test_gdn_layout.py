"""The layout of recurrent layers: never predicted slower than one layout, near the best one, the same on every host."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from cp_engine.sharding import gdn_layout as gdn_layout_module
from cp_engine.sharding.cost import H200, MIB, PRESETS
from cp_engine.sharding.gdn_layout import place_layers, renumbered
from cp_engine.sharding.hosts import ONE_HOST
from cp_engine.sharding.layer_time import recurrent_time, relay_time, step_time
from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.measure import Survey, measure, measure_recurrent, rows_moved
from tests.forests import chain_forest, random_layout, random_variety
from tests.sharding.test_search import long_rows

HYBRID = PRESETS["qwen3-next-80b-a3b"]
# Moves that start almost at once: short rollouts then have something to choose.
QUICK = replace(H200, all_to_all_latency=2_000, state_latency=4_000, history_latency=2_000, launch=100)


def total(survey: Survey, layout: Layout, own: Layout | None, costs) -> int:
    """The predicted step from the counts alone."""
    figures = measure(survey, layout)
    if own is None:
        return step_time(figures, HYBRID, costs).step
    attention = step_time(figures, replace(HYBRID, gdn_layers=0, gdn_runs=0), costs).step
    gdn = recurrent_time(*measure_recurrent(survey, own), HYBRID, costs)
    relay = relay_time(rows_moved(layout, own), HYBRID, costs)
    moves = sum(int(part.total.max()) for part in relay) * 12
    return attention + sum(int(part.total.max()) for part in gdn) * 36 + moves


@pytest.mark.parametrize("costs", [H200, QUICK], ids=["h200", "quick"])
@pytest.mark.parametrize("seed", range(16))
def test_the_smaller_total_is_chosen(seed, costs):
    forest, world = long_rows(seed, 1 + seed % 5, rows=4, scale=1 + seed % 3).forest, (2, 3, 4, 8)[seed % 4]
    balanced = seed % 3 > 0
    found = {
        choice: place_layers(forest, world, model=HYBRID, costs=costs, balanced=balanced, gdn_layout=choice)
        for choice in ("same", "own", "auto")
    }
    for placed in found.values():
        assert placed.step == total(Survey(placed.forest), placed.layout, placed.gdn_layout, costs)
        assert balanced or (placed.layout.owner == contiguous_layout(forest, world).owner).all()
    assert found["same"].gdn_layout is None
    own = found["own"].gdn_layout
    if own is None:
        assert not balanced and "is the same one" in found["own"].reason
    else:
        assert own.rank_token_count.max() * world * 100 <= forest.tokens * 110
    smallest = min(found["same"].step, found["own"].step)
    gated = "perfect layout" in found["auto"].reason
    assert found["auto"].step == (found["same"].step if gated else smallest)
    assert not gated or found["own"].step >= found["same"].step * 0.995
    again = place_layers(forest, world, model=HYBRID, costs=costs, balanced=balanced)
    assert again.step == found["auto"].step and (again.layout.owner == found["auto"].layout.owner).all()


def test_both_choices_occur():
    chosen = {
        place_layers(long_rows(seed, 2, rows=3).forest, 2, model=HYBRID, costs=QUICK).own is None for seed in range(8)
    }
    assert chosen == {True, False}


@pytest.mark.parametrize("seed", range(0, 16, 2))
def test_near_the_best_of_all_assignments_of_segments(seed):
    """Every way to give whole segments to two ranks, beside the same layout of all other layers."""
    forest = long_rows(seed, 1 + seed % 3, rows=3, scale=1 + seed % 4).forest
    if forest.segments > 9:
        forest = long_rows(seed, 1, rows=3).forest
    base = gdn_layout_module._placed(forest, 2, HYBRID, QUICK, ONE_HOST, True)
    survey, best = base.survey, None
    for ranks in itertools.product(range(2), repeat=forest.segments):
        own = layout_from_cuts(survey.start, np.array(ranks), 2)
        if int(own.rank_token_count.max()) * 200 <= forest.tokens * 110:
            step = total(survey, base.layout, own, QUICK)
            best = step if best is None else min(best, step)
    found = gdn_layout_module._with_own(base, HYBRID, QUICK).step
    assert best is None or found <= best * 1.01


def test_equal_totals_keep_one_layout(monkeypatch):
    forest = long_rows(3, 2, rows=3).forest
    same = place_layers(forest, 2, model=HYBRID, costs=QUICK, gdn_layout="same")
    search = gdn_layout_module._with_own
    monkeypatch.setattr(gdn_layout_module, "_with_own", lambda *args: replace(search(*args), step=same.step))
    assert place_layers(forest, 2, model=HYBRID, costs=QUICK).own is None


def test_what_needs_no_choice():
    forest = long_rows(1, 2).forest
    dense = PRESETS["qwen3-8b"]
    assert place_layers(forest, 4, model=dense).gdn_layout is None
    assert place_layers(forest, 1, model=HYBRID, gdn_layout="own").gdn_layout is None
    with pytest.raises(ValueError, match="gdn_layout own is for models with GDN layers"):
        place_layers(forest, 4, model=dense, gdn_layout="own")
    # Fewer tokens than ranks, and a chain of one-token segments: nothing fails, whatever is chosen.
    for small in (chain_forest(3), chain_forest(200), random_variety(2).forest):
        for choice in ("own", "auto"):
            placed = place_layers(small, 5, model=HYBRID, gdn_layout=choice)
            assert placed.gdn_layout is None or placed.gdn_layout.tokens == small.tokens


def test_ranks_are_named_so_that_tokens_stay():
    for seed in range(20):
        forest = random_variety(seed).forest
        near = random_layout(forest, seed, 4)
        shuffled = Layout(4, near.piece_start, np.array([2, 0, 3, 1])[near.piece_rank])
        assert (renumbered(shuffled, near).owner == near.owner).all()


def test_relay_time_by_hand():
    moved = np.array([[6, 2], [0, 8]]) * 1024  # rank 0 has 6,144 tokens before and 8,192 after, rank 1 the rest
    forward, backward = relay_time(moved, HYBRID, H200)
    row = HYBRID.hidden * HYBRID.element_bytes
    wire = 2048 * row * H200.all_to_all_mib // MIB + H200.all_to_all_latency
    assert forward.exposed.tolist() == backward.exposed.tolist() == [2 * wire] * 2
    passes = 2 * 2 * (6144 + 8192) * row * H200.memory_mib // MIB
    assert forward.compute[0] == passes + 10 * H200.launch
    assert forward.total.dtype == np.int64
