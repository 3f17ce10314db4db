"""Packs: every rollout once, under the budget, in few packs with little replayed, however the rollouts are ordered."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from cp_engine.sharding.forest import build_forest, sorted_rows
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.packing import Pack, deal_packs, empty_pack, pack_rollouts
from cp_engine.sharding.plan import shard_plan
from cp_engine.sharding.replay import RunPrices
from cp_engine.sharding.row_trie import RowTrie, fresh_tokens
from tests.forests import Rows, closed_form_rows, random_variety


def packed(rows: Rows, mask: np.ndarray | None = None, **options) -> list[Pack]:
    mask = rows.mask(0) if mask is None else mask
    return pack_rollouts(
        rows.token, rows.row_start, rows.group, mask, share=rows.share, share_key=rows.share_key, **options
    )


def prefixes(rows: Rows, rollouts) -> set[tuple]:
    return {rows.prefix(r, position) for r in rollouts for position in range(len(rows.rows[r]))}


def greedy(rows: Rows, budget: int, coupled: list[int] | None) -> list[list[int]]:
    """Filling pack after pack in depth-first order, with sets of prefixes: what no packing may exceed in packs."""
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
        # The pack's forest is the trie of its rollouts: one tree token for each prefix, with the prefix's last id.
        tree = pack.forest.flat_to_tree()
        assert np.array_equal(pack.forest.token[tree], rows.token[flat])
        node = [rows.prefix(r, position) for r in pack.rollouts for position in range(len(rows.rows[r]))]
        held = prefixes(rows, pack.rollouts)
        assert len(set(zip(tree.tolist(), node, strict=True))) == pack.tokens == len(held)
        assert pack.replayed_tokens == len(held & before)
        assert pack.unshared_tokens == 0
        before |= held


def content(rows: Rows, packs: list[Pack]) -> list[tuple]:
    """What packs hold, without the numbers of rollouts and groups."""
    found = []
    for pack in packs:
        forest = pack.forest
        arrays = (forest.token, forest.segment_start, forest.parent, forest.depth, forest.subtree_end)
        held = Counter(tuple(rows.rows[r]) for r in pack.rollouts.tolist())
        ends = sorted(forest.end_segment.tolist())
        figures = (pack.replayed_tokens, pack.unshared_tokens)
        found.append((*(array.tolist() for array in arrays), sorted(held.items()), ends, figures))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_packs_hold_every_rollout_once_in_few_packs(seed):
    rows, rng = random_variety(seed), np.random.default_rng(seed)
    coupled = rng.integers(0, len(rows.rows), len(rows.rows)) if seed % 2 else None
    numbers = range(len(rows.rows)) if coupled is None else coupled.tolist()
    largest = max(len(prefixes(rows, [r for r in range(len(rows.rows)) if numbers[r] == n])) for n in numbers)
    mask = rows.mask(seed)
    for budget in (largest, largest + 3, 2 * largest, rows.forest.tokens):
        packs = packed(rows, mask, max_pack_tokens=budget, coupled=coupled)
        check_packs(rows, packs, mask)
        assert max(pack.tokens for pack in packs) <= budget
        # Where groups do not share, filling depends on their numbers, which packing ignores.
        first = greedy(rows, budget, None if coupled is None else coupled.tolist())
        assert len(packs) <= len(first) or rows.share == "group"
        if len(packs) == len(first) and rows.share == "batch":
            assert sum(pack.tokens for pack in packs) <= sum(len(prefixes(rows, members)) for members in first)
        if coupled is not None:
            pack_of = {r: index for index, pack in enumerate(packs) for r in pack.rollouts.tolist()}
            assert all(len({pack_of[r] for r in np.flatnonzero(coupled == n)}) == 1 for n in set(numbers))
    assert len(packs) == 1  # the whole forest fits the last budget


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_rollouts_and_the_numbers_of_groups_decide_nothing(seed):
    rows, rng = random_variety(seed), np.random.default_rng(seed)
    budget = int(rows.forest.rollout_length.max()) + seed % 4
    prices = RunPrices(token=3, pair=0, chunk=0, fragment=10) if seed % 3 == 0 else None
    expected = content(rows, packed(rows, max_pack_tokens=budget, run_prices=prices))
    order, names = rng.permutation(len(rows.rows)), rng.permutation(3)
    keys = None if rows.keys is None else [rows.keys[r] for r in order]
    groups = [int(names[rows.groups[r]]) for r in order]
    shuffled = Rows([rows.rows[r] for r in order], groups, rows.share, keys)
    assert content(shuffled, packed(shuffled, max_pack_tokens=budget, run_prices=prices)) == expected


def grpo_rows(groups: int, trials: int, prompt: int, answer: int, seed: int = 0) -> Rows:
    """Groups with a common system prompt of 20 tokens, a prompt each, and answers of 1 to ``answer`` tokens."""
    rng = np.random.default_rng(seed)
    made, group = [], []
    for g in range(groups):
        head = [1] * 20 + rng.integers(2, 1000, prompt).tolist()
        made += [head + rng.integers(2, 1000, int(rng.integers(1, answer + 1))).tolist() for _ in range(trials)]
        group += [g] * trials
    return Rows(made, group)


def fewest_packs(rows: Rows, budget: int) -> int:
    """No packing has fewer: each pack repeats what all rollouts share."""
    common = int(sorted_rows(rows.token, rows.row_start)[1][1:].min())
    return -(-(rows.forest.tokens - common) // (budget - common))


@pytest.mark.parametrize(
    "shape, budget, spare",
    [((60, 4, 30, 60), 512, 1), ((60, 4, 30, 60), 1024, 0), ((6, 12, 100, 120), 512, 3), ((3, 20, 150, 90), 600, 1)],
    ids=["small trees", "larger packs", "trees over the budget", "deep trees over the budget"],
)
def test_pack_counts_are_near_the_bound(shape, budget, spare):
    """At most ``spare`` packs over a bound that ignores the replay of prompts, and less replayed than by filling."""
    rows = grpo_rows(*shape)
    packs = packed(rows, max_pack_tokens=budget)
    first = greedy(rows, budget, None)
    replayed = sum(pack.replayed_tokens for pack in packs)
    assert len(packs) <= min(len(first), fewest_packs(rows, budget) + spare)
    assert replayed < sum(len(prefixes(rows, members)) for members in first) - rows.forest.tokens


def test_long_rollouts_that_share_little_fill_packs():
    """Subtrees of 64 tokens leave a third of each pack of 100 empty; their rollouts of 33 fill it to the bound."""
    rows = Rows([[group, *[100 * group + trial] * 32] for group in range(9) for trial in (1, 2)], [0] * 18)
    packs = packed(rows, max_pack_tokens=100)
    assert len(packs) == 6


def test_fresh_tokens_are_counted_in_the_first_pack_that_holds_them():
    for seed in range(60):
        rows = random_variety(seed)
        group = rows.group if rows.share == "group" else None
        order, common = sorted_rows(rows.token, rows.row_start, group, rows.share_key)
        pack = np.random.default_rng(seed).integers(0, 4, len(order))
        trie = RowTrie(np.diff(rows.row_start)[order], common)
        expected, before = [], set()
        for number in range(4):
            held = prefixes(rows, order[pack == number])
            expected.append(len(held - before))
            before |= held
        assert fresh_tokens(trie, pack, 4).tolist() == expected
        kept = np.flatnonzero(pack == 0)
        assert trie.subset(kept).tokens(range(len(kept))) == trie.tokens(kept.tolist()) == expected[0]


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
    """Budget 7: 11 12 13 14 with both its branches; the other child of 12 replays 11 12 and takes the other tree."""
    packs = packed(closed_form_rows(), max_pack_tokens=7)
    assert [pack.rollouts.tolist() for pack in packs] == [[0, 1, 3, 4], [2, 5]]
    assert [pack.tokens for pack in packs] == [7, 4]
    assert [pack.replayed_tokens for pack in packs] == [0, 2]


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


@pytest.mark.parametrize("kind", ["trunk", "comb", "pairs"])
def test_packing_of_deep_and_wide_tries_is_near_linear(kind):
    """A trunk as long as the budget with 4,000 leaves; a comb of depth 3,000; 8,000 coupled pairs across all trees."""
    coupled = None
    if kind == "trunk":
        lengths, budget = [401] * 4_000, 410
        made = [[0] * 400 + [1 + leaf] for leaf in range(4_000)]
    elif kind == "comb":
        made, budget = [[0] * depth + [1] for depth in range(1, 3_001)], 3_050
    else:
        made = [[tree, 1000 + leaf, *range(2000, 2010)] for tree in range(400) for leaf in range(40)]
        coupled, budget = np.random.default_rng(0).permutation(len(made)) // 2, 500
    token = np.array([t for row in made for t in row])
    lengths = np.array([len(row) for row in made])
    start, group = np.concatenate([[0], np.cumsum(lengths)]), np.zeros(len(made), np.int64)
    began = time.process_time()
    packs = pack_rollouts(token, start, group, token > 0, max_pack_tokens=budget, coupled=coupled)
    assert time.process_time() - began < 8
    assert max(pack.tokens for pack in packs) <= budget
    assert sum(len(pack.rollouts) for pack in packs) == len(made)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("exchange, gdn_exchange", [("gather", "affine"), ("ring", "affine"), ("ulysses", "ulysses")])
def test_an_empty_pack_plans_and_refers_to_nothing(world, exchange, gdn_exchange):
    pack = empty_pack()
    layout = contiguous_layout(pack.forest, world)
    for rank in range(world):
        plan = shard_plan(pack.forest, layout, rank, pack.loss_mask, exchange, gdn_exchange, 4)
        assert plan.rows == 1 and plan.tokens == plan.attention.pairs == plan.gdn.fragments == 0
        assert plan.loss.edges == plan.loss.occurrences == plan.loss.predictors == 0
        assert plan.attention.fetch.rows_in == plan.attention.fetch.rows_out == plan.gdn.history_fetch.rows_in == 0
        assert not plan.gdn.fold.exit_counts.any() and not plan.gdn.fold.entry_counts.any()


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 40])
def test_packs_are_dealt_equally(dp):
    packs = packed(grpo_rows(60, 4, 30, 60), max_pack_tokens=1024)
    dealt = deal_packs(packs, dp)
    assert len(dealt) == dp and {len(mine) for mine in dealt} == {-(-len(packs) // dp)}
    held = [pack for mine in dealt for pack in mine if pack.tokens]
    assert sorted(map(id, held)) == sorted(map(id, packs))
    # Ranks that wait for each other in every pack lose only what neighbours in size differ by.
    rounds = [sorted(mine[i].tokens for mine in dealt) for i in range(len(dealt[0]))]
    assert sum(r[-1] - r[0] for r in rounds[:-1]) <= max(pack.tokens for pack in packs)
    totals = [sum(pack.tokens for pack in mine) for mine in dealt]
    assert max(totals) - min(totals) <= max(pack.tokens for pack in packs)


def test_dealing_no_packs_and_wrong_ranks():
    assert deal_packs([], 3) == [[], [], []]
    with pytest.raises(ValueError, match="dp must be at least 1, got 0"):
        deal_packs([], 0)
