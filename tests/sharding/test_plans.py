"""Every plan against its definition, on random forests and random layouts with several pieces and empty ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.gdn_plan import GdnPlan, gdn_plan
from cp_engine.sharding.intervals import RowIntervals, visible_intervals, visible_tokens
from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.loss_plan import loss_plan
from cp_engine.sharding.plan import shard_plan
from cp_engine.sharding.row_exchange import RowExchange
from tests.forests import Rows, chain_forest, closed_form_rows, comb_rows, random_layout, random_variety

SEEDS = range(60)


def case(seed: int) -> tuple[Rows, Layout]:
    rows = random_variety(seed)
    return rows, random_layout(rows.forest, 1_000 + seed)


def rank_rows(layout: Layout, rank: int) -> list[int]:
    """The token of each local row; -1 on a padding row."""
    return layout.rank_tokens(rank).tolist() or [-1]


def keys_of_row(intervals: RowIntervals, row: int) -> list[int]:
    found = intervals.of_row(row)
    for (_, before), (after, _) in zip(found, found[1:], strict=False):
        assert before < after, "intervals touch or overlap"
    assert all(lo < hi for lo, hi in found)
    return [key for lo, hi in found for key in range(lo, hi)]


def expected_keys(rows: Rows, token: int) -> list[int]:
    return [] if token < 0 else rows.paths[token]


def received(exchange: RowExchange) -> list[list[int]]:
    return [part.tolist() for part in np.split(exchange.recv_tokens, np.cumsum(exchange.recv_counts)[:-1])]


def check_exchange(layout: Layout, exchanges: list[RowExchange], needed: list[set[int]]) -> None:
    """What p sends to q is what q expects from p, token by token, and just what q needs of p's tokens."""
    for p, ours in enumerate(exchanges):
        sent = np.split(np.array(rank_rows(layout, p))[ours.send_rows], np.cumsum(ours.send_counts)[:-1])
        assert len(ours.send_counts) == len(ours.recv_counts) == layout.world
        assert ours.rows_out == len(ours.send_rows) and ours.rows_in == len(ours.recv_tokens)
        for q, theirs in enumerate(exchanges):
            asked = [] if p == q else sorted(t for t in needed[q] if layout.owner[t] == p)
            assert sent[q].tolist() == received(theirs)[p] == asked


@pytest.mark.parametrize("seed", SEEDS)
def test_visible_intervals(seed):
    rows, layout = case(seed)
    for rank in range(layout.world):
        intervals = visible_intervals(rows.forest, layout, rank)
        tokens = rank_rows(layout, rank)
        assert intervals.rows == len(tokens)
        for row, token in enumerate(tokens):
            assert keys_of_row(intervals, row) == expected_keys(rows, token)
            assert len(intervals.of_row(row)) <= 1 + np.log2(rows.forest.tokens)
        assert intervals.pairs() == sum(len(expected_keys(rows, token)) for token in tokens)
        seen = {key for token in tokens for key in expected_keys(rows, token)}
        assert visible_tokens(rows.forest, layout, rank).tolist() == sorted(seen)


@pytest.mark.parametrize("seed", SEEDS)
def test_intervals_on_any_subset_of_remote_keys(seed):
    """Own tokens are in the subset as a whole or not at all; the others are free."""
    rows, layout = case(seed)
    rng = np.random.default_rng(seed)
    for rank in range(layout.world):
        intervals = visible_intervals(rows.forest, layout, rank)
        kept = rng.random(rows.forest.tokens) < 0.5
        kept[layout.rank_tokens(rank)] = rng.random() < 0.5
        keys = np.flatnonzero(kept)
        moved = intervals.on_keys(keys)
        for row, token in enumerate(rank_rows(layout, rank)):
            assert keys[keys_of_row(moved, row)].tolist() == [k for k in expected_keys(rows, token) if kept[k]]
        total = sum(kept[expected_keys(rows, token)].sum() for token in rank_rows(layout, rank))
        assert moved.pairs() == total


