"""Counts of a layout against the plans and against naive definitions, and the predicted times."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

import cp_engine.sharding.measure as measure_module
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.cost import H200, PRESETS, ModelShape, head_groups, kernel_time, rank_time, step_time
from cp_engine.sharding.exchange_choice import choose_exchange
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.intervals import visible_tokens
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.measure import Survey, measure, traffic, union
from tests.forests import random_layout, random_variety

DENSE, HYBRID = PRESETS["qwen3-8b"], PRESETS["qwen3-next-80b-a3b"]


def naive_tiles(forest: Forest, layout: Layout, rank: int, tile: int) -> int:
    query, key = layout.rank_tokens(rank), visible_tokens(forest, layout, rank)
    end = forest.subtree_end[forest.segment_of]
    visible = (key[None] <= query[:, None]) & (query[:, None] < end[key][None])
    return sum(
        bool(visible[i : i + tile, j : j + tile].any())
        for i in range(0, len(query), tile)
        for j in range(0, len(key), tile)
    )


@pytest.mark.parametrize("seed", range(120))
def test_counts_equal_the_plans(seed, monkeypatch):
    tile, chunk = (3, 5, 128)[seed % 3], (2, 64)[seed % 2]
    monkeypatch.setattr(measure_module, "TILE", tile)
    monkeypatch.setattr(measure_module, "CHUNK", chunk)
    forest = random_variety(seed).forest
    layout = random_layout(forest, seed)
    survey = Survey(forest)
    figures, rows = measure(survey, layout), traffic(survey, layout)
    assert (figures.tokens == layout.rank_token_count).all() and (np.diag(rows) == figures.tokens).all()
    for rank in range(layout.world):
        attention = attention_plan(forest, layout, rank, "gather")
        assert figures.pairs[rank] == attention.pairs
        assert figures.rows_in[rank] == attention.fetch.rows_in and figures.rows_out[rank] == attention.fetch.rows_out
        others = np.arange(layout.world) != rank
        assert (rows[rank][others] == attention.fetch.recv_counts[others]).all()
        assert figures.tiles[rank] == naive_tiles(forest, layout, rank, tile)
        assert figures.pieces[rank] == len(layout.pieces(rank)[0])
        gdn = gdn_plan(forest, layout, rank, "affine", 4)
        counts = figures.recurrent
        assert counts.entries[rank] == gdn.fold.entry_counts[rank]
        assert counts.exits[rank] == gdn.fold.exit_counts[rank]
        assert counts.chunks[rank] == (-(-np.diff(gdn.fragment_row) // chunk)).sum()
        assert (counts.through_tokens[rank] > 0) == bool((gdn.exit_entry >= 0).any())


def test_union_joins_what_touches_or_overlaps():
    low, high = union(np.array([7, 0, 3, 9]), np.array([8, 3, 5, 9 + 2]))
    assert low.tolist() == [0, 7, 9] and high.tolist() == [5, 8, 11]


# Tiles of the whole set on one rank, tokens, and the measured forward and backward of the interval-mask kernel, ms.
MEASURED = ((26_822, 104_249, 11.9, 34.6), (9_100, 73_930, 4.3, 13.7), (9_569, 196_818, 5.2, 18.7))


def test_the_kernel_constants_give_the_measured_times():
    for tiles, tokens, forward, backward in MEASURED:
        predicted = kernel_time(tiles, -(-tokens // 128), 32, DENSE, H200)
        assert predicted[0] / 1e6 == pytest.approx(forward, rel=0.05)
        assert predicted[1] / 1e6 == pytest.approx(backward, rel=0.05)


def test_times_are_integers_and_constants_positive():
    for field in fields(H200):
        value = getattr(H200, field.name)
        assert isinstance(value, tuple) or (isinstance(value, int) and value > 0), field.name
    forest = random_variety(5).forest
    time = step_time(measure(Survey(forest), contiguous_layout(forest, 3)), HYBRID)
    assert isinstance(time.step, int) and rank_time(time, HYBRID).dtype == np.int64
    for part in (*time.attention, *time.gdn):
        assert part.compute.dtype == part.exposed.dtype == np.int64


def test_a_layer_waits_for_its_slowest_rank_and_exchange_is_hidden_by_compute():
    forest = random_variety(7).forest
    one = measure(Survey(forest), contiguous_layout(forest, 2), recurrent=False)
    figures = replace(one, tokens=np.array([8192, 8192]), tiles=np.array([2000, 2400]), rows_in=np.zeros(2, np.int64))
    alone = step_time(replace(figures, rows_out=figures.rows_in), DENSE)
    assert alone.exposed_share == 0
    assert alone.step == 36 * sum(int(part.compute[1]) for part in alone.attention)
    # 8,192 rows of 4 KiB take 0.09 ms a direction, less than a head group computes: only the ends show.
    moved = np.array([8192, 8192])
    hidden = step_time(replace(figures, rows_in=moved, rows_out=moved), DENSE)
    assert 0 < hidden.exposed_share < 0.02
    flooded = step_time(replace(figures, rows_in=64 * moved, rows_out=moved), DENSE)
    assert flooded.exposed_share > 0.3
    egress = step_time(replace(figures, rows_in=moved, rows_out=64 * moved), DENSE)
    assert egress.step == flooded.step  # the busier direction counts


def test_head_groups_divide_the_kv_heads():
    assert [head_groups(replace(DENSE, kv_heads=heads)) for heads in (1, 2, 3, 4, 6, 8)] == [1, 2, 1, 4, 2, 4]


def star(trunk: int, leaves: int, length: int) -> Forest:
    """A trunk with equal leaves."""
    start = np.concatenate([[0], trunk + length * np.arange(leaves + 1)])
    return Forest(
        token=np.arange(start[-1]),
        segment_start=start,
        parent=np.concatenate([[-1], np.zeros(leaves, np.int64)]),
        depth=np.concatenate([[0], np.full(leaves, trunk)]),
        subtree_end=np.concatenate([[start[-1]], start[2:]]),
        end_segment=np.arange(1, leaves + 1),
    )


def choice(forest: Forest, world: int, model: ModelShape, **options):
    return choose_exchange(Survey(forest), contiguous_layout(forest, world), model=model, **options)


def test_the_exchange_is_the_fastest_that_can_run():
    forest = star(2000, 40, 300)
    found = choice(forest, 4, DENSE)
    assert set(found.predicted) == {"gather", "ring", "ulysses"} and not found.refused
    assert found.predicted[found.exchange] == min(found.predicted.values())
    assert found.reason.startswith(found.exchange) and "ms" in found.reason
    assert choice(forest, 1, DENSE).reason == "one rank: nothing moves"


def test_an_exchange_that_cannot_run_is_never_chosen():
    forest = star(2000, 40, 300)
    for world in (3, 5, 6):
        found = choice(forest, world, DENSE)
        assert "ulysses" in found.refused and found.exchange != "ulysses" and "ulysses" not in found.predicted
    assert "kv heads" in choice(forest, 4, replace(DENSE, query_heads=12, kv_heads=6)).refused["ulysses"]
    # The last rank of eight sees a whole chain; a ring holds one peer's eighth of it.
    small = choice(star(30_000, 2, 1000), 8, DENSE, memory_bytes=80 << 20)
    assert "budget" in small.refused["gather"] and small.exchange == "ring"
    with pytest.raises(ValueError, match="no exchange fits into 0.5 MiB.*Raise the memory budget"):
        choice(forest, 4, DENSE, memory_bytes=1 << 19)


def test_all_rows_of_a_shallow_forest_on_many_ranks_favour_head_shards():
    """Every rank sees almost everything and computes little: moving rows once per head share is cheaper."""
    forest = star(60_000, 8, 600)
    cheap = replace(H200, all_to_all_mib=100, all_to_all_latency=1_000)
    assert choice(forest, 8, DENSE, costs=cheap).exchange == "ulysses"
