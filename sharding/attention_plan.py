"""What softmax attention needs on one rank: visible intervals, and which rows to fetch from whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest
from cp_engine.sharding.intervals import RowIntervals, visible_intervals, visible_tokens
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.row_exchange import RowExchange, TokenOrder, row_exchange, rows_between, token_order

EXCHANGES = ("gather", "ring", "ulysses")


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """Fetch every visible remote row, then one kernel call over keys in depth-first order."""

    key_order: np.ndarray  # int64 [K] index of each key row in concat(local rows, received rows)
    intervals: RowIntervals  # over the K gathered key rows


@dataclass(frozen=True, eq=False)
class RingPlan:
    """One kernel call for the local keys and one for the rows of each peer that this rank sees."""

    intervals: tuple[RowIntervals, ...]  # [P]; entry p over the rows received from p, entry `rank` over local rows


@dataclass(frozen=True, eq=False)
class UlyssesPlan:
    """All tokens, a share of the heads."""

    order: TokenOrder
    intervals: RowIntervals  # over all T tokens in depth-first order


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One rank's attention over one pack. Exactly one of gather, ring, ulysses is set, as ``exchange`` says."""

    exchange: str
    fetch: RowExchange  # visible remote rows (gather, ring); for ulysses what gather would have moved
    between: np.ndarray  # int64 [P, P] rows of ``fetch`` that rank i (first axis) reads from rank j
    rank_rows: np.ndarray  # int64 [P] rows of each rank, padding rows included
    pairs: int  # visible (query, key) pairs of this rank's rows
    gather: GatherPlan | None = None
    ring: RingPlan | None = None
    ulysses: UlyssesPlan | None = None


def attention_plan(
    forest: Forest, layout: Layout, rank: int, exchange: str, window: int | None = None
) -> AttentionPlan:
    """Plan one rank's attention.

    Args:
        window: a token sees itself and the ``window - 1`` tokens before it on its path; None: its whole path.

    Raises:
        ValueError: for an unknown exchange, or a window without tokens.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}, got {exchange!r}")
    if window is not None and window < 1:
        raise ValueError(f"an attention window holds at least 1 token, the query's own; got {window}")
    intervals = visible_intervals(forest, layout, rank, window)
    needed = [visible_tokens(forest, layout, peer, window) for peer in range(layout.world)]
    fetch = row_exchange(layout, rank, needed)
    shared = {
        "exchange": exchange,
        "fetch": fetch,
        "between": rows_between(layout, needed),
        "rank_rows": layout.rank_rows,
        "pairs": intervals.pairs(),
    }
    if exchange == "gather":
        keys = needed[rank]
        gather = GatherPlan(_key_order(layout, rank, keys, fetch), intervals.on_keys(keys))
        return AttentionPlan(**shared, gather=gather)
    if exchange == "ring":
        split = np.split(fetch.recv_tokens, np.cumsum(fetch.recv_counts)[:-1])
        split[rank] = layout.rank_tokens(rank)
        return AttentionPlan(**shared, ring=RingPlan(tuple(intervals.on_keys(keys) for keys in split)))
    whole = contiguous_layout(forest, 1)
    return AttentionPlan(
        **shared, ulysses=UlyssesPlan(token_order(layout), visible_intervals(forest, whole, 0, window))
    )


def _key_order(layout: Layout, rank: int, keys: np.ndarray, fetch: RowExchange) -> np.ndarray:
    """Index of each gathered key in concat(local rows, received rows)."""
    order = np.empty(layout.tokens, np.int64)
    own = layout.rank_tokens(rank)
    order[own] = np.arange(len(own))
    order[fetch.recv_tokens] = int(layout.rank_rows[rank]) + np.arange(fetch.rows_in)
    return order[keys]
