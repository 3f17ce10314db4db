"""Which rank owns which tokens.

A layout cuts the depth-first axis of a forest into pieces, each owned by one rank. A rank's local rows are the tokens
of its pieces in ascending order. A rank without tokens carries one padding row that nothing refers to, because model
code cannot reshape zero rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_engine.sharding.forest import Forest, expand_ranges


@dataclass(frozen=True, eq=False)
class Layout:
    """Owners of the T tokens of a forest on P ranks. Pieces are in ascending order and cover [0, T)."""

    world: int
    piece_start: np.ndarray  # int64 [N + 1] token boundaries of the pieces
    piece_rank: np.ndarray  # int64 [N]

    @property
    def tokens(self) -> int:
        return int(self.piece_start[-1])

    @cached_property
    def owner(self) -> np.ndarray:
        """int64 [T]: the rank of each token."""
        return np.repeat(self.piece_rank, np.diff(self.piece_start))

    @cached_property
    def local_row(self) -> np.ndarray:
        """int64 [T]: row of each token on its owner."""
        row = np.empty(self.tokens, np.int64)
        for rank in range(self.world):
            tokens = self.rank_tokens(rank)
            row[tokens] = np.arange(len(tokens))
        return row

    @cached_property
    def rank_token_count(self) -> np.ndarray:
        """int64 [P]: tokens of each rank, padding rows not counted."""
        return np.bincount(self.piece_rank, np.diff(self.piece_start), self.world).astype(np.int64)

    @property
    def rank_rows(self) -> np.ndarray:
        """int64 [P]: rows of each rank, padding row included."""
        return np.maximum(self.rank_token_count, 1)

    def pieces(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and end tokens of a rank's pieces."""
        mine = np.flatnonzero(self.piece_rank == rank)
        return self.piece_start[mine], self.piece_start[mine + 1]

    def rank_tokens(self, rank: int) -> np.ndarray:
        """int64 [n]: tokens of a rank's rows, ascending."""
        start, end = self.pieces(rank)
        return expand_ranges(start, end - start)


def contiguous_layout(forest: Forest, world: int) -> Layout:
    """Equal contiguous ranges of the depth-first order: rank r owns [floor(rT/P), floor((r+1)T/P))."""
    if world < 1:
        raise ValueError(f"cp must be at least 1, got {world}")
    return layout_from_cuts(forest.tokens * np.arange(world + 1) // world, np.arange(world), world)


def rank_pairs(forest: Forest, layout: Layout) -> np.ndarray:
    """int64 [P]: visible (query, key) pairs of each rank's rows."""
    before = np.concatenate([[0], np.cumsum(forest.position + 1)])
    pairs = before[layout.piece_start[1:]] - before[layout.piece_start[:-1]]
    counts = np.zeros(layout.world, np.int64)
    np.add.at(counts, layout.piece_rank, pairs)
    return counts


def imbalance(per_rank: np.ndarray) -> float:
    """Maximum over mean; 1.0 is perfect. 1.0 as well where all ranks have nothing."""
    mean = float(np.mean(per_rank))
    return float(np.max(per_rank)) / mean if mean else 1.0


def layout_from_cuts(cuts: np.ndarray, ranks: np.ndarray, world: int) -> Layout:
    """Layout of the ranges between ``cuts`` [N + 1]; empty ranges are dropped, neighbours of one rank are joined."""
    cuts, ranks = np.asarray(cuts, np.int64), np.asarray(ranks, np.int64)
    if cuts[0] != 0 or (np.diff(cuts) < 0).any() or (ranks < 0).any() or (ranks >= world).any():
        raise ValueError(f"cuts must ascend from 0 and ranks lie in [0, {world}); got cuts {cuts}, ranks {ranks}")
    full = np.diff(cuts) > 0
    start, ranks = cuts[:-1][full], ranks[full]
    opens = np.ones(len(ranks), bool)
    opens[1:] = ranks[1:] != ranks[:-1]
    return Layout(world, np.append(start[opens], cuts[-1]), ranks[opens])
