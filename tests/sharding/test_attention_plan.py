"""Visible intervals and the attention plan against their definitions, on random forests and layouts."""

from __future__ import annotations

import numpy as np
import pytest

from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.intervals import visible_intervals, visible_tokens
from tests.forests import Rows, random_layout
from tests.sharding.plan_cases import SEEDS, case, check_exchange, keys_of_row, rank_rows, received


def expected_keys(rows: Rows, token: int) -> list[int]:
    return [] if token < 0 else rows.paths[token]


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
            assert plan.fetch.moves.rank == rank // size and plan.fetch.rows_in == len(plan.fetch.recv_tokens)
            buffer = np.array(local + plan.fetch.recv_tokens.tolist())[plan.gather.key_order]
            for row, token in enumerate(local):
                assert buffer[keys_of_row(plan.gather.intervals, row)].tolist() == expected_keys(rows, token)