@pytest.mark.parametrize("exchange", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_plan(seed, exchange):
    rows, layout = case(seed)
    plans = [attention_plan(rows.forest, layout, rank, exchange) for rank in range(layout.world)]
    needed = [{key for token in layout.rank_tokens(rank) for key in rows.paths[token]} for rank in range(layout.world)]
    check_exchange(layout, [plan.fetch for plan in plans], needed)
    everything = [token for rank in range(layout.world) for token in rank_rows(layout, rank)]
    for rank, plan in enumerate(plans):
        local = rank_rows(layout, rank)
        assert plan.exchange == exchange
        assert [p is not None for p in (plan.gather, plan.ring, plan.ulysses)].count(True) == 1
        assert plan.pairs == sum(len(expected_keys(rows, token)) for token in local)
        if exchange == "gather":
            buffer = np.array(local + plan.fetch.recv_tokens.tolist())[plan.gather.key_order]
            assert buffer.tolist() == sorted(needed[rank])
            for row, token in enumerate(local):
                assert buffer[keys_of_row(plan.gather.intervals, row)].tolist() == expected_keys(rows, token)
        elif exchange == "ring":
            sources = received(plan.fetch)
            sources[rank] = layout.rank_tokens(rank).tolist()
            for row, token in enumerate(local):
                parts = [
                    np.array(keys, np.int64)[keys_of_row(intervals, row)].tolist()
                    for keys, intervals in zip(sources, plan.ring.intervals, strict=True)
                ]
                assert sorted(sum(parts, [])) == expected_keys(rows, token)
            assert sum(intervals.pairs() for intervals in plan.ring.intervals) == plan.pairs
        else:
            assert plan.ulysses.order.rank_rows.tolist() == layout.rank_rows.tolist()
            assert np.array(everything)[plan.ulysses.order.dfs_order].tolist() == list(range(rows.forest.tokens))
            for token in range(rows.forest.tokens):
                assert keys_of_row(plan.ulysses.intervals, token) == rows.paths[token]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_team_gathers_as_one_rank_would(seed):
    """`ulysses_gather`: a team's rows are its ranks' tokens in order, and it sees what one owner of them would see."""
    rows = case(seed)[0]
    for size, teams in ((2, 2), (3, 1), (1, 3)):
        layout = random_layout(rows.forest, seed, size * teams)
        for rank in range(layout.world):
            plan = attention_plan(rows.forest, layout, rank, f"ulysses_gather:{size}").ulysses_gather
            members = range(rank // size * size, rank // size * size + size)
            joined = [token for member in members for token in rank_rows(layout, member)]
            local = np.array(joined)[plan.order.dfs_order].tolist()
            assert local == sorted(token for member in members for token in layout.rank_tokens(member))
            assert len(local) == plan.team_rows[rank // size]
            assert plan.team_between[rank // size].tolist() == plan.fetch.recv_counts.tolist()
            assert plan.team_between[:, rank // size].tolist() == plan.fetch.send_counts.tolist()
            buffer = np.array(local + plan.fetch.recv_tokens.tolist())[plan.gather.key_order]
            for row, token in enumerate(local):
                assert buffer[keys_of_row(plan.gather.intervals, row)].tolist() == expected_keys(rows, token)


def check_fragments(rows: Rows, tokens: list[int], plan: GdnPlan) -> list[list[int]]:
    """Fragments cover the rows, each inside one segment, parents first; returns the tokens of each."""
    bounds = plan.fragment_row.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(tokens) and len(bounds) == plan.fragments + 1
    fragments = [tokens[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    for index, fragment in enumerate(fragments):
        assert fragment == list(range(fragment[0], fragment[0] + len(fragment)))
        assert len(set(rows.forest.segment_of[fragment].tolist())) == 1
        assert plan.fragment_parent[index] < index
        assert plan.fragment_parent[index] < 0 or plan.fragment_entry[index] < 0
    return fragments


def check_chains(plan: GdnPlan) -> None:
    heads = plan.chain_fragment.tolist()
    assert heads[0] == 0 and heads[-1] == plan.fragments
    chain_of = np.repeat(np.arange(len(heads) - 1), np.diff(heads))
    for index, parent in enumerate(plan.fragment_parent.tolist()):
        if index not in heads:
            assert parent == index - 1
            continue
        above = -1 if parent < 0 else plan.chain_level[chain_of[parent]]
        assert plan.chain_level[chain_of[index]] == above + 1


def fold_paths(plans: list[GdnPlan], fragments: list[list[list[int]]]) -> list[list[list[int]]]:
    """Run the state passes with "the tokens folded so far" as the state; returns what each fragment ends with."""
    fold = plans[0].fold
    first_exit, first_entry = (np.cumsum(c) - c for c in (fold.exit_counts, fold.entry_counts))
    below_entry, exit_state = [], []
    for rank, plan in enumerate(plans):
        ends: list[tuple[int, list[int]]] = []  # (global entry that the state builds on or -1, tokens since)
        for index, own in enumerate(fragments[rank]):
            parent, entry = int(plan.fragment_parent[index]), int(plan.fragment_entry[index])
            base, above = ends[parent] if parent >= 0 else (entry + first_entry[rank] if entry >= 0 else -1, [])
            ends.append((base, above + own))
        below_entry.append(ends)
        assert len(plan.exit_fragment) == fold.exit_counts[rank]
        for x, fragment in enumerate(plan.exit_fragment.tolist()):
            base, suffix = ends[fragment]
            assert base == fold.exit_entry[first_exit[rank] + x]
            assert plan.exit_entry[x] == (base - first_entry[rank] if base >= 0 else -1)
            exit_state.append((base, suffix))
    entry_state: list[list[int] | None] = [None] * len(fold.entry_exit)
    for entry in np.argsort(fold.entry_level, kind="stable").tolist():
        base, suffix = exit_state[fold.entry_exit[entry]]
        assert fold.entry_level[entry] == (0 if base < 0 else fold.entry_level[base] + 1)
        entry_state[entry] = (entry_state[base] if base >= 0 else []) + suffix
    return [[(entry_state[b] if b >= 0 else []) + suffix for b, suffix in ends] for ends in below_entry]


def check_history(rows: Rows, buffer: list[int], fragments: list[list[int]], plan: GdnPlan, width: int) -> None:
    assert plan.history.shape == (len(fragments), width - 1)
    for index, fragment in enumerate(fragments):
        above = rows.paths[fragment[0]][:-1][-(width - 1) :] if width > 1 else []
        found = [buffer[row] if row >= 0 else -1 for row in plan.history[index].tolist()]
        assert found == [-1] * (width - 1 - len(above)) + above


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_gdn_affine_plan(seed, width):
    rows, layout = case(seed)
    plans = [gdn_plan(rows.forest, layout, rank, "affine", width) for rank in range(layout.world)]
    tokens = [layout.rank_tokens(rank).tolist() for rank in range(layout.world)]
    fragments = [check_fragments(rows, tokens[rank], plan) for rank, plan in enumerate(plans)]
    for rank, plan in enumerate(plans):
        assert plan.exchange == "affine" and plan.order is None
        check_chains(plan)
        check_history(
            rows, rank_rows(layout, rank) + plan.history_fetch.recv_tokens.tolist(), fragments[rank], plan, width
        )
        for name, value in vars(plan.fold).items():
            assert np.array_equal(value, getattr(plans[0].fold, name)), name
    reads = [
        {t for fragment in parts for t in (rows.paths[fragment[0]][:-1][-(width - 1) :] if width > 1 else [])}
        for parts in fragments
    ]
    check_exchange(layout, [plan.history_fetch for plan in plans], reads)
    for rank, ends in enumerate(fold_paths(plans, fragments)):
        for fragment, path in zip(fragments[rank], ends, strict=True):
            assert path == rows.paths[fragment[-1]]
    check_crossings(rows, layout, fragments, plans)


def check_crossings(rows: Rows, layout: Layout, fragments: list[list[list[int]]], plans: list[GdnPlan]) -> None:
    """A state leaves a rank once for each fragment with remote children, and enters each rank once."""
    crossing = set()  # (reading rank, last token of the remote parent fragment)
    for rank, parts in enumerate(fragments):
        for fragment in parts:
            path = rows.paths[fragment[0]]
            if len(path) > 1 and layout.owner[path[-2]] != rank:
                crossing.add((rank, path[-2]))
    for rank, plan in enumerate(plans):
        exits = {fragments[rank][f][-1] for f in plan.exit_fragment}
        assert exits == {token for _, token in crossing if layout.owner[token] == rank}
        assert len(plan.exit_fragment) == len(exits)
        assert plan.fold.entry_counts[rank] == len({token for reader, token in crossing if reader == rank})


@pytest.mark.parametrize("seed", SEEDS)
def test_gdn_ulysses_plan(seed):
    rows, layout = case(seed)
    everything = [token for rank in range(layout.world) for token in rank_rows(layout, rank)]
    tokens = list(range(rows.forest.tokens))
    for rank in range(layout.world):
        plan = gdn_plan(rows.forest, layout, rank, "ulysses", 4)
        assert plan.exchange == "ulysses"
        assert np.array(everything)[plan.order.dfs_order].tolist() == tokens
        fragments = check_fragments(rows, tokens, plan)
        check_chains(plan)
        check_history(rows, tokens, fragments, plan, 4)
        assert plan.history_fetch.rows_in == plan.history_fetch.rows_out == 0
        assert len(plan.exit_fragment) == 0 and (plan.fragment_entry < 0).all()
        for fragment, path in zip(fragments, fold_paths([plan], [fragments])[0], strict=True):
            assert path == rows.paths[fragment[-1]]


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
    for rank in range(layout.world):
        plan = loss_plan(rows.forest, layout, rank, mask)
        assert (np.diff(plan.predictor_row) > 0).all() and (np.diff(plan.occurrence_rollout) >= 0).all()
        assert (np.diff(plan.edge_predictor) >= 0).all()
        predictor = np.array(rank_rows(layout, rank))[plan.predictor_row[plan.edge_predictor]]
        assert set(plan.edge_predictor.tolist()) == set(range(len(plan.predictor_row)))
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
    assert (plan.edges, plan.occurrences, len(plan.predictor_row)) == (0, 0, 0)


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
        assert plan.loss.edges == plan.loss.occurrences == 0


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
