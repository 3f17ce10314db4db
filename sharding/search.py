"""The balanced layout: the chord as the guaranteed base, better layouts by predicted time on top.

`balanced_layout` may return the forest with its trees, or the non-first children of a segment, in another order; that
order is free. The chord and the layouts of other engines are candidates on the forest as it stands, so none of them
is faster where it holds the limits. `pack_rollouts` orders trees by their tokens, so the result depends on the set of
rollouts alone, not on the order in which they were given.

Shapes: T tokens, S segments, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cp_engine.sharding.chord import (
    Pieces,
    chord_layout,
    halve,
    join,
    layout_of,
    quotas,
    split,
    whole_axis,
)
from cp_engine.sharding.cost import H200, Costs, ModelShape
from cp_engine.sharding.deal import Units, dealt_orders, free_units, reorder_units, snapped_layout
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.hosts import ONE_HOST, Hosts
from cp_engine.sharding.layer_time import SplitPrices, StepTime, rank_time, split_prices, step_time
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.measure import Figures, Survey, between_ranks, measure
from cp_engine.sharding.simple_layouts import simple_layouts
from cp_engine.sharding.zones import trunk_ends, zoned_layout

TOKEN_SPREAD = 64  # most tokens by which two ranks may differ
PAIR_LIMIT_PERCENT = 2  # most pairs of a rank over the mean, where ranks hold at least SMALL_RANK tokens
SMALL_PAIR_LIMIT_PERCENT = 5
SMALL_RANK = 8192
# On any rank, and under two in the mean, up to so many ranks; the chord needs one more for each further doubling.
MOST_PIECES, FEW_RANKS = 4, 8
TWO_RANK_SPLITS = 6  # tolerant splits that are measured where there are only two ranks
DEALT_ORDERS = 4  # orders of whole subtrees that are measured
GIVEN_ORDER_RANKS = 4  # most ranks for which tolerant splits of the given order are tried besides those of another
CROWDED_PER_MILLE = 25  # on more ranks: what a layout of two pieces a rank or more must gain over one with fewer
POLISH_RANKS = 16  # most ranks for which the slower steps are tried
POLISH_ROUNDS = 4
# Idle ranks, and splits with each, that a polish tries for a busy rank. Many small subtrees meet the tile grid by luck,
# which only measuring finds; few deep ones do not repay it, and a forest of many segments takes longer to measure.
POLISH_MANY, POLISH_FEW, POLISH_LARGE = (5, 8), (3, 2), (2, 2)
LARGE_SEGMENTS = 4096  # segments of a forest from which on it counts as large
WORTH_PER_MILLE = 1  # polishing stops when a perfect layout would gain less than this


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with what is predicted for it."""

    name: str
    survey: Survey
    layout: Layout
    figures: Figures
    time: StepTime
    violation: int  # 0 where every limit holds

    @property
    def key(self) -> tuple[int, int]:
        """What candidates are compared by; smaller is better."""
        crowded = self.figures.crowded > 0
        return self.violation, self.time.step * (1000 + crowded * CROWDED_PER_MILLE) // 1000


@dataclass(frozen=True, eq=False)
class PlacedForest:
    """A forest, in the order of subtrees that was chosen, and who owns its tokens."""

    forest: Forest
    layout: Layout
    method: str  # the candidate that won, with ``+polish`` where re-splitting improved it
    figures: Figures
    time: StepTime
    tried: dict[str, int]  # predicted step of each candidate that met the limits, nanoseconds; the best of a name


