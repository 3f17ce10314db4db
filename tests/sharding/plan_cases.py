"""Random forests and layouts, and what an exchange of rows must move, for tests of plans."""

from __future__ import annotations

import numpy as np

from cp_engine.sharding.intervals import RowIntervals
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.row_exchange import RowExchange
from tests.forests import Rows, random_layout, random_variety

SEEDS = range(60)


def case(seed: int) -> tuple[Rows, Layout]:
    rows = random_variety(seed)
    return rows, random_layout(rows.forest, 1_000 + seed)


def rank_rows(layout: Layout, rank: int) -> list[int]:
    """The token of each local row; -1 on a padding row."""
    return layout.rank_tokens(rank).tolist() or [-1]


def received(exchange: RowExchange) -> list[list[int]]:
    return [part.tolist() for part in np.split(exchange.recv_tokens, np.cumsum(exchange.moves.recv_counts)[:-1])]


def check_exchange(layout: Layout, exchanges: list[RowExchange], needed: list[set[int]]) -> None:
    """What p sends to q is what q expects from p, token by token, and just what q needs of p's tokens."""
    for p, ours in enumerate(exchanges):
        sent = np.split(np.array(rank_rows(layout, p))[ours.send_rows], np.cumsum(ours.moves.send_counts)[:-1])
        assert ours.moves.world == layout.world and ours.moves.rank == p
        assert ours.rows_out == len(ours.send_rows) and ours.rows_in == len(ours.recv_tokens)
        for q, theirs in enumerate(exchanges):
            asked = [] if p == q else sorted(t for t in needed[q] if layout.owner[t] == p)
            assert sent[q].tolist() == received(theirs)[p] == asked


def keys_of_row(intervals: RowIntervals, row: int) -> list[int]:
    found = intervals.of_row(row)
    for (_, before), (after, _) in zip(found, found[1:], strict=False):
        assert before < after, "intervals touch or overlap"
    assert all(lo < hi for lo, hi in found)
    return [key for lo, hi in found for key in range(lo, hi)]
