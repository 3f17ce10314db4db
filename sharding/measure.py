"""What a layout costs each rank, counted: tokens, pairs, kernel tiles, rows moved, recurrent states moved.

Everything is counted exactly, for all ranks at once, with no loop over tokens, tiles or ranks.

Shapes: T tokens, S segments, P ranks, N pieces. A *keyed* token of rank r is ``r * (T + 1) + token``, so that one
sorted array holds the intervals of all ranks and those of two ranks never touch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cp_engine.sharding.forest import Forest
from cp_engine.sharding.intervals import path_spans
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.recurrent_figures import RecurrentFigures, recurrent_figures, sum_by

TILE = 128  # query rows and key rows of one attention tile
CHUNK = 64  # tokens of one recurrent chunk


@dataclass(frozen=True, eq=False)
class Figures:
    """Counts of one layout, one entry a rank; int64 [P]."""

    tokens: np.ndarray
    pieces: np.ndarray
    pairs: np.ndarray  # visible (query, key) pairs
    tiles: np.ndarray  # 128 x 128 attention tiles with a visible pair, in local query and gathered key rows
    rows_in: np.ndarray  # visible rows of other ranks
    rows_out: np.ndarray  # own rows that other ranks see, counted once for each of them
    recurrent: RecurrentFigures | None  # None where nobody asked
    windowed: Figures | None = None  # of a layer with a sliding window, see `windowed_figures`

    @property
    def crowded(self) -> int:
        """Pieces beyond fewer than two a rank in the mean."""
        return max(0, int(self.pieces.sum()) - 2 * len(self.pieces) + 1)

    @property
    def busiest_rows(self) -> int:
        """Rows of the busiest link: the larger of most rows in and most rows out."""
        return int(max(self.rows_in.max(), self.rows_out.max()))


class Survey:
    """Tables of a forest from which layouts are measured."""

    def __init__(self, forest: Forest):
        self.forest = forest
        length = forest.segment_length
        self.start, self.depth = forest.segment_start, forest.depth
        pairs = length * forest.depth + length * (length + 1) // 2
        self.pairs_above = np.concatenate([[0], np.cumsum(pairs)])
        self.head_start = forest.segment_start[forest.chain_head]

    @cached_property
    def chunks_above(self) -> np.ndarray:
        """int64 [S + 1]: recurrent chunks of all segments before each one."""
        return np.concatenate([[0], np.cumsum(-(-self.forest.segment_length // CHUNK))])

    @cached_property
    def tiles_above(self) -> np.ndarray:
        """int64 [ceil(T / 128) + 1]: tiles of the 128-row query tiles before each one, all on one rank.

        A layout moves the tile grid, but the tiles of a token's neighbourhood stay about the same.
        """
        whole = contiguous_layout(self.forest, 1)
        _, count = _tiles(self, whole, *_key_sets(self, whole))
        return np.concatenate([[0], np.cumsum(count)])

    def segment(self, token: np.ndarray) -> np.ndarray:
        """Segment of each token; the last segment for T."""
        found = np.searchsorted(self.start, token, side="right") - 1
        return np.minimum(found, self.forest.segments - 1)

    # The measures of all tokens before each one; tokens may be T. Their segments are looked up where not given.

    def tiles_before(self, token: np.ndarray, segment: np.ndarray | None = None) -> np.ndarray:
        """Estimated attention tiles."""
        tile = token // TILE
        above = self.tiles_above
        step = above[np.minimum(tile + 1, len(above) - 1)] - above[tile]
        return above[tile] + (token - TILE * tile) * step // TILE

    def chunks_before(self, token: np.ndarray, segment: np.ndarray | None = None) -> np.ndarray:
        """Recurrent chunks, were the forest cut there."""
        segment = self.segment(token) if segment is None else segment
        return self.chunks_above[segment] - (self.start[segment] - token) // CHUNK

    def pairs_before(self, token: np.ndarray, segment: np.ndarray | None = None) -> np.ndarray:
        """Visible pairs."""
        segment = self.segment(token) if segment is None else segment
        m = token - self.start[segment]
        return self.pairs_above[segment] + m * self.depth[segment] + m * (m + 1) // 2

    def window_pairs_before(self, token: np.ndarray, window: int) -> np.ndarray:
        """Pairs that a layer with a sliding window sees."""
        depth = self.forest.depth
        ends = depth + self.forest.segment_length
        above = np.concatenate([[0], np.cumsum(window_pairs(ends, window) - window_pairs(depth, window))])
        segment = self.segment(token)
        ends = depth[segment] + token - self.start[segment]
        return above[segment] + window_pairs(ends, window) - window_pairs(depth[segment], window)

    def depth_of(self, token: np.ndarray, segment: np.ndarray | None = None) -> np.ndarray:
        """Tokens above each token."""
        segment = self.segment(token) if segment is None else segment
        return self.depth[segment] + token - self.start[segment]

    def visible(self, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the rows of each range [start, end) see, as (index of the range, lo, hi); spans may overlap.

        An ancestor of a token inside a range is inside it too, or an ancestor of the range's first token.
        """
        segment = self.segment(start)
        which, lo, hi = path_spans(self.forest, segment)
        index = np.arange(len(start))
        return (
            np.concatenate([index, which]),
            np.concatenate([self.head_start[segment], lo]),
            np.concatenate([end, hi]),
        )


