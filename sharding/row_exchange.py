"""Which rows each rank sends to and receives from each other rank in one all-to-all-v."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.layout import Layout


@dataclass(frozen=True, eq=False)
class RowExchange:
    """One rank's part of an exchange of token rows. Nothing is ever sent to oneself."""

    send_rows: np.ndarray  # int64 [sum(send_counts)] local rows, grouped by receiving rank, ascending inside a group
    send_counts: np.ndarray  # int64 [P]
    recv_tokens: np.ndarray  # int64 [sum(recv_counts)] tokens received, grouped by sending rank, ascending inside
    recv_counts: np.ndarray  # int64 [P]

    @property
    def rows_out(self) -> int:
        return int(self.send_counts.sum())

    @property
    def rows_in(self) -> int:
        return int(self.recv_counts.sum())


def row_exchange(layout: Layout, rank: int, needed: list[np.ndarray]) -> RowExchange:
    """Exchange that gives every rank the tokens it needs.

    Args:
        needed: for each rank the ascending tokens it reads; those it owns itself are not moved.
    """
    send, recv = [], []
    for peer in range(layout.world):
        if peer == rank:
            send.append(np.empty(0, np.int64))
            recv.append(np.empty(0, np.int64))
            continue
        asked = needed[peer]
        send.append(asked[layout.owner[asked] == rank])
        mine = needed[rank]
        recv.append(mine[layout.owner[mine] == peer])
    send_tokens = np.concatenate(send)
    return RowExchange(
        send_rows=layout.local_row[send_tokens],
        send_counts=np.array([len(s) for s in send], np.int64),
        recv_tokens=np.concatenate(recv),
        recv_counts=np.array([len(r) for r in recv], np.int64),
    )


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
