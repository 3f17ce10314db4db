"""Splitting pieces between two rank groups so that tokens are exact and attention pairs are equal, or nearly so.

The pieces, in ascending order, close to a circle. An arc with one group's tokens, slid once round it, holds on average
exactly that group's share of pairs, so somewhere it holds exactly that share. Halving recursively (`chord_layout`)
gives every forest and rank count a layout of at most ``2P - 1`` pieces with a token spread of at most 1.

Shapes: T tokens, P ranks, m pieces of a circle of N tokens, U candidate arcs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_engine.sharding.forest import expand_ranges
from cp_engine.sharding.layer_time import SplitPrices
from cp_engine.sharding.layout import Layout, layout_from_cuts
from cp_engine.sharding.measure import Survey, union

ROUGHLY_SCORED = 512  # arcs that start at a break and are scored, of each kind, where there are more
EXACTLY_SCORED = 8  # candidates whose remote rows are counted exactly, not by the depth of piece starts


@dataclass(frozen=True, eq=False)
class Pieces:
    """Disjoint token ranges in ascending order that do not touch: int64 [m] each."""

    start: np.ndarray
    end: np.ndarray

    @property
    def tokens(self) -> int:
        return int((self.end - self.start).sum())


def join(parts: list[Pieces]) -> Pieces:
    """All pieces as one set; ranges that touch become one."""
    return Pieces(*union(np.concatenate([p.start for p in parts]), np.concatenate([p.end for p in parts])))


def layout_of(parts: list[Pieces], tokens: int) -> Layout:
    """The layout in which rank r owns ``parts[r]``; the parts cover [0, tokens)."""
    start = np.concatenate([p.start for p in parts])
    rank = np.repeat(np.arange(len(parts)), [len(p.start) for p in parts])
    order = np.argsort(start)
    return layout_from_cuts(np.append(start[order], tokens), rank[order], len(parts))


@dataclass(frozen=True, eq=False)
class Place:
    """Where some points of a circle lie: int64 [U] each."""

    turn: np.ndarray  # whole turns before the point
    piece: np.ndarray
    at_start: np.ndarray  # bool: the point is the first of its piece
    token: np.ndarray
    segment: np.ndarray


class Circle:
    """The circle of some pieces; points are token counts along it, up to two turns."""

    def __init__(self, survey: Survey, pieces: Pieces):
        self.survey, self.pieces = survey, pieces
        length = pieces.end - pieces.start
        self.offset = np.cumsum(length) - length
        self.tokens = int(length.sum())
        self._ends = tuple((token, survey.segment(token)) for token in (pieces.start, pieces.end))
        self.depth_sum = np.concatenate([[0], np.cumsum(survey.depth_of(*self._ends[0]))])

    def breaks(self) -> np.ndarray:
        """Ascending points at which a piece or a segment begins."""
        start = self.survey.start[:-1]
        low = np.searchsorted(start, self.pieces.start, side="right")
        count = np.searchsorted(start, self.pieces.end, side="left") - low
        shift = np.repeat(self.offset - self.pieces.start, count)
        return np.sort(np.concatenate([self.offset, start[expand_ranges(low, count)] + shift]), kind="stable")

    def place(self, point: np.ndarray) -> Place:
        turn, point = np.divmod(point, self.tokens)
        piece = np.searchsorted(self.offset, point, side="right") - 1
        into = point - self.offset[piece]
        token = self.pieces.start[piece] + into
        return Place(turn, piece, into == 0, token, self.survey.segment(token))

    def held(self, before, low: Place, high: Place) -> tuple[np.ndarray, int]:
        """What each arc [low, high), at most one turn long, holds of a measure, and what all pieces hold.

        Args:
            before: the measure of all tokens before each token, given with its segment, as ``survey.pairs_before``.
        """
        at_start, at_end = (before(token, segment) for token, segment in self._ends)
        sums = np.cumsum(at_end - at_start)
        total = int(sums[-1])
        shift = sums - at_end

        def below(place: Place) -> np.ndarray:
            return place.turn * total + shift[place.piece] + before(place.token, place.segment)

        return below(high) - below(low), total

    def starts(self, low: Place, high: Place) -> tuple[np.ndarray, np.ndarray]:
        """Pieces of each arc [low, high), and the summed depth of their first tokens."""

        def until(place: Place, piece: np.ndarray):
            return place.turn * len(self.offset) + piece, place.turn * self.depth_sum[-1] + self.depth_sum[piece]

        count_low, depth_low = until(low, low.piece + 1)
        count_high, depth_high = until(high, high.piece + 1 - high.at_start)
        return 1 + count_high - count_low, self.survey.depth_of(low.token, low.segment) + depth_high - depth_low

    def arcs(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ranges of the arcs [low, high), each at most one turn long, as (index of the arc, start, end)."""
        length = self.pieces.end - self.pieces.start
        at = np.concatenate([self.offset, self.offset + self.tokens])
        begin = np.maximum(at, low[:, None]) - at
        stop = np.minimum(at + np.tile(length, 2), high[:, None]) - at
        arc, place = np.nonzero(stop > begin)
        start = self.pieces.start[place % len(length)]
        return arc, start + begin[arc, place], start + stop[arc, place]

    def cuts(self, low: np.ndarray, high: np.ndarray) -> list[Pieces]:
        """The pieces of each of some arcs [low, high), at most one turn long."""
        arc, start, end = self.arcs(low, high)
        order = np.lexsort((start, arc))
        start, end = start[order], end[order]
        bounds = np.searchsorted(arc, np.arange(len(low) + 1)).tolist()
        return [Pieces(start[a:b], end[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def split(
    survey: Survey,
    pieces: Pieces,
    tokens: int,
    ranks: tuple[int, int],
    prices: SplitPrices,
    cap: int | None = None,
    best: int = 1,
    most_pieces: int | None = None,
) -> list[tuple[Pieces, Pieces]]:
    """The best ways to give ``tokens`` of some pieces to a first group of ranks and the rest to a second one.

    Args:
        ranks: ranks of the two groups; pairs are shared in this proportion.
        cap: most pairs a rank may hold. None: shares as equal as integers allow, which always exists.
        best: how many splits to return, best first; fewer where there are fewer.
        most_pieces: pieces that both sides together may have; None for any number.
    """
    none = Pieces(np.empty(0, np.int64), np.empty(0, np.int64))
    if tokens in (0, pieces.tokens):
        return [(none, pieces) if tokens == 0 else (pieces, none)]
    circle = Circle(survey, pieces)
    point = _candidates(circle, tokens, ranks, cap)
    chosen = _score(circle, point, tokens, ranks, prices, most_pieces)[:best]
    begin, middle = point[chosen], point[chosen] + tokens
    sides = circle.cuts(np.concatenate([begin, middle]), np.concatenate([middle, begin + circle.tokens]))
    return list(zip(sides[: len(begin)], sides[len(begin) :], strict=True))


def _candidates(circle: Circle, tokens: int, ranks: tuple[int, int], cap: int | None):
    """int64 [U]: starts of admissible arcs, ascending and distinct.

    Both ends of an arc move with slope 1 in depth, so between neighbouring breaks of either end its pairs are linear.
    """
    first, second = ranks
    breaks = circle.breaks()
    at = _distinct(np.concatenate([breaks, (breaks - tokens) % circle.tokens]))
    pairs, total = circle.held(circle.survey.pairs_before, circle.place(at), circle.place(at + tokens))
    line = _Line(at, pairs, circle.tokens)
    # Scaled by the ranks, the exact share is an integer. Of the two points at a root the nearer one counts.
    scale = first + second
    share = total * first
    (below, pairs_below), (above, pairs_above) = line.crossings(share, scale)
    nearer = np.abs(scale * pairs_below - share) <= np.abs(scale * pairs_above - share)
    exact, pairs_exact = np.where(nearer, below, above), np.where(nearer, pairs_below, pairs_above)
    if not len(exact):  # tokens so few that their share is far from the ranks' share
        nearest = [np.argmin(np.abs(scale * pairs - share))]
        exact, pairs_exact = at[nearest], pairs[nearest]
    if cap is not None:
        low, high = total - second * cap, first * cap
        ends = [end for bound in (low, high) for end in line.crossings(bound)]
        edges, held = (np.concatenate(part) for part in zip((exact, pairs_exact), *ends, strict=True))
        edges = edges[(held >= low) & (held <= high)]
        level = at[(pairs >= low) & (pairs <= high)]
        point = np.concatenate([_shallow(circle, level, tokens), edges % circle.tokens])
        if len(point):
            return _distinct(point)
    return _distinct(exact % circle.tokens)


def _distinct(point: np.ndarray) -> np.ndarray:
    """Ascending distinct points. The parts of ``point`` are sorted already, which a stable sort makes use of."""
    point = np.sort(point, kind="stable")
    return point[np.append(True, point[1:] != point[:-1])] if len(point) else point


def _shallow(circle: Circle, point: np.ndarray, tokens: int) -> np.ndarray:
    """Those of many arcs whose two cuts have the fewest tokens above them, and as many at equal steps."""
    if len(point) <= 2 * ROUGHLY_SCORED:
        return point
    cuts = circle.place(point), circle.place(point + tokens)
    depth = sum(circle.survey.depth_of(place.token, place.segment) for place in cuts)
    keep = depth < np.partition(depth, ROUGHLY_SCORED)[ROUGHLY_SCORED]
    keep[:: len(point) // ROUGHLY_SCORED] = True
    return point[keep]


class _Line:
    """A closed piecewise linear function of the points of a circle, with integer slopes."""

    def __init__(self, at: np.ndarray, value: np.ndarray, tokens: int):
        self.at, self.value = at, value
        self.gap = np.diff(at, append=tokens)
        after = np.append(value[1:], value[:1])
        self.slope = (after - value) // self.gap
        self.least, self.most = np.minimum(value, after), np.maximum(value, after)

    def crossings(self, target: int, scale: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
        """Points just before and just after ``scale`` x the function crosses ``target``, each with its value there."""
        crosses = np.flatnonzero((scale * self.least <= target) & (scale * self.most >= target))
        at, value, slope, gap = (part[crosses] for part in (self.at, self.value, self.slope, self.gap))
        steep = scale * slope
        step = np.where(steep == 0, 0, (target - scale * value) // np.where(steep == 0, 1, steep))
        after = np.minimum(step + 1, gap)
        return [(at + step, value + slope * step), (at + after, value + slope * after)]


def _score(circle: Circle, point, tokens: int, ranks: tuple[int, int], prices: SplitPrices, most_pieces: int | None):
    """int64: indices of the most promising arcs, best first; ties go to the smaller start."""
    first, second = ranks
    begin, middle = circle.place(point), circle.place(point + tokens)
    end = replace(begin, turn=begin.turn + 1)
    slower = np.zeros(len(point), np.int64)
    for before, price in ((circle.survey.tiles_before, prices.tile), (circle.survey.chunks_before, prices.chunk)):
        if price:
            held, total = circle.held(before, begin, middle)
            slower += np.maximum(held // first, (total - held) // second) * price // 1000
    (count_a, rows_a), (count_b, rows_b) = circle.starts(begin, middle), circle.starts(middle, end)
    fixed = slower + np.maximum(count_a, count_b) * prices.piece
    rough = fixed + _row_price(rows_a, rows_b, prices)
    near = np.arange(len(point))
    if most_pieces is not None:
        near = near[count_a + count_b <= most_pieces]
    if len(near) > EXACTLY_SCORED:
        worst = np.partition(rough[near], EXACTLY_SCORED - 1)[EXACTLY_SCORED - 1]
        near = near[rough[near] <= worst]
        near = near[np.argsort(rough[near], kind="stable")][:EXACTLY_SCORED]
    rows = _remote_rows(circle, point[near], tokens)
    exact = fixed[near] + _row_price(rows[0::2], rows[1::2], prices)
    return near[np.lexsort((point[near], exact))]


def _row_price(rows_a: np.ndarray, rows_b: np.ndarray, prices: SplitPrices) -> np.ndarray:
    return (2 * np.maximum(rows_a, rows_b) + rows_a + rows_b) * prices.row // 2000


def _remote_rows(circle: Circle, point: np.ndarray, tokens: int) -> np.ndarray:
    """int64 [2 U]: rows that the first and the second side of each arc see without owning them."""
    span = int(circle.survey.start[-1]) + 1
    low = np.stack([point, point + tokens], 1).reshape(-1)
    high = np.stack([point + tokens, point + circle.tokens], 1).reshape(-1)
    side, start, end = circle.arcs(low, high)
    which, lo, hi = circle.survey.visible(start, end)
    lo, hi = union(side[which] * span + lo, side[which] * span + hi)
    seen = np.zeros(len(low), np.int64)
    np.add.at(seen, lo // span, hi - lo)
    return seen - (high - low)


def quotas(tokens: int, world: int) -> np.ndarray:
    """int64 [P]: tokens of each rank, which differ by one at most."""
    return np.diff(tokens * np.arange(world + 1) // world)


def halve(
    survey: Survey, pieces: Pieces, share: np.ndarray, prices: SplitPrices, cap: int | None = None
) -> list[Pieces]:
    """Pieces of each rank: rank groups are halved until one rank is left.

    Args:
        share: int64 [P] tokens of each rank.
        cap: most pairs a rank may hold, None for equal pairs. A group whose mean is under the cap can always be split.
    """
    world = len(share)
    if world == 1:
        return [pieces]
    first = world // 2
    parts = split(survey, pieces, int(share[:first].sum()), (first, world - first), prices, cap)[0]
    return halve(survey, parts[0], share[:first], prices, cap) + halve(survey, parts[1], share[first:], prices, cap)


def chord_layout(survey: Survey, world: int, prices: SplitPrices) -> Layout:
    """The layout of equal tokens and equal pairs that always exists: at most ``2P - 1`` pieces."""
    tokens = survey.forest.tokens
    return layout_of(halve(survey, whole_axis(tokens), quotas(tokens, world), prices), tokens)


def whole_axis(tokens: int) -> Pieces:
    """The one piece [0, T)."""
    return Pieces(np.zeros(1, np.int64), np.full(1, tokens, np.int64))