@dataclass(frozen=True, eq=False)
class _Judge:
    """Limits and prices of one pack."""

    world: int
    tokens: int
    pairs: int
    model: ModelShape
    costs: Costs
    hosts: Hosts
    tried: dict[str, int] = field(default_factory=dict)

    @property
    def limit_percent(self) -> int:
        return PAIR_LIMIT_PERCENT if self.tokens >= SMALL_RANK * self.world else SMALL_PAIR_LIMIT_PERCENT

    @property
    def cap(self) -> int:
        """Most pairs of a rank that a tolerant split may use: nine tenths of the limit, the rest is for rounding."""
        return self.pairs * (1000 + 9 * self.limit_percent) // (1000 * self.world)

    @cached_property
    def prices(self) -> SplitPrices:
        return split_prices(self.pairs, self.tokens, self.model, self.costs)

    def candidate(self, name: str, survey: Survey, layout: Layout) -> Candidate:
        figures = measure(survey, layout, self.model.gdn_layers > 0, self.model.window)
        rows = between_ranks(survey, layout) if self.hosts.several(self.world) else None
        time = step_time(figures, self.model, self.costs, self.hosts, rows)
        found = Candidate(name, survey, layout, figures, time, self._violation(figures))
        if not found.violation:
            self.tried[name] = min(time.step, self.tried.get(name, time.step))
        return found

    def _violation(self, figures: Figures) -> int:
        """How far the limits are broken: parts of a million of the pairs, and as much for each piece or token."""
        over = int(figures.pairs.max()) * self.world * 100 - self.pairs * (100 + self.limit_percent)
        total = max(0, over) * 10**4 // max(1, self.pairs)
        most = max(MOST_PIECES, (self.world - 1).bit_length() + 1)
        pieces = max(0, int(figures.pieces.max()) - most)
        if self.world <= FEW_RANKS:
            pieces += figures.crowded
        spread = max(0, int(figures.tokens.max() - figures.tokens.min()) - TOKEN_SPREAD)
        return total + 10**6 * (pieces + spread)


def balanced_layout(
    forest: Forest, world: int, *, model: ModelShape, costs: Costs = H200, hosts: Hosts = ONE_HOST
) -> PlacedForest:
    """Place a forest on ``world`` ranks: equal tokens, equal attention work, few pieces, little traffic.

    Every candidate is measured exactly and compared by the predicted time of all layers (`step_time`); the smallest
    wins, among those that hold the limits on tokens, pairs and pieces. The chord holds them always, up to the
    rounding of tiny packs. Never slower than the chord, contiguous ranges, zigzag or snake on the same forest where
    these hold the limits and have under two pieces a rank. A pure function; the same on every host.

    Args:
        hosts: where ranks stand; rows between hosts are predicted to take longer.

    Raises:
        ValueError: for fewer than one rank or a forest without tokens.
    """
    if world < 1:
        raise ValueError(f"cp must be at least 1, got {world}")
    if not forest.tokens:
        raise ValueError("cannot place a forest without tokens: an empty pack has no layout to search")
    base = Survey(forest)
    judge = _Judge(world, forest.tokens, int(base.pairs_above[-1]), model, costs, hosts)
    if world == 1:
        best = judge.candidate("contiguous", base, contiguous_layout(forest, 1))
    else:
        best = min(_starts(judge, base), key=lambda c: c.key)  # the first of equal ones
        if world <= POLISH_RANKS:
            best = _polish(judge, best)
    return PlacedForest(best.survey.forest, best.layout, best.name, best.figures, best.time, judge.tried)


def _starts(judge: _Judge, base: Survey) -> list[Candidate]:
    """The layouts that the search begins with."""
    world, prices = judge.world, judge.prices
    found = [judge.candidate("chord", base, chord_layout(base, world, prices))]
    for name, layout in simple_layouts(base, world).items():
        if len(layout.piece_rank) < 2 * world:
            found.append(judge.candidate(name, base, layout))
    dealt = [Survey(reorder_units(base.forest, units, order)) for units, order in _orders(judge, base)]
    whole = [judge.candidate("dealt", survey, snapped_layout(survey.forest, world)) for survey in dealt or [base]]
    nearest = min(whole, key=lambda c: c.key)
    found += whole
    if nearest.violation:
        found.append(judge.candidate("repaired", nearest.survey, _repaired(judge, nearest)))
    orders = [("dealt tolerant", nearest.survey)] if dealt else []
    if not dealt or world <= GIVEN_ORDER_RANKS:
        orders.append(("tolerant", base))
    for name, survey in orders:
        found += [judge.candidate(name, survey, layout) for layout in _tolerant(judge, survey)]
    for x in trunk_ends(base, world):
        zoned = zoned_layout(base, x, world, prices, judge.limit_percent)
        found.append(judge.candidate("zoned", base, zoned))
    return found


