"""Visibility as calls of a dense variable-length kernel: causal sequences on the diagonals, full rectangles above them.

A span that consecutive runs share is one rectangle: in depth-first order all leaves below a trunk are consecutive, and
their common span is the trunk. Rectangle j of a run is its j-th span, so that no query row occurs twice in a call.

Shapes: Nq query rows, Nk key rows, B sequences of a call, R its query rows, K its key rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.ranges import expand, without_overlap

# FA4 compiles another kernel for more than 256 sequences: longer lists are cut.
MOST_SEQUENCES = 256


@dataclass(frozen=True, eq=False)
class Call:
    """One variable-length call. Sequence b is query rows ``row_ends[b] .. row_ends[b + 1]`` of the taken rows against
    keys ``key_ends[b] ..`` of the taken keys; if ``causal``, its last row sees all of its keys, the one before all but
    the last, and so on."""

    causal: bool
    rows: slice | torch.Tensor  # query rows, none twice: a range or int64 [R]
    keys: slice | torch.Tensor  # key rows, those of several sequences may repeat: a range or int64 [K]
    row_ends: torch.Tensor  # int32 [B + 1]
    key_ends: torch.Tensor  # int32 [B + 1]
    longest_rows: int
    longest_keys: int
    # How gradients of the taken keys are added: (positions in the taken keys, key rows), no key row twice in a pair.
    sums: tuple[tuple[slice | torch.Tensor, slice | torch.Tensor], ...]


@dataclass(frozen=True)
class _Sequences:
    """Int64 [B] each: query rows [row, row + rows) against key rows [key, key + keys)."""

    row: np.ndarray
    rows: np.ndarray
    key: np.ndarray
    keys: np.ndarray

    def take(self, index) -> _Sequences:
        return _Sequences(*(part[index] for part in vars(self).values()))


def call_list(intervals: Intervals) -> tuple[Call, ...]:
    """All calls, diagonals first, planned at the first call with these intervals; their tensors on the host."""
    return intervals.prepared("rectangles", _build)


def calls_on_device(intervals: Intervals) -> tuple[Call, ...]:
    """`call_list`, its tensors on the device of the calls."""
    return intervals.on_device("rectangles", _build)


def _build(intervals: Intervals) -> tuple[Call, ...]:
    own = _diagonals(intervals)
    groups = [(True, own)] if len(own.row) else []
    groups += [(False, level) for level in _levels(intervals)]
    return tuple(
        _call(causal, group.take(slice(first, first + MOST_SEQUENCES)))
        for causal, group in groups
        for first in range(0, len(group.row), MOST_SEQUENCES)
    )


def _diagonals(intervals: Intervals) -> _Sequences:
    """Each run against its diagonal. A last row that sees all keys is what the kernel's causal mask means."""
    run = np.flatnonzero(intervals.diag_lo >= 0)
    lo, hi, length = intervals.diag_lo[run], intervals.diag_hi[run], intervals.run_length[run]
    skipped = np.maximum(lo + 1 - hi, 0)  # first rows whose diagonal is empty
    made = _Sequences(intervals.run_row[run] + skipped, length - skipped, lo, hi + length - 1 - lo)
    return made.take(made.rows > 0)


def _levels(intervals: Intervals) -> list[_Sequences]:
    """The rectangles by the number of their span in its run, runs next to each other merged where they share it."""
    run = np.repeat(np.arange(len(intervals.run_row)), np.diff(intervals.span_ptr))
    seen = intervals.span_hi > intervals.span_lo
    run, lo, hi = run[seen], intervals.span_lo[seen], intervals.span_hi[seen]
    place = np.arange(len(run)) - np.searchsorted(run, run)
    levels = []
    for level in range(int(place.max(initial=-1)) + 1):
        here = place == level
        first, rows = intervals.run_row[run[here]], intervals.run_length[run[here]]
        here_lo, here_hi = lo[here], hi[here]
        opens = np.ones(len(first), bool)
        opens[1:] = (here_lo[1:] != here_lo[:-1]) | (here_hi[1:] != here_hi[:-1]) | (first[1:] != (first + rows)[:-1])
        start = np.flatnonzero(opens)
        levels.append(
            _Sequences(first[start], np.add.reduceat(rows, start), here_lo[start], here_hi[start] - here_lo[start])
        )
    return levels


def _call(causal: bool, made: _Sequences) -> Call:
    packed = np.cumsum(made.keys) - made.keys
    turn = without_overlap(made.key, made.key + made.keys)
    sums = []
    for index in range(int(turn.max(initial=-1)) + 1):
        now = turn == index
        sums.append(tuple(_taken(start[now], made.keys[now]) for start in (packed, made.key)))

    def ends(lengths: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32)

    return Call(
        causal,
        rows=_taken(made.row, made.rows),
        keys=_taken(made.key, made.keys),
        row_ends=ends(made.rows),
        key_ends=ends(made.keys),
        longest_rows=int(made.rows.max()),
        longest_keys=int(made.keys.max()),
        sums=tuple(sums),
    )


def _taken(start: np.ndarray, length: np.ndarray) -> slice | torch.Tensor:
    """Ranges one after another: a slice where they are one range, else int64 indices."""
    if (start[1:] == (start + length)[:-1]).all():
        return slice(int(start[0]), int(start[-1] + length[-1]))
    return torch.as_tensor(expand(start, length))
