"""Layouts: every token has one owner and one row."""

from __future__ import annotations

import numpy as np
import pytest

from cp_engine.sharding.layout import contiguous_layout, imbalance, layout_from_cuts, rank_pairs
from tests.forests import closed_form_rows, random_layout, random_variety


@pytest.mark.parametrize("seed", range(40))
def test_every_token_has_one_owner_and_rows_ascend(seed):
    forest = random_variety(seed).forest
    layout = random_layout(forest, seed)
    assert layout.tokens == forest.tokens
    owned = [layout.rank_tokens(rank).tolist() for rank in range(layout.world)]
    assert sorted(sum(owned, [])) == list(range(forest.tokens))
    for rank, tokens in enumerate(owned):
        assert tokens == sorted(tokens)
        assert layout.owner[tokens].tolist() == [rank] * len(tokens)
        assert layout.local_row[tokens].tolist() == list(range(len(tokens)))
        assert layout.rank_token_count[rank] == len(tokens)
        assert layout.rank_rows[rank] == max(1, len(tokens))
    assert (np.diff(layout.piece_start) > 0).all()
    assert (np.diff(layout.piece_rank) != 0).all()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_contiguous_ranges_are_equal(seed, world):
    forest = random_variety(seed).forest
    layout = contiguous_layout(forest, world)
    assert np.ptp(layout.rank_token_count) <= 1
    assert (np.diff(layout.owner) >= 0).all()
    bounds = [rank * forest.tokens // world for rank in range(world + 1)]
    assert layout.rank_token_count.tolist() == np.diff(bounds).tolist()


def test_more_ranks_than_tokens_leaves_padding_rows():
    forest = closed_form_rows().forest
    layout = contiguous_layout(forest, 12)
    assert layout.rank_token_count.sum() == 9 and (layout.rank_token_count == 0).sum() == 3
    assert layout.rank_rows.tolist() == [1] * 12


def test_empty_ranges_vanish_and_neighbours_join():
    layout = layout_from_cuts([0, 2, 2, 5, 9, 9], [1, 0, 1, 0, 2], 3)
    assert layout.piece_start.tolist() == [0, 5, 9]
    assert layout.piece_rank.tolist() == [1, 0]
    assert layout.rank_tokens(2).tolist() == []


@pytest.mark.parametrize(
    ("cuts", "ranks"), [([1, 5], [0]), ([0, 5, 3], [0, 1]), ([0, 5], [2]), ([0, 5], [-1])], ids=str
)
def test_impossible_cuts_are_refused(cuts, ranks):
    with pytest.raises(ValueError, match="cuts must ascend from 0 and ranks lie in"):
        layout_from_cuts(cuts, ranks, 2)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="cp must be at least 1, got 0"):
        contiguous_layout(closed_form_rows().forest, 0)


@pytest.mark.parametrize("seed", range(20))
def test_pairs_of_each_rank(seed):
    rows = random_variety(seed)
    layout = random_layout(rows.forest, seed)
    expected = [sum(len(rows.paths[t]) for t in layout.rank_tokens(rank)) for rank in range(layout.world)]
    assert rank_pairs(rows.forest, layout).tolist() == expected


def test_imbalance_is_maximum_over_mean():
    assert imbalance(np.array([1, 2, 6])) == 2.0
    assert imbalance(np.array([0, 0])) == 1.0