def union(lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint ascending intervals that cover the same points as the intervals [lo, hi)."""
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], np.maximum.accumulate(hi[order])
    opens = np.ones(len(lo), bool)
    opens[1:] = lo[1:] > hi[:-1]
    return lo[opens], hi[np.append(opens[1:], True)] if len(lo) else hi


class _KeyedSet:
    """A sorted disjoint set of keyed intervals, and the index of its points inside their rank."""

    def __init__(self, lo: np.ndarray, hi: np.ndarray, span: int, world: int):
        self.lo, self.hi = lo, hi
        length = hi - lo
        self.before = np.cumsum(length) - length
        self.count = np.bincount(lo // span, length, world).astype(np.int64)
        self.first = np.cumsum(self.count) - self.count

    def below(self, keyed: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Points of each rank's part below a keyed token."""
        at = np.searchsorted(self.lo, keyed, side="right") - 1
        safe = np.maximum(at, 0)
        inside = self.before[safe] + np.minimum(keyed, self.hi[safe]) - self.lo[safe]
        return np.where(at >= 0, inside, 0) - self.first[rank]


def window_pairs(length: np.ndarray, window: int) -> np.ndarray:
    """Pairs of the first ``length`` rows of a path, of which each sees its last ``window`` tokens, itself included."""
    growing = np.minimum(length, window)
    return growing * (growing + 1) // 2 + (length - growing) * window


def window_tiles(tiles: np.ndarray, tokens: np.ndarray, pairs: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Estimated tiles of a layer whose window leaves ``seen`` of the pairs: as many of the tiles, and one more a query
    tile, since the window's far end cuts tiles too."""
    share = (seen << 20) // np.maximum(1, pairs)
    return np.minimum(tiles, (tiles * share >> 20) + -(-tokens // TILE))


def windowed_figures(survey: Survey, layout: Layout, figures: Figures, window: int) -> Figures:
    """Counts of a layer with a sliding window: pairs exactly, tiles by `window_tiles`, rows as on a chain, where the
    first row of each piece fetches the rest of its window; rows go out in the proportion in which they come in."""
    seen = sum_by(layout.piece_rank, np.diff(survey.window_pairs_before(layout.piece_start, window)), layout.world)
    rows_in = np.minimum(figures.rows_in, figures.pieces * (window - 1))
    return replace(
        figures,
        pairs=seen,
        tiles=window_tiles(figures.tiles, figures.tokens, figures.pairs, seen),
        rows_in=rows_in,
        rows_out=figures.rows_out * rows_in.sum() // max(1, figures.rows_in.sum()),
    )


def whole_tiles(survey: Survey, figures: Figures) -> int:
    """Tiles of the whole forest on one rank, in a layer that sees the pairs of ``figures``."""
    tiles, tokens, pairs = (np.array(x) for x in (survey.tiles_above[-1], survey.forest.tokens, survey.pairs_above[-1]))
    return int(window_tiles(tiles, tokens, pairs, figures.pairs.sum()))


def windowed_rows(rows: np.ndarray, figures: Figures) -> np.ndarray:
    """int64 [P, P]: of the `traffic` of a layer without a window, what one with a window moves; each reader's share of
    every owner's rows alike."""
    return rows * figures.windowed.rows_in[:, None] // np.maximum(1, figures.rows_in)[:, None]


def measure(survey: Survey, layout: Layout, recurrent: bool = True, window: int | None = None) -> Figures:
    """Count everything that the cost model prices.

    Args:
        recurrent: count for recurrent layers too.
        window: tokens that a row of a sliding-window layer sees; None for a model without such layers.
    """
    world, rank = layout.world, layout.piece_rank
    keys, own = _key_sets(survey, layout)
    tile_rank, tiles = _tiles(survey, layout, keys, own)
    found = Figures(
        tokens=own.count,
        pieces=np.bincount(rank, minlength=world),
        pairs=sum_by(rank, np.diff(survey.pairs_before(layout.piece_start)), world),
        tiles=sum_by(tile_rank, tiles, world),
        rows_in=keys.count - own.count,
        rows_out=_traffic(keys, layout).sum(0) - own.count,
        recurrent=_recurrent(survey, layout) if recurrent else None,
    )
    return found if window is None else replace(found, windowed=windowed_figures(survey, layout, found, window))


def measure_recurrent(survey: Survey, layout: Layout) -> tuple[np.ndarray, RecurrentFigures]:
    """Tokens of each rank, int64 [P], and the counts of recurrent layers: what `measure` says of them, alone."""
    return layout.rank_token_count, _recurrent(survey, layout)


def rows_moved(before: Layout, after: Layout) -> np.ndarray:
    """int64 [P, P]: tokens that each rank (first axis) owns in ``after`` and each rank (second axis) in ``before``."""
    cut = np.union1d(before.piece_start, after.piece_start)
    owners = [
        layout.piece_rank[np.searchsorted(layout.piece_start, cut[:-1], side="right") - 1] for layout in (after, before)
    ]
    rows = np.zeros((before.world, before.world), np.int64)
    np.add.at(rows, tuple(owners), np.diff(cut))
    return rows


def _key_sets(survey: Survey, layout: Layout) -> tuple[_KeyedSet, _KeyedSet]:
    """The tokens that each rank sees, and those that it owns."""
    span, world, rank = layout.tokens + 1, layout.world, layout.piece_rank
    start, end = layout.piece_start[:-1], layout.piece_start[1:]
    which, lo, hi = survey.visible(start, end)
    keys = _KeyedSet(*union(rank[which] * span + lo, rank[which] * span + hi), span, world)
    order = np.argsort(rank, kind="stable")
    return keys, _KeyedSet((rank * span + start)[order], (rank * span + end)[order], span, world)


def traffic(survey: Survey, layout: Layout) -> np.ndarray:
    """int64 [P, P]: rows of owner o (column) that reader r (row) sees; the diagonal holds each rank's own rows."""
    return _traffic(_key_sets(survey, layout)[0], layout)


def between_ranks(survey: Survey, layout: Layout) -> np.ndarray:
    """`traffic` without what stays: 0 on the diagonal."""
    rows = traffic(survey, layout)
    np.fill_diagonal(rows, 0)
    return rows


def _traffic(keys: _KeyedSet, layout: Layout) -> np.ndarray:
    reader = np.arange(layout.world)[:, None]
    seen = np.diff(keys.below(reader * (layout.tokens + 1) + layout.piece_start, reader), axis=1)
    rows = np.zeros((layout.world, layout.world), np.int64)
    np.add.at(rows.T, layout.piece_rank, seen.T)
    return rows


def _tiles(survey: Survey, layout: Layout, keys: _KeyedSet, own: _KeyedSet) -> tuple[np.ndarray, np.ndarray]:
    """Rank of each query tile, and its attention tiles that hold a visible pair.

    A query tile is cut at piece borders into ranges; the union of what these see, in gathered key rows, is counted in
    key tiles.
    """
    world, tokens = layout.world, layout.tokens
    rank_tiles = -(-own.count // TILE)
    tile_rank = np.repeat(np.arange(world), rank_tiles)
    first_tile = np.cumsum(rank_tiles) - rank_tiles
    tile_row = own.first[tile_rank] + TILE * (np.arange(len(tile_rank)) - first_tile[tile_rank])
    # Rows of all ranks one after the other; `own.before` are the rows at which pieces begin.
    row = np.union1d(tile_row, own.before)
    piece = np.searchsorted(own.before, row, side="right") - 1
    tile = np.searchsorted(tile_row, row, side="right") - 1
    span = tokens + 1
    begin = own.lo[piece] % span + row - own.before[piece]
    length = np.diff(np.append(row, tokens))
    which, lo, hi = survey.visible(begin, begin + length)
    tile, rank = tile[which], tile_rank[tile[which]]
    lo = keys.below(rank * span + lo, rank) // TILE
    hi = (keys.below(rank * span + hi, rank) - 1) // TILE + 1
    columns = tokens // TILE + 2
    lo, hi = union(tile * columns + lo, tile * columns + hi)
    return tile_rank, sum_by(lo // columns, hi - lo, len(tile_rank))


def _recurrent(survey: Survey, layout: Layout) -> RecurrentFigures:
    """Counts of the fragments, entries and exits that `gdn_plan` makes."""
    start, rank, parent = _fragments(survey, layout)
    return recurrent_figures(-(-np.diff(start) // CHUNK), rank, parent, layout.world)


def _fragments(survey: Survey, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token borders [F + 1], rank [F] and parent or -1 [F] of all ranks' fragments, in depth-first order."""
    begin, first = layout.piece_start, survey.start
    segment = survey.segment(begin[:-1])
    cut = begin[:-1][begin[:-1] > first[segment]]  # pieces that begin inside a segment
    before = np.searchsorted(cut, first)  # cuts before each segment
    place = np.arange(len(first)) + before
    start = np.insert(first, np.searchsorted(first, cut), cut)
    up = survey.forest.parent
    parent = np.arange(-1, len(start) - 2)
    parent[place[:-1]] = np.where(up >= 0, place[up + 1] - 1, -1)
    rank = np.repeat(layout.piece_rank, np.diff(np.searchsorted(start, begin)))
    return start, rank, parent
