"""Predicted times of recurrent layers: against the kernels' own tables, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cp_engine.sharding.gdn_plan as planning
from benchmarks.gdn_ranks import MIXER
from cp_engine.kernels.gdn.triton.chain_tables import ChainTables
from cp_engine.layers.gdn_tables import gdn_tables
from cp_engine.sharding.cost import H200, MIB, ModelShape
from cp_engine.sharding.gdn_plan import GdnPlan, gdn_plan
from cp_engine.sharding.layer_time import recurrent_time
from cp_engine.sharding.layout import layout_from_cuts
from cp_engine.sharding.measure import Survey, measure_recurrent
from cp_engine.sharding.recurrent_figures import MapFigures, RecurrentFigures, TurnFigures
from cp_engine.sharding.state_time import (
    StateMoves,
    StateRounds,
    crossing_time,
    round_wait,
    state_moves,
    state_rounds,
    state_wait,
)
from tests.forests import random_layout
from tests.sharding.test_cost import star
from tests.sharding.test_search import long_rows


@pytest.mark.parametrize("most", [0, 2, 99])
def test_counts_equal_the_tables_of_the_kernels(most, monkeypatch):
    """What each turn walks with and without exits, and what is sent after it; or what the summary and the cotangent
    pass walk, and which waves wait. Short fragments may share a chunk there."""
    monkeypatch.setattr(planning, "MOST_ROUNDS", most)
    seen = {MapFigures: 0, TurnFigures: 0}
    for seed in range(12):
        forest = long_rows(seed, 1 + seed % 4, scale=2).forest
        layout = random_layout(forest, seed, 2 + seed % 3)
        _, counts = measure_recurrent(Survey(forest), layout)
        for rank in range(layout.world):
            plan = gdn_plan(forest, layout, rank, "affine", 4)
            tables = gdn_tables(plan, rank).chains
            if tables.packed:
                continue
            assert counts.chunks[rank] == tables.chunks
            if counts.crossing is not None:
                seen[type(counts.crossing)] += tables.entries > 0
                check = check_maps if isinstance(counts.crossing, MapFigures) else check_turns
                check(counts.crossing, plan, tables, rank)
    assert [seen[kind] > 5 for kind in (MapFigures, TurnFigures)] == [most < 99, most > 0], seen


def members(tables: ChainTables, keep) -> int:
    return sum(len(wave.members) for wave in tables.waves if keep(wave))


def check_turns(counts: TurnFigures, plan: GdnPlan, tables: ChainTables, rank: int) -> None:
    assert [r.moves.rows_out for r in plan.rounds] == counts.leave[:, rank].tolist()
    assert [r.moves.rows_in for r in plan.rounds] == counts.arrive[:, rank].tolist()
    for exits, chunks in ((True, counts.exit_trees), (False, counts.other_trees)):
        for turn, count in enumerate(chunks[:, rank].tolist()):
            assert count == members(tables, lambda wave: (wave.turn, wave.exits) == (turn, exits))  # noqa: B023
    open_chains = [0] * len(counts.exit_chains)
    for wave in tables.waves:
        for level in wave.levels:
            open_chains[wave.turn] += int(wave.chains[level.begin : level.open_end, 1].sum())
    assert open_chains == counts.exit_chains[:, rank].tolist()


def check_maps(counts: MapFigures, plan: GdnPlan, tables: ChainTables, rank: int) -> None:
    assert counts.exit_chunks[rank] == len(tables.summary.members)
    assert counts.maps[rank] == len(tables.through_slot)
    assert counts.entry_chunks[rank] == members(tables, lambda wave: wave.below)
    assert counts.exit_tree_chunks[rank] == members(tables, lambda wave: wave.exits)
    assert counts.entry_only_chunks[rank] == members(tables, lambda wave: wave.below and not wave.exits)


def figures_of(counts: MapFigures | TurnFigures) -> dict[str, list]:
    return {name: value.tolist() for name, value in vars(counts).items()}


def test_counts_of_a_star_and_of_a_path_that_comes_back(monkeypatch):
    """A trunk of 10 chunks and a leaf of one on rank 0, a leaf on rank 1: the leaf beside the trunk leads nowhere."""
    star_of_two = Survey(star(640, 2, 64)), layout_from_cuts(np.array([0, 704, 768]), np.arange(2), 2)
    # Ranks 0, 1, 0 along one trunk: the last part of rank 0 is a tree of its own, between an entry and no exit.
    path = Survey(star(640, 0, 1)), layout_from_cuts(np.array([0, 128, 256, 640]), np.array([0, 1, 0]), 2)
    _, counts = measure_recurrent(*star_of_two)
    assert counts.chunks.tolist() == [11, 1]
    assert figures_of(counts.crossing) == {
        "exit_trees": [[11, 0], [0, 0]], "exit_chains": [[11, 0], [0, 0]], "other_trees": [[0, 0], [0, 1]],
        "leave": [[1, 0]], "arrive": [[0, 1]],
    }  # fmt: skip
    # A second leaf beside the first, which goes on the trunk's chain.
    _, counts = measure_recurrent(Survey(star(640, 3, 64)), layout_from_cuts(np.array([0, 768, 832]), np.arange(2), 2))
    assert counts.crossing.exit_trees[0].tolist() == [12, 0] and counts.crossing.exit_chains[0].tolist() == [11, 0]
    _, counts = measure_recurrent(*path)
    assert figures_of(counts.crossing) == {
        "exit_trees": [[2, 0], [0, 2], [0, 0]], "exit_chains": [[2, 0], [0, 2], [0, 0]],
        "other_trees": [[0, 0], [0, 0], [6, 0]],
        "leave": [[1, 0], [0, 1]], "arrive": [[0, 1], [1, 0]],
    }  # fmt: skip
    monkeypatch.setattr(planning, "MOST_ROUNDS", 0)
    _, counts = measure_recurrent(*star_of_two)
    assert counts.chunks.tolist() == [11, 1]
    assert figures_of(counts.crossing) == {
        "entries": [0, 1], "exits": [1, 0], "maps": [0, 0], "exit_chunks": [10, 0],
        "through_chunks": [0, 0], "entry_chunks": [0, 1], "entry_only_chunks": [0, 1], "exit_tree_chunks": [11, 0],
    }  # fmt: skip
    maps = measure_recurrent(*path)[1].crossing
    assert maps.exit_chunks.tolist() == [2, 2] and maps.through_chunks.tolist() == [0, 2]
    assert maps.entry_chunks.tolist() == [6, 2] and maps.exit_tree_chunks.tolist() == [2, 2]
    assert maps.entry_only_chunks.tolist() == [6, 0]
    assert maps.maps.tolist() == [0, 1]


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


def test_waits_in_rounds_by_hand():
    costs = replace(H200, state_mib=2_000, round_mib=1_000, round_latency=50_000)
    rounds = StateRounds(
        before=np.array([[100_000, 0, 0], [0, 200_000, 0], [0, 0, 9_000]]),
        meanwhile=np.array([[10_000, 20_000, 400_000], [0, 5_000, 60_000]]),
        leave=np.array([[2, 0, 0], [0, 1, 0]]),
        arrive=np.array([[0, 2, 0], [0, 0, 1]]),
    )
    # Rank 0 sends two states to rank 1, which has computed for 20 us when it begins to wait for them.
    there = 100_000 + 2 * 3_000 + 50_000
    first = there - 20_000
    # Rank 2 comes to the second exchange when it has worked off 400 us of its own, later than rank 1 has what leaves.
    assert there + 200_000 < 400_000
    assert round_wait(rounds, ROUND, costs).tolist() == [0, first, 3_000 + 50_000 - 60_000 + 7_000]
    shorter = replace(rounds, meanwhile=np.array([[10_000, 20_000, 0], [0, 5_000, 60_000]]))
    later = there + 200_000 + 3_000 + 50_000 - 60_000
    assert round_wait(shorter, ROUND, costs).tolist() == [0, first, later]
    # As many go out as come in elsewhere, but one rank sends to both others: its link is the busier one.
    shared = replace(shorter, leave=np.array([[4, 0, 0], [0, 1, 0]]), arrive=np.array([[0, 2, 2], [0, 0, 1]]))
    there = 100_000 + 4 * 3_000 + 50_000
    assert round_wait(shared, ROUND, costs)[:2].tolist() == [0, there - 20_000]
    hidden = replace(rounds, meanwhile=np.full((2, 3), 10**6))
    assert not round_wait(hidden, ROUND, costs).any()


def test_rounds_by_hand():
    shape = replace(ROUND, hidden=1_000, gdn_head_dim=128)
    turns = TurnFigures(
        exit_trees=np.array([[3_000, 0], [0, 2_000], [0, 0]]),
        exit_chains=np.array([[1_000, 0], [0, 2_000], [0, 0]]),
        other_trees=np.array([[3_000, 0], [0, 4_000], [5_000, 0]]),
        leave=np.array([[1, 0], [0, 3]]),
        arrive=np.array([[0, 1], [3, 0]]),
    )
    tokens, costs = np.array([10**6, 2 * 10**6]), H200
    forward, backward = state_rounds(tokens, turns, shape, costs)
    gate = 10**6 * (2 * 1_000 * 128 * costs.tera_product // 10**9) // 1000
    states, output = costs.chunk_states, costs.chunk_output
    assert forward.before.tolist() == [[states, 0], [0, 2 * states], [0, 0]]
    assert forward.meanwhile.tolist() == [
        [gate + 5 * states + 6 * output, 0],
        [0, 2 * gate + 4 * states + 6 * output],
    ], "rank 0 waits for rank 1, whose first trees have the second turn"
    # Nobody waits for a rank whose first trees have no exit.
    ends = replace(turns, exit_trees=turns.exit_chains[[0, 2, 2]], exit_chains=turns.exit_chains[[0, 2, 2]])
    waiting, _ = state_rounds(tokens, ends, shape, costs)
    assert waiting.meanwhile[:, 1].tolist() == [2 * gate, 4 * states + 4 * output]
    assert forward.leave is turns.leave and forward.arrive is turns.arrive
    both, dqkwg = costs.chunk_both_passes, costs.chunk_dqkwg
    # The last turn's trees first; then what has no exit; trees with exits wait for the gradients of these.
    assert backward.before.tolist() == [[5 * both, 0], [0, 2 * both], [3 * both, 0]]
    assert backward.meanwhile.tolist() == [
        [2 * gate + 5 * dqkwg, 4 * gate + 4 * both + 4 * dqkwg],
        [3 * both + 3 * dqkwg, 2 * dqkwg],
    ]
    assert backward.leave.tolist() == [[3, 0], [0, 1]] and backward.arrive.tolist() == [[0, 3], [1, 0]]
    counts = RecurrentFigures(np.array([11_000, 6_000]), turns)
    layers, alone = (recurrent_time(tokens, each, shape, costs) for each in (counts, RecurrentFigures(counts.chunks)))
    for part, least, rounds in zip(layers, alone, (forward, backward), strict=True):
        assert (part.compute == least.compute).all(), "nothing is computed twice"
        arrives = rounds.arrive.sum(0) > 0
        assert (part.exposed == round_wait(rounds, shape, costs) + arrives * costs.history_latency).all()
    assert not any(crossing.again.any() for crossing in crossing_time(tokens, counts, shape, costs))


def test_moves_by_hand():
    shape = replace(ROUND, hidden=1_000, gdn_head_dim=128)  # one value head: a chunk costs what the constants say
    ones = np.ones(1, np.int64)
    chunks, counts = 1_000 * ones, MapFigures(
        entries=2 * ones, exits=3 * ones, maps=1 * ones, exit_chunks=500 * ones,
        through_chunks=100 * ones, entry_chunks=300 * ones, entry_only_chunks=200 * ones, exit_tree_chunks=600 * ones,
    )  # fmt: skip
    forward, backward = state_moves(10**6 * ones, chunks, counts, shape, H200)
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
    fused = state_moves(10**6 * ones, chunks, counts, replace(shape, gdn_own_gate=False), H200)
    assert not any(moves.products.any() for moves in fused)
    layers = recurrent_time(10**6 * ones, RecurrentFigures(chunks, counts), shape, H200)
    alone = recurrent_time(10**6 * ones, RecurrentFigures(chunks), shape, H200)
    for part, least, moves in zip(layers, alone, (forward, backward), strict=True):
        assert part.compute == least.compute + moves.again and least.exposed == 0
        assert part.exposed == state_wait(moves, shape, H200) + H200.history_latency
        assert part.compute.dtype == part.exposed.dtype == np.int64


def test_whole_trees_on_each_rank_wait_for_nothing():
    forest = long_rows(3, 8).forest
    roots = forest.segment_start[:-1][forest.parent < 0]
    layout = layout_from_cuts(np.append(roots, forest.tokens), np.arange(len(roots)) % 4, 4)
    tokens, counts = measure_recurrent(Survey(forest), layout)
    assert counts.chunks.all() and counts.crossing is None
    assert not any(part.exposed.any() for part in recurrent_time(tokens, counts, MIXER, H200))
