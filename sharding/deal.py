"""Dealing whole subtrees to ranks: the order of a forest's trees, and of all children but the first, is free.

*Units* are the subtrees that are dealt: the trees of a forest, or, where one tree holds most of it, the children of
the segment where that tree spreads most. A unit that fits on a rank needs no cut.

Shapes: S segments, U units, P bins, one a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest, expand_ranges
from cp_engine.sharding.layout import Layout, layout_from_cuts
from cp_engine.sharding.measure import Survey
from cp_engine.sharding.reorder import reorder_segments

EVEN_ROUNDS = 24  # swaps of units between bins that are tried
SWAP_UNITS = 512  # units of a bin that a swap is chosen from, so that dealing stays near-linear in the units
SHARE_UNIT = 1 << 20  # shares are integers in this unit, so that every host deals alike
SNAP_TOKENS = 16  # a cut moves at most this far to a border between units: two moved cuts change a rank by 32


@dataclass(frozen=True, eq=False)
class Units:
    """Neighbouring subtrees whose order is free. Segments before the first and after the last stay where they are."""

    first: np.ndarray  # int64 [U] first segment of each
    stop: int  # segment after the last unit

    @property
    def bounds(self) -> np.ndarray:
        """int64 [U + 1] segment borders."""
        return np.append(self.first, self.stop)

    def __len__(self) -> int:
        return len(self.first)


def free_units(forest: Forest) -> Units:
    """The trees; or the non-first children of one segment of the first tree, if that tree holds most tokens."""
    root = np.flatnonzero(forest.parent < 0)
    if 2 * int(forest.subtree_end[0]) < forest.tokens:
        return Units(root, forest.segments)
    light = np.flatnonzero(forest.chain_head != 0)
    path = int(light[0]) if len(light) else forest.segments
    if path == 1:
        return Units(root, forest.segments)
    # Tokens below each segment of the heavy path that do not go on along the path.
    aside = (forest.subtree_end[:path] - forest.segment_start[1 : path + 1])[:-1]
    aside = aside - (forest.subtree_end[1:path] - forest.segment_start[1:path])
    branch = int(aside.argmax())
    children = np.flatnonzero(forest.parent == branch)[1:]
    if not len(children):
        return Units(root, forest.segments)
    return Units(children, int(np.searchsorted(forest.segment_start, forest.subtree_end[branch])))


def deal(survey: Survey, units: Units, world: int, recurrent: bool) -> list[np.ndarray]:
    """Units of each of P bins whose tokens, pairs and, with ``recurrent``, recurrent chunks are about equal.

    Most tokens first, each unit goes to the bin in which the squares of all bins' shares grow least: a deep unit to a
    bin with few pairs, a shallow one to a bin with few tokens. What stays in front counts for the first bin, what
    stays behind for the last.

    Returns P arrays int64 [units], most tokens first.
    """
    measures = [survey.start, survey.pairs_above] + ([survey.chunks_above] if recurrent else [])
    below = np.stack([_share_units(above[units.bounds], int(above[-1])) for above in measures], 1)
    share = np.diff(below, axis=0)
    load = np.zeros((world, len(measures)), np.int64)
    load[0] += below[0]
    load[-1] += SHARE_UNIT - below[-1]
    largest = np.lexsort((-share[:, 1], -share[:, 0]))
    bins: list[list[int]] = [[] for _ in range(world)]
    for unit in largest.tolist():
        b = int((load @ share[unit]).argmin())
        load[b] += share[unit]
        bins[b].append(unit)
    found = [np.asarray(members, np.int64) for members in bins]
    if world > 1:
        _even_out(found, share, load)
    place = np.argsort(largest)
    return [members[np.argsort(place[members])] for members in found]


def _share_units(part: np.ndarray, total: int) -> np.ndarray:
    """Parts of a total in `SHARE_UNIT`; both are coarsened first where their products would pass 63 bits."""
    coarse = max(0, total.bit_length() - 63 + SHARE_UNIT.bit_length())
    return (part >> coarse) * SHARE_UNIT // (total >> coarse)


def _even_out(bins: list[np.ndarray], share: np.ndarray, load: np.ndarray) -> None:
    """Swap units between the bins with most and least of one measure in turn, in place, while they come closer.

    Args:
        share: int64 [U, M], each unit's part of M measures.
        load: int64 [P, M], what each bin holds.
    """
    measures = share.shape[1]
    share = np.concatenate(
        [share, np.zeros((1, measures), np.int64)]
    )  # the last unit is none: a swap with it is a move
    for turn in range(EVEN_ROUNDS):
        measure = (turn + 1) % measures
        high, low = int(load[:, measure].argmax()), int(load[:, measure].argmin())
        ours, theirs = np.append(_some(bins[high]), -1), np.append(_some(bins[low]), -1)
        # Excess of one bin over the other after each swap; zero is perfect.
        gap = (load[high] - load[low]) - 2 * (share[ours][:, None] - share[theirs][None])
        cost = (gap**2).sum(2)
        i, j = np.unravel_index(int(cost.argmin()), cost.shape)
        if cost[i, j] >= cost[-1, -1]:
            continue
        mine, other = ours[i], theirs[j]
        load[high] += share[other] - share[mine]
        load[low] += share[mine] - share[other]
        bins[high] = np.append(bins[high][bins[high] != mine], other[other >= 0])
        bins[low] = np.append(bins[low][bins[low] != other], mine[mine >= 0])


def _some(members: np.ndarray) -> np.ndarray:
    """Units of a bin at equal steps of its order, so that large and small ones are among them."""
    return members[:: -(-len(members) // SWAP_UNITS) or 1]


def dealt_orders(survey: Survey, units: Units, world: int, most: int, recurrent: bool) -> list[np.ndarray]:
    """Up to ``most`` orders of the units, int64 [U] each, in which equal contiguous ranges cut few of them.

    Bins are lined up so that the running excess of tokens stays small. The orders differ inside bins: how units meet
    the grid of attention tiles is best found by measuring. The first one has small units at both ends of a bin, where
    the cuts fall.
    """
    start, total = survey.start, survey.forest.tokens
    tokens = np.diff(start[units.bounds])
    bins = deal(survey, units, world, recurrent)
    excess = [world * int(tokens[members].sum()) - total for members in bins]
    excess[0] += world * int(start[units.first[0]])
    line, running, left = [], 0, list(range(world))
    while left:
        # The first bin begins with what stays in front of the units, the last one ends with what stays behind them.
        choice = left
        if units.first[0] and len(left) == world:
            choice = left[:1]
        elif units.stop < survey.forest.segments and len(left) > 1:
            choice = left[:-1]
        b = min(choice, key=lambda b: (abs(running + excess[b]), b))
        left.remove(b)
        running += excess[b]
        line.append(bins[b][::-1])
    arranged = (
        [np.concatenate([members[0::2], members[1::2][::-1]]) for members in line],
        line,
        [members[::-1] for members in line],
        [np.concatenate([members[1::2], members[0::2][::-1]]) for members in line],
    )
    return [np.concatenate(members) for members in arranged[:most]]


def reorder_units(forest: Forest, units: Units, order: np.ndarray) -> Forest:
    """The forest with unit ``order[i]`` at the i-th unit's place."""
    moved = expand_ranges(units.first[order], np.diff(units.bounds)[order])
    front, behind = np.arange(units.first[0]), np.arange(units.stop, forest.segments)
    return reorder_segments(forest, np.concatenate([front, moved, behind]))


def snapped_layout(forest: Forest, world: int) -> Layout:
    """Contiguous ranges whose cuts move to a border between units where one is near."""
    cuts = forest.tokens * np.arange(world + 1) // world
    border = forest.segment_start[free_units(forest).bounds]
    after = np.minimum(np.searchsorted(border, cuts), len(border) - 1)
    for choice in (border[after], border[np.maximum(after - 1, 0)]):
        near = np.abs(choice - cuts) <= SNAP_TOKENS
        cuts[1:-1] = np.where(near, choice, cuts)[1:-1]
    return layout_from_cuts(np.maximum.accumulate(cuts), np.arange(world), world)
