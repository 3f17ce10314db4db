"""Moving rows of tokens from their owners to other ranks or other places: one rank's part.

A token's row goes to one place, so that the inverse move brings the gradients home without a sum: of every token, from
one layout to another (`relayout`), or of some (`loss_plan`). Padding rows do not move.

Shapes: n rows of this rank before the move, m after it (padding rows included), P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import expand_ranges
from cp_engine.sharding.layout import Layout


@dataclass(frozen=True, eq=False)
class Relayout:
    """Rows that stay on this rank, that it sends and that it receives.

    Both sides of a pair of ranks know the tokens that pass between them in ascending order.
    """

    rows_before: int  # n
    rows_after: int  # m
    moved: int  # rows that leave their rank, of all ranks
    stay_from: np.ndarray  # int64 rows before the move of the tokens that stay, ascending
    stay_to: np.ndarray  # int64 rows after the move of the same tokens
    send_rows: np.ndarray  # int64 [sum(send_counts)] rows before the move, grouped by receiving rank
    send_counts: np.ndarray  # int64 [P]
    recv_rows: np.ndarray  # int64 [sum(recv_counts)] rows after the move, grouped by sending rank
    recv_counts: np.ndarray  # int64 [P]


def relayout(before: Layout, after: Layout, rank: int) -> Relayout:
    """The move from ``before`` to ``after``, two layouts of the same tokens on the same ranks.

    Raises:
        ValueError: for layouts of other numbers of tokens or ranks.
    """
    if (before.tokens, before.world) != (after.tokens, after.world):
        raise ValueError(
            f"two layouts of one forest must have equal tokens and ranks, got {before.tokens} tokens on "
            f"{before.world} ranks and {after.tokens} on {after.world}"
        )
    # Ranges between the cuts of both layouts have one owner before and one after.
    cut = np.union1d(before.piece_start, after.piece_start)
    start, length = cut[:-1], np.diff(cut)
    source, target = before.owner[start], after.owner[start]
    leaves = [np.flatnonzero((source == rank) & (target == peer)) for peer in range(before.world)]
    arrives = [np.flatnonzero((target == rank) & (source == peer)) for peer in range(before.world)]
    stays, leaves[rank], arrives[rank] = leaves[rank], leaves[rank][:0], arrives[rank][:0]

    def rows(layout: Layout, ranges: np.ndarray) -> np.ndarray:
        """Local rows of the tokens of ranges; the tokens of a range are neighbours on their owner too."""
        return expand_ranges(layout.local_row[start[ranges]], length[ranges])

    def counts(ranges: list[np.ndarray]) -> np.ndarray:
        return np.array([length[each].sum() for each in ranges], np.int64)

    return Relayout(
        rows_before=int(before.rank_rows[rank]),
        rows_after=int(after.rank_rows[rank]),
        moved=int(length[source != target].sum()),
        stay_from=rows(before, stays),
        stay_to=rows(after, stays),
        send_rows=rows(before, np.concatenate(leaves)),
        send_counts=counts(leaves),
        recv_rows=rows(after, np.concatenate(arrives)),
        recv_counts=counts(arrives),
    )