def _orders(judge: _Judge, base: Survey) -> list[tuple[Units, np.ndarray]]:
    """Orders of free units to measure: one where units are too few, or ranks too many, for the order to matter."""
    units, world = free_units(base.forest), judge.world
    if len(units) < world:  # nothing to deal; what one rank owns is likelier whole if the largest come first
        order = np.argsort(-np.diff(base.start[units.bounds]), kind="stable")
        return [] if (order == np.arange(len(units))).all() else [(units, order)]
    many = len(units) >= 2 * world and world <= POLISH_RANKS
    orders = dealt_orders(base, units, world, DEALT_ORDERS if many else 1, judge.model.gdn_layers > 0)
    return [(units, order) for order in orders]


def _tolerant(judge: _Judge, survey: Survey) -> list[Layout]:
    """Layouts that use the tolerance on pairs; two ranks are cheap enough to measure several."""
    axis, share = whole_axis(judge.tokens), quotas(judge.tokens, judge.world)
    if judge.world == 2:
        pairs = split(survey, axis, int(share[0]), (1, 1), judge.prices, judge.cap, best=TWO_RANK_SPLITS)
    else:
        pairs = [halve(survey, axis, share, judge.prices, judge.cap)]
    return [layout_of(list(parts), judge.tokens) for parts in pairs]


def _repaired(judge: _Judge, base: Candidate) -> Layout:
    """A layout over the limit on pairs whose fullest rank is split anew with the emptiest one until none is over it."""
    layout, survey = base.layout, base.survey
    parts = [Pieces(*layout.pieces(rank)) for rank in range(judge.world)]
    pairs = base.figures.pairs.copy()
    for _ in range(judge.world):
        full, empty = int(pairs.argmax()), int(pairs.argmin())
        if int(pairs[full]) * 100 * judge.world <= judge.pairs * (100 + judge.limit_percent):
            break
        together = join([parts[full], parts[empty]])
        parts[full], parts[empty] = split(survey, together, parts[full].tokens, (1, 1), judge.prices, judge.cap)[0]
        for rank in (full, empty):
            ends = survey.pairs_before(np.stack([parts[rank].start, parts[rank].end]))
            pairs[rank] = int((ends[1] - ends[0]).sum())
    return layout_of(parts, judge.tokens)


def _polish(judge: _Judge, best: Candidate) -> Candidate:
    """Re-split the slowest rank, or the one with the busiest link, with the idlest ones, while that gains."""
    forest = best.survey.forest
    many = len(free_units(forest)) >= judge.world
    large = forest.segments >= LARGE_SEGMENTS
    partners, splits = POLISH_LARGE if large else POLISH_MANY if many else POLISH_FEW
    for _ in range(POLISH_ROUNDS):
        ranks = rank_time(best.time, judge.model)
        if not best.violation and (int(ranks.max()) - int(ranks.mean())) * 1000 <= best.time.step * WORTH_PER_MILLE:
            break
        idle = np.argsort(ranks, kind="stable")
        link = np.maximum(best.figures.rows_in, best.figures.rows_out)
        busy = dict.fromkeys((int(ranks.argmax()), int(best.figures.pairs.argmax()), int(link.argmax())))
        others = {slow: [rank for rank in idle[: partners + 1].tolist() if rank != slow][:partners] for slow in busy}
        pairs = {frozenset((slow, other)): (slow, other) for slow in busy for other in others[slow]}
        tries = [
            judge.candidate(best.name.removesuffix("+polish") + "+polish", best.survey, layout)
            for slow, other in pairs.values()
            for layout in _resplit(judge, best, slow, other, splits)
        ]
        better = min(tries, key=lambda c: c.key, default=best)
        if better.key >= best.key:
            break
        best = better
    return best


def _resplit(judge: _Judge, base: Candidate, one: int, other: int, splits: int) -> list[Layout]:
    """Layouts in which two ranks share their tokens in another way."""
    layout, world = base.layout, judge.world
    parts = [Pieces(*layout.pieces(rank)) for rank in range(world)]
    both = len(parts[one].start) + len(parts[other].start)
    most = max(2 * world - 1, len(layout.piece_rank)) - len(layout.piece_rank) + both
    together = join([parts[one], parts[other]])
    found = []
    for pair in split(base.survey, together, parts[one].tokens, (1, 1), judge.prices, judge.cap, splits, most):
        if any(np.array_equal(part.start, parts[one].start) for part in pair):
            continue  # as it is, or with the ranks swapped
        changed = list(parts)
        changed[one], changed[other] = pair
        found.append(layout_of(changed, judge.tokens))
    return found
