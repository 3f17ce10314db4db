"""Which rows each rank sends to and receives from each other rank in one exchange.

Shapes: P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_engine.sharding.layout import Layout


@dataclass(frozen=True, eq=False)
class Moves:
    """How many rows go from which rank to which in one step of an exchange: known to every rank, seen from one.

    A rank packs the rows that it sends block by block, one block a receiving rank in rank order, and receives them
    block by block in the order of the sending ranks.
    """

    rank: int
    counts: np.ndarray  # int64 [P, P] rows that rank i (first axis) receives from rank j

    @property
    def world(self) -> int:
        return len(self.counts)

    @cached_property
    def send_counts(self) -> list[int]:
        return self.counts[:, self.rank].tolist()

    @cached_property
    def recv_counts(self) -> list[int]:
        return self.counts[self.rank].tolist()

    @cached_property
    def rows_out(self) -> int:
        return sum(self.send_counts)

    @cached_property
    def rows_in(self) -> int:
        return sum(self.recv_counts)

    @cached_property
    def most_out(self) -> int:
        """Most rows that any rank packs."""
        return int(self.counts.sum(0).max())

    @cached_property
    def blocks(self) -> list[tuple[int, int, int, int]]:
        """What this rank receives, nearest sender after it first: (sender, first row in what the sender packed, first
        row in what this rank receives, rows). Starting each rank at another sender spreads the load on the links."""
        there = (np.cumsum(self.counts, 0) - self.counts)[self.rank].tolist()
        here = (np.cumsum(self.counts[self.rank]) - self.counts[self.rank]).tolist()
        order = [(self.rank + step) % self.world for step in range(1, self.world + 1)]
        return [(peer, there[peer], here[peer], self.recv_counts[peer]) for peer in order if self.recv_counts[peer]]

    @cached_property
    def back(self) -> Moves:
        """Every row goes back to where it came from."""
        return Moves(self.rank, self.counts.T)

    def at_distance(self, step: int) -> Moves:
        """Only what each rank r reads from rank r - step (mod P)."""
        kept = np.zeros_like(self.counts)
        reader = np.arange(self.world)
        source = (reader - step) % self.world
        kept[reader, source] = self.counts[reader, source]
        return Moves(self.rank, kept)


@dataclass(frozen=True, eq=False)
class RowExchange:
    """One rank's part of an exchange of token rows. Nothing is ever sent to oneself."""

    moves: Moves
    send_rows: np.ndarray  # int64 [moves.rows_out] local rows, grouped by receiving rank, ascending inside a group
    recv_tokens: np.ndarray  # int64 [moves.rows_in] tokens received, grouped by sending rank, ascending inside

    @property
    def rows_out(self) -> int:
        return self.moves.rows_out

    @property
    def rows_in(self) -> int:
        return self.moves.rows_in


def row_exchange(layout: Layout, rank: int, needed: list[np.ndarray]) -> RowExchange:
    """Exchange that gives every rank the tokens it needs.

    Args:
        needed: for each rank the ascending tokens it reads; those it owns itself are not moved.
    """
    send, recv = [], []
    for peer in range(layout.world):
        if peer == rank:
            continue
        asked, mine = needed[peer], needed[rank]
        send.append(asked[layout.owner[asked] == rank])
        recv.append(mine[layout.owner[mine] == peer])
    none = np.empty(0, np.int64)  # of a single rank
    return RowExchange(
        moves=Moves(rank, _rows_between(layout, needed)),
        send_rows=layout.local_row[np.concatenate([none, *send])],
        recv_tokens=np.concatenate([none, *recv]),
    )


def _rows_between(layout: Layout, needed: list[np.ndarray]) -> np.ndarray:
    """int64 [P, P]: how many rows each rank (first axis) reads from each other rank; zero on the diagonal."""
    counts = np.stack([np.bincount(layout.owner[tokens], minlength=layout.world) for tokens in needed])
    np.fill_diagonal(counts, 0)
    return counts.astype(np.int64)


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Tables of an exchange in which every rank sees all tokens (head shards).

    ``dfs_order[t]`` is the row of token t in the concatenation of all ranks' rows (padding rows included), so that
    ``concatenated[dfs_order]`` stands in depth-first order.
    """

    rank_rows: np.ndarray  # int64 [P] rows of each rank, padding rows included
    dfs_order: np.ndarray  # int64 [T]


def token_order(layout: Layout) -> TokenOrder:
    offset = np.cumsum(layout.rank_rows) - layout.rank_rows
    return TokenOrder(layout.rank_rows, offset[layout.owner] + layout.local_row)
