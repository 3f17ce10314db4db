"""The loss plan and whole shard plans against their definitions, on random forests and layouts with empty ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import contiguous_layout, layout_from_cuts
from cp_engine.sharding.loss_plan import loss_plan
from cp_engine.sharding.plan import shard_plan
from tests.forests import Rows, chain_forest, closed_form_rows, comb_rows, random_layout
from tests.sharding.plan_cases import SEEDS, case, rank_rows


def moved_predictors(layout, moves):
    """Tokens whose rows each rank has after the moves, as an all-to-all-v executes them."""
    after = []
    for rank, move in enumerate(moves):
        here, before = np.full(move.rows_after, -1), np.array(rank_rows(layout, rank), np.int64)
        here[move.stay_to] = before[move.stay_from]
        arrived = []
        for peer, other in enumerate(moves):
            start = int(other.send_counts[:rank].sum())
            sent = other.send_rows[start : start + other.send_counts[rank]]
            assert len(sent) == move.recv_counts[peer]
            arrived.append(np.array(rank_rows(layout, peer), np.int64)[sent])
        here[move.recv_rows] = np.concatenate(arrived)
        assert (here >= 0).all()
        after.append(here)
    assert {move.moved for move in moves} == {sum(int(move.send_counts.sum()) for move in moves)}
    return after


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_plan(seed):
    rows, layout = case(seed)
    mask = rows.mask(seed, share=(0.0, 0.4, 1.0)[seed % 3])
    expected = Counter()  # (rollout, position, predictor, target) of every trained token that has a predictor
    flat = iter(mask.tolist())
    for rollout, nodes in enumerate(rows.node_of):
        for position, node in enumerate(nodes):
            if next(flat) and position:
                expected[rollout, position, nodes[position - 1], node] += 1
    found = Counter()
    edges: set[tuple[int, int]] = set()
    plans = [loss_plan(rows.forest, layout, rank, mask) for rank in range(layout.world)]
    predictors = moved_predictors(layout, [plan.hidden for plan in plans])
    assert np.ptp([plan.predictors for plan in plans]) <= 1
    for rank in range(layout.world):
        plan = plans[rank]
        assert (np.diff(predictors[rank]) > 0).all()
        assert (np.diff(plan.occurrence_rollout) >= 0).all()
        assert (np.diff(plan.edge_predictor) >= 0).all()
        predictor = predictors[rank][plan.edge_predictor]
        assert set(plan.edge_predictor.tolist()) == set(range(plan.predictors))
        assert plan.edge_target.tolist() == rows.forest.token[plan.edge_token].tolist()
        here = list(zip(predictor.tolist(), plan.edge_token.tolist(), strict=True))
        assert edges.isdisjoint(here) and len(set(here)) == plan.edges
        edges.update(here)
        assert set(plan.occurrence_edge.tolist()) == set(range(plan.edges))
        columns = (plan.occurrence_rollout, plan.occurrence_position, plan.occurrence_edge)
        assert {len(column) for column in columns} == {plan.occurrences}
        for rollout, position, edge in zip(*(column.tolist() for column in columns), strict=True):
            found[rollout, position, *here[edge]] += 1
    assert found == expected and set(found.values()) <= {1}
    assert edges == {(predictor, target) for _, _, predictor, target in expected}


@pytest.mark.parametrize("world", [1, 2, 3, 12])
def test_closed_form_edges(world):
    rows = closed_form_rows()
    layout = contiguous_layout(rows.forest, world)
    uses = []
    for rank in range(world):
        plan = loss_plan(rows.forest, layout, rank, np.ones(23, bool))
        uses += np.bincount(plan.occurrence_edge, minlength=plan.edges).tolist()
    assert sum(uses) == 17 and sorted(uses, reverse=True) == [5, 4, 3, 2, 1, 1, 1]
    pairs = [attention_plan(rows.forest, layout, rank, "gather").pairs for rank in range(world)]
    assert sum(pairs) == 30


def test_first_tokens_never_count():
    rows = closed_form_rows()
    only_first = np.zeros(23, bool)
    only_first[rows.row_start[:-1]] = True
    plan = loss_plan(rows.forest, contiguous_layout(rows.forest, 1), 0, only_first)
    assert (plan.edges, plan.occurrences, plan.predictors) == (0, 0, 0)


def test_a_parent_and_its_children_on_three_ranks():
    """Trunk 1 2 3 on rank 0; children 4 5 on rank 1 and 6 7 on rank 2; the leaf 8 under 4 back on rank 0."""
    rows = Rows([[1, 2, 3, 4, 5], [1, 2, 3, 4, 8], [1, 2, 3, 6, 7]], [0, 0, 0])
    assert rows.forest.token.tolist() == [1, 2, 3, 4, 5, 8, 6, 7]
    layout = layout_from_cuts([0, 3, 5, 6, 8], [0, 1, 0, 2], 3)
    plans = [gdn_plan(rows.forest, layout, rank, "affine", 4) for rank in range(3)]
    fold = plans[0].fold
    assert fold.exit_counts.tolist() == [1, 1, 0] and fold.entry_counts.tolist() == [1, 1, 1]
    assert fold.entry_exit.tolist() == [1, 0, 0]  # 8 below 4; 4 and 6 below 3
    assert fold.exit_entry.tolist() == [-1, 1]  # 3 is known outright, 4 through rank 1's entry
    assert fold.entry_level.tolist() == [1, 0, 0]
    assert [plan.history_fetch.recv_tokens.tolist() for plan in plans] == [[3], [0, 1, 2], [0, 1, 2]]


def test_a_rank_without_tokens_has_one_padding_row():
    rows = closed_form_rows()
    layout = layout_from_cuts([0, 9], [1], 3)
    for rank in (0, 2):
        plan = shard_plan(rows.forest, layout, rank, np.ones(23, bool), conv_width=4)
        assert (plan.rows, plan.tokens, plan.pieces) == (1, 0, 0)
        assert plan.token_id.tolist() == plan.position.tolist() == [0]
        assert plan.attention.pairs == 0 and plan.attention.gather.intervals.of_row(0) == []
        assert plan.gdn.fragments == 0 and plan.gdn.fragment_row.tolist() == [0]
        # Of the five predictors it scores its share, all of whose hidden states come from the second rank.
        assert plan.loss.predictors == plan.loss.hidden.recv_counts[1] == {0: 2, 2: 1}[rank]


@pytest.mark.parametrize("gdn_exchange", ["affine", "ulysses"])
@pytest.mark.parametrize("exchange", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("world", [1, 3])
def test_an_empty_pack_plans(world, exchange, gdn_exchange):
    forest = build_forest(np.empty(0, np.int64), np.zeros(1, np.int64))
    layout = contiguous_layout(forest, world)
    for rank in range(world):
        plan = shard_plan(forest, layout, rank, np.empty(0, bool), exchange, gdn_exchange, 4)
        assert (plan.rows, plan.tokens, plan.attention.pairs, plan.gdn.fragments, plan.loss.edges) == (1, 0, 0, 0, 0)
        assert plan.attention.fetch.rows_in == plan.attention.fetch.rows_out == 0


@pytest.mark.parametrize("exchange", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("seed", range(10))
def test_shard_plan_rows(seed, exchange):
    rows, layout = case(seed)
    for rank in range(layout.world):
        plan = shard_plan(rows.forest, layout, rank, rows.mask(seed), exchange)
        tokens = layout.rank_tokens(rank)
        assert plan.gdn is None and plan.tokens == len(tokens) and plan.rows == max(1, len(tokens))
        assert plan.token_id[: len(tokens)].tolist() == rows.forest.token[tokens].tolist()
        assert plan.position[: len(tokens)].tolist() == [len(rows.paths[t]) - 1 for t in tokens]


def test_digest_is_equal_over_ranks_and_changes_with_anything():
    rows = closed_form_rows()
    forest, mask = rows.forest, np.ones(23, bool)
    layout = contiguous_layout(forest, 3)
    same = {shard_plan(forest, layout, rank, mask, conv_width=4).digest for rank in range(3)}
    assert len(same) == 1

    def digest(forest=forest, layout=layout, mask=mask, exchange="gather", gdn_exchange="affine", conv_width=4):
        return shard_plan(forest, layout, 0, mask, exchange, gdn_exchange, conv_width).digest

    assert digest() in same
    other_token = forest.token.copy()
    other_token[4] += 1
    other_mask = mask.copy()
    other_mask[7] = False
    swapped = rows.rows[1:] + rows.rows[:1]
    found = [
        digest(),
        digest(forest=replace(forest, token=other_token)),
        digest(forest=Rows(swapped, rows.groups).forest),
        digest(mask=other_mask),
        digest(layout=contiguous_layout(forest, 4)),
        digest(layout=layout_from_cuts([0, 3, 6, 9], [0, 2, 1], 3)),
        digest(layout=layout_from_cuts([0, 3, 5, 9], [0, 1, 2], 3)),
        digest(exchange="ring"),
        digest(gdn_exchange="ulysses"),
        digest(conv_width=3),
        digest(conv_width=None),
    ]
    assert len(set(found)) == len(found)


def test_unknown_choices_are_refused():
    rows = closed_form_rows()
    layout, mask = contiguous_layout(rows.forest, 2), np.ones(23, bool)
    with pytest.raises(
        ValueError, match="exchange must be one of gather, ring, ulysses, ulysses_gather:U, got 'broad'"
    ):
        shard_plan(rows.forest, layout, 0, mask, "broad")
    with pytest.raises(ValueError, match="a number of head-sharing ranks that divides 2 ranks, got 3"):
        shard_plan(rows.forest, layout, 0, mask, "ulysses_gather:3")
    with pytest.raises(ValueError, match="gdn_exchange must be one of affine, ulysses, got 'gather'"):
        shard_plan(rows.forest, layout, 0, mask, gdn_exchange="gather", conv_width=4)
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), got 2"):
        shard_plan(rows.forest, layout, 2, mask)


def test_a_chain_of_20_000_segments_plans():
    forest = chain_forest(20_000)
    layout = contiguous_layout(forest, 4)
    for exchange in ("gather", "ring", "ulysses"):
        visible = [attention_plan(forest, layout, rank, exchange) for rank in range(4)]
        assert sum(plan.pairs for plan in visible) == 20_000 * 20_001 // 2
        assert [plan.fetch.rows_in for plan in visible] == [0, 5_000, 10_000, 15_000]
    recurrent = [gdn_plan(forest, layout, rank, "affine", 4) for rank in range(4)]
    assert [plan.fragments for plan in recurrent] == [5_000] * 4
    assert recurrent[0].fold.entry_level.tolist() == [0, 1, 2]
    assert [len(plan.chain_level) for plan in recurrent] == [1] * 4
    # Only the last rollout, which is the whole chain, trains: all of them hold 2e8 flat tokens.
    last = replace(forest, end_segment=forest.end_segment[-1:])
    plans = [loss_plan(last, layout, rank, np.ones(20_000, bool)) for rank in range(4)]
    assert sum(plan.edges for plan in plans) == 19_999


def test_a_comb_of_depth_1_000_plans():
    rows = comb_rows(1_000)
    layout = random_layout(rows.forest, 5, world=4)
    mask = np.ones(len(rows.token), bool)
    plans = [shard_plan(rows.forest, layout, rank, mask, conv_width=4) for rank in range(4)]
    assert sum(plan.attention.pairs for plan in plans) == rows.forest.tree_pairs
    assert sum(plan.loss.edges for plan in plans) == 1_999
    assert sum(plan.loss.occurrences for plan in plans) == rows.forest.flat_tokens - 1_000
