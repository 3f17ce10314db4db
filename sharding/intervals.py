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
    """

    rows: int  # n
    run_row: np.ndarray  # int64 [U] first query row of each run
    run_length: np.ndarray  # int64 [U]
    span_ptr: np.ndarray  # int64 [U + 1] spans of run u are span_ptr[u] .. span_ptr[u + 1]
    span_lo: np.ndarray  # int64 [E]
    span_hi: np.ndarray  # int64 [E]
    diag_lo: np.ndarray  # int64 [U]
    diag_hi: np.ndarray  # int64 [U] end of the first row's diagonal

    def of_row(self, row: int) -> list[tuple[int, int]]:
        """The intervals of one query row, ascending: for tests and for reading."""
        run = int(np.searchsorted(self.run_row, row, side="right")) - 1
        if run < 0 or row - self.run_row[run] >= self.run_length[run]:
            return []
        span = slice(int(self.span_ptr[run]), int(self.span_ptr[run + 1]))
        found = list(zip(self.span_lo[span].tolist(), self.span_hi[span].tolist(), strict=True))
        if self.diag_lo[run] >= 0:
            found.append((int(self.diag_lo[run]), int(self.diag_hi[run] + row - self.run_row[run])))
        return found

    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        lengths, spans = self.run_length, self.span_hi - self.span_lo
        total = int((np.repeat(lengths, np.diff(self.span_ptr)) * spans).sum())
        has = self.diag_lo >= 0
        first, rows = (self.diag_hi - self.diag_lo)[has], lengths[has]
        return total + int((rows * first + rows * (rows - 1) // 2).sum())

    def on_keys(self, keys: np.ndarray) -> RowIntervals:
        """The same visibility over the ascending token subset ``keys``: coordinates become indices into it.

        An interval of tokens meets a sorted subset in one interval of indices. A run's diagonal tokens are either
        all in the subset or none of them are. A span that touches the diagonal there becomes a part of it.
        """
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
        )


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


def visible_intervals(forest: Forest, layout: Layout, rank: int) -> RowIntervals:
    """Visible intervals of a rank's rows, in token coordinates."""
    start, end = layout.pieces(rank)
    light = np.flatnonzero(forest.chain_head == np.arange(forest.segments))
    heads = forest.segment_start[light]
    inside = heads[layout.owner[heads] == rank] if forest.tokens else heads
    run_token = np.union1d(start, inside)
    bounds = np.union1d(run_token, end)
    run_end = bounds[np.searchsorted(bounds, run_token, side="right")] if len(run_token) else run_token
    segment = forest.segment_of[run_token]
    which, lo, hi = path_spans(forest, segment)
    return RowIntervals(
        rows=int(layout.rank_rows[rank]),
        run_row=layout.local_row[run_token],
        run_length=run_end - run_token,
        span_ptr=np.searchsorted(which, np.arange(len(run_token) + 1)),
        span_lo=lo,
        span_hi=hi,
        diag_lo=forest.segment_start[forest.chain_head[segment]],
        diag_hi=run_token + 1,
    )


def visible_tokens(forest: Forest, layout: Layout, rank: int) -> np.ndarray:
    """Ascending tokens that any row of a rank sees: its pieces and the paths of their first tokens.

    An ancestor of a token inside a piece is inside the piece too, or an ancestor of the piece's first token.
    """
    start, end = layout.pieces(rank)
    segment = forest.segment_of[start]
    _, lo, hi = path_spans(forest, segment)
    lo = np.concatenate([lo, forest.segment_start[forest.chain_head[segment]]])
    hi = np.concatenate([hi, end])
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], hi[order]
    reach = np.maximum.accumulate(hi) if len(hi) else hi
    from_ = np.maximum(lo, np.concatenate([[0], reach[:-1]])) if len(lo) else lo
    keep = reach > from_
    return expand_ranges(from_[keep], (reach - from_)[keep])
