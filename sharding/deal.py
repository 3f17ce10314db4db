"""Dealing whole trees to ranks: the order of a forest's roots is free, so trees that fit on a rank need no cut."""

from __future__ import annotations

import numpy as np

from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import Layout, layout_from_cuts
from cp_engine.sharding.measure import Survey

EVEN_ROUNDS = 24  # swaps of trees between bins that are tried
SNAP_TOKENS = 16  # a cut moves at most this far to a border between trees: two moved cuts change a rank by 32


def deal_trees(survey: Survey, world: int, recurrent: bool) -> list[np.ndarray]:
    """Trees of each of P bins whose tokens, pairs and, with ``recurrent``, recurrent chunks are about equal.

    Returns P arrays int64 [trees], most tokens first.

    Most tokens first, each tree goes to the bin in which the squares of all bins' shares grow least:
    a deep tree to a bin with few pairs, a shallow one to a bin with few tokens.
    """
    bounds = np.append(np.flatnonzero(survey.forest.parent < 0), survey.forest.segments)
    tokens, pairs = np.diff(survey.start[bounds]), np.diff(survey.pairs_above[bounds])
    sizes = [tokens, pairs] + ([np.diff(survey.chunks_above[bounds])] if recurrent else [])
    share = np.stack([size / size.sum() for size in sizes], 1)
    load = np.zeros((world, len(sizes)))
    bins: list[list[int]] = [[] for _ in range(world)]
    for tree in np.lexsort((-pairs, -tokens)).tolist():
        b = int((load @ share[tree]).argmin())
        load[b] += share[tree]
        bins[b].append(tree)
    found = [np.asarray(trees, np.int64) for trees in bins]
    if world > 1:
        _even_out(found, share)
    return [trees[np.lexsort((-pairs[trees], -tokens[trees]))] for trees in found]


def _even_out(bins: list[np.ndarray], share: np.ndarray) -> None:
    """Swap trees between the bins with most and least of one measure in turn, in place, while that brings them closer.

    Args:
        share: float64 [trees, M], each tree's part of M measures.
    """
    measures = share.shape[1]
    share = np.concatenate([share, np.zeros((1, measures))])  # the last tree is none: a swap with it is a move
    load = np.stack([share[trees].sum(0) for trees in bins])
    for turn in range(EVEN_ROUNDS):
        measure = (turn + 1) % measures
        high, low = int(load[:, measure].argmax()), int(load[:, measure].argmin())
        ours, theirs = np.append(bins[high], -1), np.append(bins[low], -1)
        # Excess of one bin over the other after each swap; zero is perfect.
        gap = (load[high] - load[low]) - 2 * (share[ours][:, None] - share[theirs][None])
        cost = (gap**2).sum(2)
        i, j = np.unravel_index(int(cost.argmin()), cost.shape)
        if cost[i, j] >= cost[-1, -1]:
            continue
        mine, other = ours[i], theirs[j]
        load[high] += share[other] - share[mine]
        load[low] += share[mine] - share[other]
        bins[high] = np.append(np.delete(ours[:-1], i) if mine >= 0 else ours[:-1], other[other >= 0])
        bins[low] = np.append(np.delete(theirs[:-1], j) if other >= 0 else theirs[:-1], mine[mine >= 0])


def dealt_orders(survey: Survey, world: int, most: int, recurrent: bool) -> list[np.ndarray]:
    """Up to ``most`` orders of the trees, int64 [trees] each, in which equal contiguous ranges cut few of them.

    Bins are lined up so that the running excess of tokens stays small. The orders differ inside bins: how trees meet
    the grid of attention tiles is best found by measuring. The first one has small trees at both ends of a bin, where
    the cuts fall.
    """
    root = np.flatnonzero(survey.forest.parent < 0)
    tokens, total = np.diff(survey.start[np.append(root, survey.forest.segments)]), survey.forest.tokens
    bins = deal_trees(survey, world, recurrent)
    excess = [world * int(tokens[trees].sum()) - total for trees in bins]
    line, running, left = [], 0, list(range(world))
    while left:
        b = min(left, key=lambda b: (abs(running + excess[b]), b))
        left.remove(b)
        running += excess[b]
        line.append(bins[b][::-1])
    arranged = (
        [np.concatenate([trees[0::2], trees[1::2][::-1]]) for trees in line],
        line,
        [trees[::-1] for trees in line],
        [np.concatenate([trees[1::2], trees[0::2][::-1]]) for trees in line],
    )
    return [np.concatenate(trees) for trees in arranged[:most]]


def snapped_layout(forest: Forest, world: int) -> Layout:
    """Contiguous ranges whose cuts move to a border between trees where one is near."""
    cuts = forest.tokens * np.arange(world + 1) // world
    border = np.append(forest.segment_start[np.flatnonzero(forest.parent < 0)], forest.tokens)
    after = np.minimum(np.searchsorted(border, cuts), len(border) - 1)
    for choice in (border[after], border[np.maximum(after - 1, 0)]):
        near = np.abs(choice - cuts) <= SNAP_TOKENS
        cuts[1:-1] = np.where(near, choice, cuts)[1:-1]
    return layout_from_cuts(np.maximum.accumulate(cuts), np.arange(world), world)
