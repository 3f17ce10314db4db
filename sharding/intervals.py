"""Visible keys of query rows, as intervals.

Rows are grouped into runs: consecutive rows of one rank that lie on one heavy path. All rows of a run see the same
full spans (the path above it) and, growing by one key a row, its own diagonal.

Shapes: n query rows, U runs, E spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest, expand_ranges
from cp_engine.sharding.layout import Layout


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """Row ``run_row[u] + i`` of run u sees the spans of u and ``[diag_lo[u], diag_hi[u] + i)``.

    Coordinates are key rows. ``diag_lo[u] == -1`` means that the run has no diagonal among these keys. Rows outside
    every run (the padding row) see nothing. Spans of a run ascend and do not touch each other or the diagonal.

    With a window the lower end of a run's first interval (its first span, else its diagonal) may move up by one key a
    row, as ``slide`` says; no row of the run finds that interval empty.
    """

    rows: int  # n
    run_row: np.ndarray  # int64 [U] first query row of each run
    run_length: np.ndarray  # int64 [U]
    span_ptr: np.ndarray  # int64 [U + 1] spans of run u are span_ptr[u] .. span_ptr[u + 1]
    span_lo: np.ndarray  # int64 [E]
    span_hi: np.ndarray  # int64 [E]
    diag_lo: np.ndarray  # int64 [U]
    diag_hi: np.ndarray  # int64 [U] end of the first row's diagonal
    slide: np.ndarray | None = None  # bool [U] whether the lower end moves; None: there is no window

    def of_row(self, row: int) -> list[tuple[int, int]]:
        """The intervals of one query row, ascending: for tests and for reading."""
        run = int(np.searchsorted(self.run_row, row, side="right")) - 1
        if run < 0 or row - self.run_row[run] >= self.run_length[run]:
            return []
        span = slice(int(self.span_ptr[run]), int(self.span_ptr[run + 1]))
        found = list(zip(self.span_lo[span].tolist(), self.span_hi[span].tolist(), strict=True))
        if self.diag_lo[run] >= 0:
            found.append((int(self.diag_lo[run]), int(self.diag_hi[run] + row - self.run_row[run])))
        if self.slide is not None and self.slide[run]:
            found[0] = (found[0][0] + int(row - self.run_row[run]), found[0][1])
        return found

    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        lengths, spans = self.run_length, self.span_hi - self.span_lo
        total = int((np.repeat(lengths, np.diff(self.span_ptr)) * spans).sum())
        has = self.diag_lo >= 0
        first, rows = (self.diag_hi - self.diag_lo)[has], lengths[has]
        total += int((rows * first + rows * (rows - 1) // 2).sum())
        if self.slide is not None:
            total -= int((lengths * (lengths - 1) // 2)[self.slide].sum())
        return total

    def on_keys(self, keys: np.ndarray) -> RowIntervals:
        """The same visibility over the ascending token subset ``keys``: coordinates become indices into it.

        An interval of tokens meets a sorted subset in one interval of indices. A run's diagonal tokens are either
        all in the subset or none of them are. A span that touches the diagonal there becomes a part of it. A moving
        lower end moves in the subset only where it meets kept tokens, so runs are cut where that changes.
        """
        if self.slide is not None:
            return self._cut_at_gaps(keys)._on_keys(keys)
        return self._on_keys(keys)

    def _on_keys(self, keys: np.ndarray) -> RowIntervals:
        lo, hi = np.searchsorted(keys, self.span_lo), np.searchsorted(keys, self.span_hi)
        run = np.repeat(np.arange(len(self.run_row)), np.diff(self.span_ptr))
        has = self.diag_lo >= 0
        # Split the diagonal into the span above the run's first token and the run's own tokens.
        own = np.where(has, self.diag_hi - 1, 0)
        above_lo, above_hi = np.searchsorted(keys, np.where(has, self.diag_lo, 0)), np.searchsorted(keys, own)
        present = has & (above_hi < len(keys))
        present[present] = keys[above_hi[present]] == own[present]
        gone = has & ~present
        run = np.concatenate([run, np.flatnonzero(gone)])
        lo, hi = np.concatenate([lo, above_lo[gone]]), np.concatenate([hi, above_hi[gone]])
        keep = hi > lo
        run, lo, hi = run[keep], lo[keep], hi[keep]
        order = np.lexsort((lo, run))
        run, lo, hi = _merge_touching(run[order], lo[order], hi[order])
        diag_lo = np.where(present, above_lo, -1)
        slide = self.slide
        if slide is not None:
            slide = slide & _contains(keys, self._first_lo())
        touches = present[run] & (hi == diag_lo[run])
        diag_lo[run[touches]] = lo[touches]
        run, lo, hi = run[~touches], lo[~touches], hi[~touches]
        return RowIntervals(
            rows=self.rows,
            run_row=self.run_row,
            run_length=self.run_length,
            span_ptr=np.searchsorted(run, np.arange(len(self.run_row) + 1)),
            span_lo=lo,
            span_hi=hi,
            diag_lo=diag_lo,
            diag_hi=np.where(present, above_hi + 1, -1),
            slide=slide,
        )

    def within_window(self, window: int) -> RowIntervals:
        """The last ``window`` keys of every row's path, itself included.

        The intervals must be whole paths in token coordinates. Row i of a run that has n keys in its first row loses
        the first ``n + i - window`` of them: runs are cut where this number passes the end of an interval.
        """
        spans = np.diff(self.span_ptr)
        run = np.repeat(np.arange(len(spans)), spans)
        ends = np.append(0, np.cumsum(self.span_hi - self.span_lo))
        through = ends[1:] - ends[self.span_ptr[:-1]][run]  # keys up to the end of each span of a run
        above = ends[self.span_ptr[1:]] - ends[self.span_ptr[:-1]]
        excess = above + self.diag_hi - self.diag_lo - window  # of the first row
        made = self._cut(
            np.concatenate([np.arange(len(spans)), run]),
            np.concatenate([-excess, through - excess[run]]),
        )
        # The same numbers for the parts, whose first rows lie further down.
        origin = np.searchsorted(self.run_row, made.run_row, side="right") - 1
        lost = np.maximum(excess[origin] + made.run_row - self.run_row[origin], 0)
        part = np.repeat(np.arange(len(origin)), np.diff(made.span_ptr))
        length = made.span_hi - made.span_lo
        ends = np.append(0, np.cumsum(length))
        before = ends[:-1] - ends[made.span_ptr[:-1]][part]
        keep = before + length > lost[part]
        return RowIntervals(
            rows=self.rows,
            run_row=made.run_row,
            run_length=made.run_length,
            span_ptr=np.searchsorted(part[keep], np.arange(len(origin) + 1)),
            span_lo=(made.span_lo + np.maximum(lost[part] - before, 0))[keep],
            span_hi=made.span_hi[keep],
            diag_lo=made.diag_lo + np.maximum(lost - above[origin], 0),
            diag_hi=made.diag_hi,
            slide=excess[origin] + made.run_row - self.run_row[origin] >= 0,
        )

    def _first_lo(self) -> np.ndarray:
        """Lower end of each run's first interval; -1 where it has none."""
        spans = np.diff(self.span_ptr) > 0
        first = self.diag_lo.copy()
        first[spans] = self.span_lo[self.span_ptr[:-1][spans]]
        return first

    def _cut(self, run: np.ndarray, offset: np.ndarray) -> RowIntervals:
        """Cut runs before their row ``offset``, where it lies inside them. Lower ends that move have moved by then."""
        inside = (offset > 0) & (offset < self.run_length[run])
        start = np.unique(np.concatenate([self.run_row, self.run_row[run[inside]] + offset[inside]]))
        origin = np.searchsorted(self.run_row, start, side="right") - 1
        passed = start - self.run_row[origin]
        end = np.minimum(np.append(start, self.rows)[1:], (self.run_row + self.run_length)[origin])
        spans = np.diff(self.span_ptr)[origin]
        span = expand_ranges(self.span_ptr[origin], spans)
        lo, diag_lo = self.span_lo[span], self.diag_lo[origin]
        ptr = np.append(0, np.cumsum(spans))
        if self.slide is not None:
            moved = np.where(self.slide[origin], passed, 0)
            has = spans > 0
            lo[ptr[:-1][has]] += moved[has]
            diag_lo = diag_lo + np.where(has, 0, moved)
        return RowIntervals(
            rows=self.rows,
            run_row=start,
            run_length=end - start,
            span_ptr=ptr,
            span_lo=lo,
            span_hi=self.span_hi[span],
            diag_lo=diag_lo,
            diag_hi=np.where(diag_lo >= 0, self.diag_hi[origin] + passed, -1),
            slide=None if self.slide is None else self.slide[origin],
        )

    def _cut_at_gaps(self, keys: np.ndarray) -> RowIntervals:
        """Cut runs where their moving lower end enters or leaves the kept tokens."""
        opens = np.flatnonzero(np.diff(keys, prepend=-2) != 1)
        closes = np.append(opens[1:], len(keys))[: len(opens)] - 1
        border = np.sort(np.concatenate([keys[opens], keys[closes] + 1]))
        run = np.flatnonzero(self.slide)
        first = self._first_lo()[run]
        begin = np.searchsorted(border, first, side="right")
        count = np.searchsorted(border, first + self.run_length[run]) - begin
        which = np.repeat(np.arange(len(run)), count)
        return self._cut(run[which], border[expand_ranges(begin, count)] - first[which])


