"""The chord on random forests and on the shapes it is optimal or hard for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cp_engine.sharding.chord import Pieces, chord_layout, halve, join, layout_of, quotas, split, whole_axis
from cp_engine.sharding.layer_time import SplitPrices
from cp_engine.sharding.layout import Layout, imbalance, rank_pairs
from cp_engine.sharding.measure import Survey
from tests.forests import chain_forest, comb_rows, random_variety
from tests.sharding.test_cost import star

PRICES = SplitPrices(tile=1_500_000, chunk=0, row=13_000, piece=1_000)


def check_chord(forest, world: int) -> Layout:
    layout = chord_layout(Survey(forest), world, PRICES)
    count = layout.rank_token_count
    assert count.sum() == forest.tokens and np.ptp(count) <= 1
    pieces = np.bincount(layout.piece_rank, minlength=world)
    assert pieces.sum() <= 2 * world - 1 and pieces.max() <= math.ceil(math.log2(world)) + 1
    return layout


@pytest.mark.parametrize("part", range(10))
def test_random_forests(part):
    """1,500 of them: equal tokens, few pieces, and no rank over the mean by as much as one path's tokens."""
    for seed in range(part, 1500, 10):
        forest, world = random_variety(seed).forest, 2 + seed % 16
        layout = check_chord(forest, world)
        if forest.tokens >= world:
            pairs = rank_pairs(forest, layout)
            assert pairs.max() - pairs.mean() <= forest.max_depth, seed


@pytest.mark.parametrize("world", [2, 3, 7, 8, 16, 64])
def test_chain_star_and_comb(world):
    forests = chain_forest(4000), star(3000, 13, 700), comb_rows(300).forest
    for forest in forests:
        layout = check_chord(forest, world)
        assert imbalance(rank_pairs(forest, layout)) < 1 + 2 * forest.max_depth * world / forest.tree_pairs


def test_a_chain_of_two_ranks_is_cut_into_the_optimal_three_pieces():
    layout = check_chord(chain_forest(4096), 2)
    assert len(layout.piece_rank) == 3 and layout.piece_rank.tolist() in ([0, 1, 0], [1, 0, 1])


def test_more_ranks_than_tokens():
    layout = check_chord(chain_forest(3), 8)
    assert sorted(layout.rank_token_count.tolist()) == [0] * 5 + [1] * 3


@pytest.mark.parametrize("seed", range(40))
def test_tolerant_halving_stays_under_its_cap(seed):
    forest, world = star(500 + 37 * seed, 5 + seed, 300), 2 + seed % 7
    pairs = forest.tree_pairs
    cap = pairs * 102 // (100 * world)
    parts = halve(Survey(forest), whole_axis(forest.tokens), quotas(forest.tokens, world), PRICES, cap)
    layout = layout_of(parts, forest.tokens)
    assert np.ptp(layout.rank_token_count) <= 1
    assert rank_pairs(forest, layout).max() <= cap + forest.max_depth


def test_split_returns_distinct_splits_best_first():
    forest = star(2000, 16, 500)
    survey, tokens = Survey(forest), forest.tokens
    found = split(survey, whole_axis(tokens), tokens // 2, (1, 1), PRICES, forest.tree_pairs, best=5)
    assert len(found) == 5
    assert all(a.tokens == tokens // 2 and a.tokens + b.tokens == tokens for a, b in found)
    assert len({(*a.start.tolist(), *a.end.tolist()) for a, _ in found}) == 5
    alone = split(survey, whole_axis(tokens), tokens // 2, (1, 1), PRICES, forest.tree_pairs)[0]
    assert np.array_equal(alone[0].start, found[0][0].start)


@pytest.mark.parametrize("seed", range(20))
def test_split_keeps_to_the_most_pieces(seed):
    forest = star(600 + 50 * seed, 9, 200)
    survey, tokens = Survey(forest), forest.tokens
    cuts = np.sort(np.random.default_rng(seed).choice(tokens, 8, replace=False))
    pieces = Pieces(cuts[0::2], cuts[1::2])
    cap = forest.tree_pairs
    for most in (1, 5, 6, 7):
        found = split(survey, pieces, pieces.tokens // 2, (1, 1), PRICES, cap, best=4, most_pieces=most)
        assert all(len(a.start) + len(b.start) <= most for a, b in found)
        assert bool(found) == (most >= 5)  # one cut at the start of a piece, one through another
        for a, b in found:
            assert a.tokens == pieces.tokens // 2
            together = join([a, b])
            assert np.array_equal(together.start, pieces.start) and np.array_equal(together.end, pieces.end)


def test_join_and_layout_of():
    def pieces(*ranges):
        return Pieces(*(np.array(side) for side in zip(*ranges, strict=True)))

    joined = join([pieces((0, 3), (8, 9)), pieces((3, 5))])
    assert joined.start.tolist() == [0, 8] and joined.end.tolist() == [5, 9] and joined.tokens == 6
    layout = layout_of([pieces((0, 3), (8, 9)), pieces((3, 8))], 9)
    assert layout.piece_start.tolist() == [0, 3, 8, 9] and layout.piece_rank.tolist() == [0, 1, 0]
