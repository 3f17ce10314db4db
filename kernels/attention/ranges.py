"""Sets of integer ranges ``[lo[i], hi[i])``, in numpy."""

from __future__ import annotations

import numpy as np


def expand(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenation of ``arange(start[i], start[i] + length[i])``."""
    offset = np.cumsum(length) - length
    return np.arange(int(length.sum())) + np.repeat(start - offset, length)


def union(lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Union of ranges as ascending ranges that do not touch; empty ranges are dropped."""
    lo, hi = lo[hi > lo], hi[hi > lo]
    order = np.argsort(lo, kind="stable")
    lo, reach = lo[order], np.maximum.accumulate(hi[order])
    opens = np.ones(len(lo), bool)
    opens[1:] = lo[1:] > reach[:-1]
    return lo[opens], reach[np.append(opens[1:], True)[: len(lo)]]


def without_overlap(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """A colour for each range so that ranges of one colour do not overlap; as few colours as possible."""
    colour = np.zeros(len(lo), np.int64)
    ends: list[int] = []  # of the last range of each colour
    for index in np.argsort(lo, kind="stable").tolist():
        start, end = int(lo[index]), int(hi[index])
        free = next((c for c, reached in enumerate(ends) if reached <= start), len(ends))
        if free == len(ends):
            ends.append(end)
        ends[free] = end
        colour[index] = free
    return colour
