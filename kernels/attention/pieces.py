"""Visibility cut into pieces of consecutive rows whose visible interval moves by at most one row a row.

Row ``first + i`` of a piece, 0 <= i < length, sees ``[lo + lo_step * i, hi + hi_step * i)`` of the other axis, with
steps 0 or 1. A span of a run is a piece with steps 0, its diagonal has ``hi_step`` 1; a window moves lower ends.
Every row of a piece sees something, and the pieces of one row do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.ranges import expand


@dataclass(frozen=True)
class Pieces:
    """See the module's head. All int64 [pieces]."""

    first: np.ndarray
    length: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    lo_step: np.ndarray
    hi_step: np.ndarray

    def take(self, index) -> Pieces:
        return Pieces(*(part[index] for part in vars(self).values()))

    @property
    def last_lo(self) -> np.ndarray:
        """Lower end in a piece's last row."""
        return self.lo + self.lo_step * (self.length - 1)

    @property
    def last_hi(self) -> np.ndarray:
        """Upper end in a piece's last row: ``[lo, last_hi)`` is what any row of the piece sees."""
        return self.hi + self.hi_step * (self.length - 1)

    @property
    def pairs(self) -> np.ndarray:
        """Visible pairs of each piece."""
        return self.length * (self.hi - self.lo + self.last_hi - self.last_lo) // 2

    def by_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row (int64), lower and upper end (int32, for they are many) of every row of every piece."""
        step = expand(np.zeros_like(self.length), self.length).astype(np.int32)
        lo, hi = (
            np.repeat(first.astype(np.int32), self.length) + np.repeat(moves.astype(np.int32), self.length) * step
            for first, moves in ((self.lo, self.lo_step), (self.hi, self.hi_step))
        )
        return expand(self.first, self.length), lo, hi


def row_pieces(intervals: Intervals) -> Pieces:
    """Pieces of query rows over key rows: all spans by run, then all diagonals."""
    runs = np.arange(len(intervals.run_row))
    span_run = np.repeat(runs, np.diff(intervals.span_ptr))
    own = np.flatnonzero(intervals.diag_lo >= 0)
    # A first row whose diagonal is empty starts its piece later.
    skipped = np.maximum(intervals.diag_lo[own] + 1 - intervals.diag_hi[own], 0)
    run, drop = np.concatenate([span_run, own]), np.concatenate([np.zeros_like(span_run), skipped])
    lo_step = np.zeros_like(run)
    if intervals.slide is not None:
        # The first interval of a run: its first span, or its diagonal where it has no span.
        begins = np.concatenate([np.isin(np.arange(len(span_run)), intervals.span_ptr[:-1]), ~np.isin(own, span_run)])
        lo_step[begins & intervals.slide[run]] = 1
    pieces = Pieces(
        first=intervals.run_row[run] + drop,
        length=intervals.run_length[run] - drop,
        lo=np.concatenate([intervals.span_lo, intervals.diag_lo[own]]),
        hi=np.concatenate([intervals.span_hi, intervals.diag_hi[own] + skipped]),
        lo_step=lo_step,
        hi_step=np.repeat([0, 1], [len(span_run), len(own)]),
    )
    return pieces.take((pieces.length > 0) & (pieces.hi > pieces.lo))


def transposed(pieces: Pieces) -> Pieces:
    """The same pairs, seen from the other axis.

    Its row k is seen by ``i <= k - lo`` where the lower end moves and by ``i > k - hi`` where the upper end does. So
    the visible rows start to shrink from below at ``hi``, and have stopped growing at ``lo + length - 1``.
    """
    end = pieces.last_hi
    shrinks = np.where(pieces.hi_step == 1, pieces.hi, end)
    grown = np.minimum(pieces.last_lo, end)
    cuts = np.stack([pieces.lo, np.minimum(shrinks, grown), np.maximum(shrinks, grown), end])
    start, length = cuts[:-1], np.diff(cuts, axis=0)
    lo_step, hi_step = (start >= shrinks).astype(np.int64), (start < grown).astype(np.int64)
    made = Pieces(
        first=start,
        length=length,
        lo=pieces.first + lo_step * (start - pieces.hi + 1),
        hi=pieces.first + np.where(hi_step == 1, start - pieces.lo + 1, pieces.length),
        lo_step=lo_step,
        hi_step=hi_step,
    )
    return made.take(length > 0)


def tile_starts(rows: int, size: int, pieces: Pieces | None = None) -> np.ndarray:
    """First rows of tiles of at most ``size`` consecutive rows that hold all ``rows``.

    With ``pieces``, a row that sees at least ``size`` rows of the other axis more than the row before it starts a tile
    too. In a tree those are the first keys of trunks below which much hangs: if a tile began before one, all of it
    would be computed with the trunk's many query rows, and its keys would take a tile more than they fill.
    """
    begins = np.zeros(1, np.int64)
    if pieces is not None:
        more = np.zeros(rows + 1, np.int64)
        np.add.at(more, pieces.first, pieces.hi - pieces.lo)
        np.subtract.at(more, pieces.first + pieces.length, pieces.last_hi - pieces.last_lo)
        begins = np.union1d(begins, np.flatnonzero(more[:rows] >= size))
    count = -(-np.diff(np.append(begins, rows)) // size)
    return np.repeat(begins, count) + size * expand(np.zeros_like(count), count)


def cut(pieces: Pieces, starts: np.ndarray) -> tuple[Pieces, np.ndarray]:
    """Cut pieces where tiles start; also the tile of each part, ascending."""
    first_tile = np.searchsorted(starts, pieces.first, side="right") - 1
    parts = np.searchsorted(starts, pieces.first + pieces.length) - first_tile
    which = np.repeat(np.arange(len(parts)), parts)
    tile = expand(first_tile, parts)
    order = np.argsort(tile, kind="stable")
    which, tile = which[order], tile[order]
    whole = pieces.take(which)
    end = whole.first + whole.length
    first = np.maximum(whole.first, starts[tile])
    length = np.minimum(end, np.append(starts[1:], end.max(initial=0))[tile]) - first
    moved = first - whole.first
    lo, hi = whole.lo + whole.lo_step * moved, whole.hi + whole.hi_step * moved
    return Pieces(first, length, lo, hi, whole.lo_step, whole.hi_step), tile
