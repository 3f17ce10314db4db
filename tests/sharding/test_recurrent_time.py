"""Predicted times of recurrent layers: against measured ones, against the kernels' own tables, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.attention_layouts import spread_layout
from benchmarks.gdn_ranks import MIXER, MIXER_COSTS, WORKLOADS
from cp_engine.layers.gdn_tables import gdn_tables
from cp_engine.sharding.cost import H200, MIB, Costs, ModelShape
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layer_time import StateMoves, chunk_time, recurrent_time, state_moves, state_wait
from cp_engine.sharding.layout import contiguous_layout, layout_from_cuts
from cp_engine.sharding.measure import RecurrentFigures, Survey, measure_recurrent
from tests.forests import random_layout
from tests.sharding.test_cost import star
from tests.sharding.test_search import long_rows

# Workload, layout, and ms forward and backward of the slowest rank (benchmarks/results.jsonl, `gdn-ranks`, one and two
# H200s, commit 003e032). The cuts are those that the planner made then.
MEASURED = {
    "trees, one GPU": ("art_5k16x100", "one", 6.946, 17.508),
    "trees, planner": ("art_5k16x100", ([0, 28_320, 69_280, 81_920], [1, 0, 1]), 7.217, 18.074),
    "trees, spread": ("art_5k16x100", "spread", 8.944, 19.973),
    "chain, one GPU": ("chain", "one", 11.847, 27.843),
    "chain, planner": ("chain", ([0, 65_536, 131_072], [0, 1]), 15.570, 31.739),
    "chain, spread": ("chain", "spread", 14.816, 31.017),
}


def measured_case(name: str) -> tuple[np.ndarray, RecurrentFigures]:
    workload, cuts, *_ = MEASURED[name]
    forest = WORKLOADS[workload](1 if cuts == "one" else 2)
    if cuts == "one":
        layout = contiguous_layout(forest, 1)
    elif cuts == "spread":
        layout = spread_layout(forest, 2)
    else:
        layout = layout_from_cuts(*map(np.array, cuts), 2)
    return measure_recurrent(Survey(forest), layout)


COTANGENTS = 63_000  # 1,000 chunks of a head: the adjoint that keeps nothing, one chain 62 us, trees 64


def backward_of_then(counts: RecurrentFigures, moves: StateMoves, costs: Costs, cotangents: int) -> StateMoves:
    """Trees below an entry went through the adjoint twice, and their states came after the exchange."""
    closed, ahead = counts.chunks - counts.exit_tree_chunks, counts.exit_tree_chunks
    twice = chunk_time(counts.entry_chunks, cotangents, MIXER)
    passes = chunk_time(closed, costs.chunk_both_passes, MIXER) + chunk_time(ahead, costs.chunk_states, MIXER)
    rest = costs.chunk_states - (costs.chunk_both_passes - costs.chunk_adjoint)
    others = chunk_time(closed, costs.chunk_dqkwg, MIXER) - chunk_time(ahead, rest, MIXER)
    return replace(moves, before=twice, again=twice, passes=passes, others=others)


def with_the_exchange_of_then(
    tokens: np.ndarray,
    counts: RecurrentFigures,
    costs: Costs = MIXER_COSTS,
    waits: bool = True,
    cotangents: int = COTANGENTS,
) -> tuple[float, float]:
    """Predicted ms, forward and backward, of the slowest rank as the layers were when they were measured: all products
    came before the exchange, and it was the process group's all-to-all."""
    all_to_all = replace(costs, state_mib=costs.all_to_all_mib)
    forward, backward = state_moves(tokens, counts, MIXER, costs)
    then = forward, backward_of_then(counts, backward, costs, cotangents)
    found = []
    layers = recurrent_time(tokens, counts, MIXER, costs)
    for moves, now, part in zip(then, (forward, backward), layers, strict=True):
        wait = state_wait(replace(moves, products=np.zeros_like(tokens)), MIXER, all_to_all)
        wait = wait + np.where(moves.arrive > 0, costs.history_latency, 0)
        found.append(float((part.compute - now.again + moves.again + waits * wait).max()) / 1e6)
    return found[0], found[1]


@pytest.mark.parametrize("name", MEASURED)
def test_measured_layers_are_predicted(name):
    """Both directions together within 7 %, each within 10 %, with the exchange that was measured; with today's exchange
    no layer is predicted to take longer."""
    tokens, counts = measured_case(name)
    *_, forward, backward = MEASURED[name]
    predicted = with_the_exchange_of_then(tokens, counts)
    assert predicted == pytest.approx((forward, backward), rel=0.10)
    assert sum(predicted) == pytest.approx(forward + backward, rel=0.07)
    now = recurrent_time(tokens, counts, MIXER, MIXER_COSTS)
    assert all(int(part.total.max()) / 1e6 <= before for part, before in zip(now, predicted, strict=True))


