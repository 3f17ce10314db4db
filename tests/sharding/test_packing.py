"""Packs: every rollout once, under the budget, filled greedily by the tokens that a rollout adds."""

from __future__ import annotations

import time

import numpy as np
import pytest

from cp_engine.sharding.forest import build_forest, sorted_rows
from cp_engine.sharding.packing import Pack, pack_rollouts
from tests.forests import Rows, closed_form_rows, random_variety


def packed(rows: Rows, mask: np.ndarray | None = None, **options) -> list[Pack]:
    mask = rows.mask(0) if mask is None else mask
    return pack_rollouts(
        rows.token, rows.row_start, rows.group, mask, share=rows.share, share_key=rows.share_key, **options
    )


def prefixes(rows: Rows, rollouts) -> set[tuple]:
    return {rows.prefix(r, position) for r in rollouts for position in range(len(rows.rows[r]))}


def subset(rows: Rows, rollouts) -> Rows:
    keys = None if rows.keys is None else [rows.keys[r] for r in rollouts]
    return Rows([rows.rows[r] for r in rollouts], [rows.groups[r] for r in rollouts], rows.share, keys)


def greedy(rows: Rows, budget: int, coupled: list[int] | None) -> list[list[int]]:
    """The packing by its definition, with sets of prefixes."""
    group = rows.group if rows.share == "group" else None
    order = sorted_rows(rows.token, rows.row_start, group, rows.share_key)[0].tolist()
    coupled = list(range(len(order))) if coupled is None else coupled
    packs: list[list[int]] = [[]]
    for number in dict.fromkeys(coupled[r] for r in order):
        unit = [r for r in order if coupled[r] == number]
        if packs[-1] and len(prefixes(rows, packs[-1] + unit)) > budget:
            packs.append([])
        packs[-1] += unit
    return [sorted(pack) for pack in packs]


def check_packs(rows: Rows, packs: list[Pack], mask: np.ndarray) -> None:
    assert sorted(r for pack in packs for r in pack.rollouts.tolist()) == list(range(len(rows.rows)))
    start, before = rows.row_start, set()
    for pack in packs:
        assert (np.diff(pack.rollouts) > 0).all()
        flat = np.concatenate([np.arange(start[r], start[r + 1]) for r in pack.rollouts])
        assert np.array_equal(pack.loss_mask, mask[flat])
        expected = subset(rows, pack.rollouts).forest
        for field in ("token", "segment_start", "parent", "depth", "subtree_end", "end_segment"):
            assert np.array_equal(getattr(pack.forest, field), getattr(expected, field)), field
        held = prefixes(rows, pack.rollouts)
        assert pack.tokens == len(held)
        assert pack.replayed_tokens == len(held & before)
        before |= held


@pytest.mark.parametrize("seed", range(60))
def test_packs_are_the_greedy_ones(seed):
    rows, rng = random_variety(seed), np.random.default_rng(seed)
    coupled = rng.integers(0, len(rows.rows), len(rows.rows)) if seed % 2 else None
    numbers = range(len(rows.rows)) if coupled is None else coupled.tolist()
    largest = max(len(prefixes(rows, [r for r in range(len(rows.rows)) if numbers[r] == n])) for n in numbers)
    mask = rows.mask(seed)
    for budget in (largest, largest + 3, rows.forest.tokens):
        packs = packed(rows, mask, max_pack_tokens=budget, coupled=coupled)
        check_packs(rows, packs, mask)
        assert max(pack.tokens for pack in packs) <= budget
        expected = greedy(rows, budget, None if coupled is None else coupled.tolist())
        assert [pack.rollouts.tolist() for pack in packs] == expected
        if coupled is not None:
            pack_of = {r: index for index, pack in enumerate(packs) for r in pack.rollouts.tolist()}
            assert all(len({pack_of[r] for r in np.flatnonzero(coupled == n)}) == 1 for n in set(numbers))
    assert len(packs) == 1  # the whole forest fits the last budget


def test_without_a_budget_there_is_one_pack():
    rows = random_variety(8)
    mask = rows.mask(0)
    (pack,) = packed(rows, mask)
    check_packs(rows, [pack], mask)
    assert pack.replayed_tokens == 0 and np.array_equal(pack.loss_mask, mask)


def test_no_rollouts_make_one_empty_pack():
    nothing = np.empty(0, np.int64)
    for budget in (None, 10):
        (pack,) = pack_rollouts(nothing, np.zeros(1, np.int64), nothing, nothing, max_pack_tokens=budget)
        assert pack.tokens == pack.replayed_tokens == len(pack.rollouts) == len(pack.loss_mask) == 0


def test_closed_form_with_a_replayed_ancestor():
    """Budget 6: the path to 15 and, shared with it, 11 12 13; then the other branches replay their ancestors."""
    packs = packed(closed_form_rows(), max_pack_tokens=6)
    assert [pack.rollouts.tolist() for pack in packs] == [[0, 3, 4], [1], [2, 5]]
    assert [pack.tokens for pack in packs] == [5, 6, 4]
    assert [pack.replayed_tokens for pack in packs] == [0, 4, 2]


@pytest.mark.parametrize("options", [{}, {"coupled": np.array([0, 1, 2, 3, 4, 5])}], ids=["free", "coupled"])
def test_a_rollout_over_the_budget_is_named(options):
    with pytest.raises(ValueError, match="rollout 1 has 6 tree tokens, more than max_pack_tokens = 5"):
        packed(closed_form_rows(), max_pack_tokens=5, **options)


def test_a_coupled_set_over_the_budget_is_named():
    coupled = np.array([0, 1, 1, 2, 3, 1])
    with pytest.raises(ValueError, match="coupled rollouts 1, 2, 5 have 8 tree tokens, more than max_pack_tokens = 7"):
        packed(closed_form_rows(), max_pack_tokens=7, coupled=coupled)
    assert len(packed(closed_form_rows(), max_pack_tokens=8, coupled=coupled)) == 2


def test_wrong_options_are_refused():
    rows = closed_form_rows()
    with pytest.raises(ValueError, match="max_pack_tokens must be at least 1, got 0"):
        packed(rows, max_pack_tokens=0)
    with pytest.raises(ValueError, match="share must be one of batch, group, got 'tree'"):
        pack_rollouts(rows.token, rows.row_start, rows.group, rows.mask(0), share="tree")


def test_packing_is_near_linear():
    """Nearly the work of the forests alone, at 40,000 rollouts that are coupled crosswise."""
    rows, length = 40_000, 12
    token = np.random.default_rng(0).integers(0, 3, rows * length)
    start = np.arange(rows + 1) * length
    group = np.zeros(rows, np.int64)
    coupled = np.random.default_rng(1).permutation(rows) // 2
    began = time.process_time()
    whole = build_forest(token, start)
    alone = time.process_time() - began
    began = time.process_time()
    packs = pack_rollouts(token, start, group, token > 0, max_pack_tokens=whole.tokens // 3, coupled=coupled)
    assert len(packs) >= 3
    assert time.process_time() - began < 1 + 10 * alone