def _contains(keys: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Whether each token is one of the ascending ``keys``."""
    place = np.searchsorted(keys, token)
    found = place < len(keys)
    found[found] = keys[place[found]] == token[found]
    return found


def _merge_touching(run: np.ndarray, lo: np.ndarray, hi: np.ndarray):
    """Join a run's spans where one ends and the next begins; both disappear between two kept key rows."""
    if not len(run):
        return run, lo, hi
    opens = np.ones(len(run), bool)
    opens[1:] = (run[1:] != run[:-1]) | (lo[1:] != hi[:-1])
    closes = np.append(opens[1:], True)
    return run[opens], lo[opens], hi[closes]


def path_spans(forest: Forest, segment: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Visible tokens strictly above the heavy path of each segment, as (index into ``segment``, lo, hi).

    Each light edge on the way to the root adds one span, so there are at most ``log2(T)`` for a segment.
    """
    index = np.arange(len(segment))
    current = forest.parent[forest.chain_head[segment]] if len(segment) else np.empty(0, np.int64)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while True:
        alive = current >= 0
        index, current = index[alive], current[alive]
        if not len(index):
            break
        head = forest.chain_head[current]
        found.append((index, forest.segment_start[head], forest.segment_start[current + 1]))
        current = forest.parent[head]
    if not found:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    which, lo, hi = (np.concatenate(part) for part in zip(*found, strict=True))
    order = np.lexsort((lo, which))
    return which[order], lo[order], hi[order]


def visible_intervals(forest: Forest, layout: Layout, rank: int, window: int | None = None) -> RowIntervals:
    """Visible intervals of a rank's rows, in token coordinates.

    Args:
        window: a row sees itself and the ``window - 1`` tokens before it on its path; None: its whole path.
    """
    start, end = layout.pieces(rank)
    light = np.flatnonzero(forest.chain_head == np.arange(forest.segments))
    heads = forest.segment_start[light]
    inside = heads[layout.owner[heads] == rank] if forest.tokens else heads
    run_token = np.union1d(start, inside)
    bounds = np.union1d(run_token, end)
    run_end = bounds[np.searchsorted(bounds, run_token, side="right")] if len(run_token) else run_token
    segment = forest.segment_of[run_token]
    which, lo, hi = path_spans(forest, segment)
    whole = RowIntervals(
        rows=int(layout.rank_rows[rank]),
        run_row=layout.local_row[run_token],
        run_length=run_end - run_token,
        span_ptr=np.searchsorted(which, np.arange(len(run_token) + 1)),
        span_lo=lo,
        span_hi=hi,
        diag_lo=forest.segment_start[forest.chain_head[segment]],
        diag_hi=run_token + 1,
    )
    return whole if window is None else whole.within_window(window)


def visible_tokens(forest: Forest, layout: Layout, rank: int, window: int | None = None) -> np.ndarray:
    """Ascending tokens that any row of a rank sees: its pieces and the paths of their first tokens.

    An ancestor of a token inside a piece is inside the piece too, or an ancestor of the piece's first token. With a
    window they are what the rank's runs see.
    """
    if window is None:
        start, end = layout.pieces(rank)
        segment = forest.segment_of[start]
        _, lo, hi = path_spans(forest, segment)
        lo = np.concatenate([lo, forest.segment_start[forest.chain_head[segment]]])
        hi = np.concatenate([hi, end])
    else:
        seen = visible_intervals(forest, layout, rank, window)
        lo = np.concatenate([seen.span_lo, seen.diag_lo])
        hi = np.concatenate([seen.span_hi, seen.diag_hi + seen.run_length - 1])
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], hi[order]
    reach = np.maximum.accumulate(hi) if len(hi) else hi
    from_ = np.maximum(lo, np.concatenate([[0], reach[:-1]])) if len(lo) else lo
    keep = reach > from_
    return expand_ranges(from_[keep], (reach - from_)[keep])