FAULTS = {
    "no second pass": {"costs": replace(MIXER_COSTS, chunk_summary=0), "cotangents": 0},
    "no element-wise work": {"costs": replace(MIXER_COSTS, mixer_passes_forward=0, mixer_passes_backward=0)},
    "nobody waits": {"waits": False},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_out_shows(fault):
    errors = []
    for name, (*_, forward, backward) in MEASURED.items():
        predicted = sum(with_the_exchange_of_then(*measured_case(name), **FAULTS[fault]))
        errors.append(abs(predicted / (forward + backward) - 1))
    assert max(errors) > 0.07


def test_counts_equal_the_tables_of_the_kernels():
    """What the summary and the cotangent pass walk, and which waves wait. Short fragments may share a chunk there."""
    seen = 0
    for seed in range(12):
        forest = long_rows(seed, 1 + seed % 4, scale=2).forest
        layout = random_layout(forest, seed, 2 + seed % 3)
        _, counts = measure_recurrent(Survey(forest), layout)
        for rank in range(layout.world):
            tables = gdn_tables(gdn_plan(forest, layout, rank, "affine", 4), rank).chains
            if tables.packed:
                continue
            seen += bool(counts.entry_chunks[rank])
            assert counts.chunks[rank] == tables.chunks
            assert counts.exit_chunks[rank] == len(tables.summary.members)
            assert counts.maps[rank] == len(tables.through_slot)
            assert counts.entry_chunks[rank] == sum(len(wave.members) for wave in tables.waves if wave.below)
            assert counts.exit_tree_chunks[rank] == sum(len(wave.members) for wave in tables.waves if wave.exits)
            only = [len(wave.members) for wave in tables.waves if wave.below and not wave.exits]
            assert counts.entry_only_chunks[rank] == sum(only)
    assert seen > 10, seen


def test_counts_of_a_star_and_of_a_path_that_comes_back():
    """A trunk of 10 chunks and a leaf of one on rank 0, a leaf on rank 1: the leaf beside the trunk leads nowhere."""
    _, counts = measure_recurrent(Survey(star(640, 2, 64)), layout_from_cuts(np.array([0, 704, 768]), np.arange(2), 2))
    found = {name: value.tolist() for name, value in vars(counts).items()}
    assert found == {
        "chunks": [11, 1], "entries": [0, 1], "exits": [1, 0], "maps": [0, 0], "exit_chunks": [10, 0],
        "through_chunks": [0, 0], "entry_chunks": [0, 1], "entry_only_chunks": [0, 1], "exit_tree_chunks": [11, 0],
    }  # fmt: skip
    # Ranks 0, 1, 0 along one trunk: the last part of rank 0 is a tree of its own, between an entry and no exit.
    cuts = layout_from_cuts(np.array([0, 128, 256, 640]), np.array([0, 1, 0]), 2)
    _, counts = measure_recurrent(Survey(star(640, 0, 1)), cuts)
    assert counts.exit_chunks.tolist() == [2, 2] and counts.through_chunks.tolist() == [0, 2]
    assert counts.entry_chunks.tolist() == [6, 2] and counts.exit_tree_chunks.tolist() == [2, 2]
    assert counts.entry_only_chunks.tolist() == [6, 0]
    assert counts.maps.tolist() == [0, 1]


# One value head of size 512 has a state of 1 MiB; of size 128 it counts 16 times.
ROUND = ModelShape(
    hidden=0, mlp_width=0, attention_layers=0, query_heads=1, kv_heads=1, head_dim=1, gdn_layers=1, gdn_runs=1,
    gdn_key_heads=1, gdn_value_heads=1, gdn_head_dim=512,
)  # fmt: skip


def test_waits_by_hand():
    costs = replace(H200, state_mib=3_000, fold_mib=6_000, state_latency=50_000)
    assert ROUND.state_bytes == MIB
    nothing = np.zeros(3, np.int64)
    moves = StateMoves(
        before=np.array([100_000, 400_000, 900_000]),
        again=nothing,
        products=np.array([50_000, 20_000, 0]),
        passes=nothing,
        others=np.array([1_000, 0, 0]),
        leave=np.array([3, 9, 0]),
        arrive=np.array([6, 0, 3]),
        folded=21,
    )
    # Rank 1 sends last, and 9 of 12 states, two thirds of them away; 21 MiB are folded by three ranks.
    sent, fold = 400_000 + 9 * 3_000 * 2 // 3, 21 * 6_000 // 3 + 50_000
    arriving = 6 * 3_000 * 2 // 3
    # Rank 2 sends nothing: however late it is, nobody waits for it, and it waits for nobody.
    assert state_wait(moves, ROUND, costs).tolist() == [sent + fold + arriving - 151_000, 0, 0]
    early = replace(moves, before=np.array([100_000, 400_000, 0]))
    assert state_wait(early, ROUND, costs).tolist() == [
        sent + fold + arriving - 151_000,
        0,
        sent + fold + arriving // 2,
    ]
    # Passes that begin before the fold is done stop it, on whichever rank; after it they hide it.
    late = replace(early, passes=np.array([0, 0, 700_000]))
    assert state_wait(late, ROUND, costs).tolist() == [700_000 + fold + arriving - 151_000, 0, fold + arriving // 2]
    # What was folded before the passes began need not be done again.
    rest = replace(late, products=np.array([50_000, 20_000, sent + fold - 1_000]))
    found = state_wait(rest, ROUND, costs).tolist()
    assert found == [sent + fold + 700_000 + arriving - 151_000, 0, arriving // 2 + 1_000]
    after = replace(late, products=np.array([50_000, 20_000, sent + fold]))
    assert state_wait(after, ROUND, costs).tolist() == [sent + fold + arriving - 151_000, 0, 0]
    hidden = replace(moves, others=np.full(3, 10**6))
    assert not state_wait(hidden, ROUND, costs).any()
    assert not state_wait(replace(late, leave=nothing, arrive=nothing), ROUND, costs).any()


def test_moves_by_hand():
    shape = replace(ROUND, hidden=1_000, gdn_head_dim=128)  # one value head: a chunk costs what the constants say
    ones = np.ones(1, np.int64)
    counts = RecurrentFigures(
        chunks=1_000 * ones, entries=2 * ones, exits=3 * ones, maps=1 * ones, exit_chunks=500 * ones,
        through_chunks=100 * ones, entry_chunks=300 * ones, entry_only_chunks=200 * ones, exit_tree_chunks=600 * ones,
    )  # fmt: skip
    forward, backward = state_moves(10**6 * ones, counts, shape, H200)
    gate = 10**6 * (2 * 1_000 * 128 * H200.tera_product // 10**9) // 1000
    assert forward.before == forward.again == H200.chunk_summary * 6 // 10  # 500 chunks, of 100 the map too
    assert forward.products == gate and backward.products == 2 * gate
    assert (forward.passes, forward.others) == (H200.chunk_states * 7 // 10, H200.chunk_output * 7 // 10)
    assert (forward.leave, forward.arrive, forward.folded) == (4, 2, 6)
    # 400 chunks lead to no exit, 200 of them below an entry; of the other 600 the states of 500 can be made ahead.
    assert backward.before == H200.chunk_both_passes * 3 // 10 and backward.again == H200.chunk_adjoint // 10
    trees = H200.chunk_both_passes * 2 // 10 + H200.chunk_dqkwg * 4 // 10
    assert backward.passes == H200.chunk_both_passes * 2 // 10 + H200.chunk_states * 5 // 10
    assert backward.passes + backward.others == trees + (H200.chunk_both_passes - H200.chunk_adjoint) * 5 // 10
    assert (backward.leave, backward.arrive, backward.folded) == (2, 3, 6)
    fused = state_moves(10**6 * ones, counts, replace(shape, gdn_own_gate=False), H200)
    assert not any(moves.products.any() for moves in fused)
    layers = recurrent_time(10**6 * ones, counts, shape, H200)
    alone = recurrent_time(10**6 * ones, RecurrentFigures.of_uncut_trees(counts.chunks), shape, H200)
    for part, least, moves in zip(layers, alone, (forward, backward), strict=True):
        assert part.compute == least.compute + moves.again and least.exposed == 0
        assert part.exposed == state_wait(moves, shape, H200) + H200.history_latency
        assert part.compute.dtype == part.exposed.dtype == np.int64


def test_whole_trees_on_each_rank_wait_for_nothing():
    forest = long_rows(3, 8).forest
    roots = forest.segment_start[:-1][forest.parent < 0]
    layout = layout_from_cuts(np.append(roots, forest.tokens), np.arange(len(roots)) % 4, 4)
    tokens, counts = measure_recurrent(Survey(forest), layout)
    assert counts.chunks.all() and not counts.entries.any()
    assert not any(part.exposed.any() for part in recurrent_time(tokens, counts, MIXER, H200))
