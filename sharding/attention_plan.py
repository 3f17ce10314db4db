"""What softmax attention needs on one rank: visible intervals, and which rows to fetch from whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_engine.sharding.forest import Forest
from cp_engine.sharding.intervals import RowIntervals, visible_intervals, visible_tokens
from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.row_exchange import RowExchange, TokenOrder, row_exchange, token_order

EXCHANGES = ("gather", "ring", "ulysses")
TWO_DIMENSIONAL = "ulysses_gather"  # followed by ":U", the number of ranks that share the heads


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """Fetch every visible remote row, then one kernel call over keys in depth-first order."""

    key_order: np.ndarray  # int64 [K] index of each key row in concat(local rows, received rows)
    intervals: RowIntervals  # over the K gathered key rows
    most_pairs: int  # visible pairs of the rank, or team of `ulysses_gather`, that has most


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
class UlyssesGatherPlan:
    """Ranks [iU, (i + 1) U) trade their tokens for head shards; ranks that hold one shard then gather among each other.

    A team is such U ranks; for the gather it is one owner of all its tokens.
    """

    order: TokenOrder  # of the team's tokens in the concatenation of its ranks' rows
    gather: GatherPlan  # over the rows of the team's tokens, ascending
    fetch: RowExchange  # between teams: rows are places among a team's tokens


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One rank's attention over one pack. Exactly one of the last four is set, as ``exchange`` says."""

    exchange: str
    fetch: RowExchange  # visible remote rows (gather, ring); for the others what gather would have moved
    rank_rows: np.ndarray  # int64 [P] rows of each rank, padding rows included
    pairs: int  # visible (query, key) pairs of this rank's rows
    gather: GatherPlan | None = None
    ring: RingPlan | None = None
    ulysses: UlyssesPlan | None = None
    ulysses_gather: UlyssesGatherPlan | None = None


def attention_plan(
    forest: Forest, layout: Layout, rank: int, exchange: str, window: int | None = None
) -> AttentionPlan:
    """Plan one rank's attention.

    Args:
        exchange: one of `EXCHANGES`, or ``ulysses_gather:U`` with U ranks that share the heads.
        window: a token sees itself and the ``window - 1`` tokens before it on its path; None: its whole path.

    Raises:
        ValueError: for an unknown exchange, a U that does not divide the ranks, or a window without tokens.
    """
    team = _team_size(exchange, layout.world)
    if window is not None and window < 1:
        raise ValueError(f"an attention window holds at least 1 token, the query's own; got {window}")
    intervals = visible_intervals(forest, layout, rank, window)
    needed = [visible_tokens(forest, layout, peer, window) for peer in range(layout.world)]
    fetch = row_exchange(layout, rank, needed)
    shared = {
        "exchange": exchange,
        "fetch": fetch,
        "rank_rows": layout.rank_rows,
        "pairs": intervals.pairs(),
    }
    if exchange == "gather":
        keys = needed[rank]
        rows = int(layout.rank_rows[rank])
        most = int(pairs_by_rank(forest, layout, window).max())
        gather = GatherPlan(_key_order(layout, rank, keys, fetch, rows), intervals.on_keys(keys), most)
        return AttentionPlan(**shared, gather=gather)
    if team is not None:
        return AttentionPlan(**shared, ulysses_gather=_ulysses_gather_plan(forest, layout, rank, team, window))
    if exchange == "ring":
        split = np.split(fetch.recv_tokens, np.cumsum(fetch.moves.recv_counts)[:-1])
        split[rank] = layout.rank_tokens(rank)
        return AttentionPlan(**shared, ring=RingPlan(tuple(intervals.on_keys(keys) for keys in split)))
    whole = contiguous_layout(forest, 1)
    return AttentionPlan(
        **shared, ulysses=UlyssesPlan(token_order(layout), visible_intervals(forest, whole, 0, window))
    )


def _team_size(exchange: str, world: int) -> int | None:
    """U of a two-dimensional exchange, None for the others."""
    if exchange in EXCHANGES:
        return None
    name, _, size = exchange.partition(":")
    if name != TWO_DIMENSIONAL or not size.isdecimal():
        known = ", ".join((*EXCHANGES, f"{TWO_DIMENSIONAL}:U"))
        raise ValueError(f"exchange must be one of {known}, got {exchange!r}")
    if int(size) < 1 or world % int(size):
        raise ValueError(
            f"{TWO_DIMENSIONAL} needs a number of head-sharing ranks that divides {world} ranks, got {size}"
        )
    return int(size)


def _ulysses_gather_plan(forest: Forest, layout: Layout, rank: int, size: int, window: int | None) -> UlyssesGatherPlan:
    teams = layout_from_cuts(layout.piece_start, layout.piece_rank // size, layout.world // size)
    mine = rank // size
    tokens = teams.rank_tokens(mine)
    members = layout.rank_rows[mine * size : (mine + 1) * size]
    offset = np.cumsum(members) - members
    order = TokenOrder(members, offset[layout.owner[tokens] - mine * size] + layout.local_row[tokens])
    needed = [visible_tokens(forest, teams, team, window) for team in range(teams.world)]
    fetch = row_exchange(teams, mine, needed)
    # Padding rows of a team's ranks do not become rows of the team.
    intervals = replace(visible_intervals(forest, teams, mine, window).on_keys(needed[mine]), rows=len(tokens))
    most = int(pairs_by_rank(forest, teams, window).max())
    gather = GatherPlan(_key_order(teams, mine, needed[mine], fetch, len(tokens)), intervals, most)
    return UlyssesGatherPlan(order, gather, fetch)


def pairs_by_rank(forest: Forest, layout: Layout, window: int | None = None) -> np.ndarray:
    """int64 [P]: visible pairs of each rank's rows."""
    seen = forest.position + 1
    if window is not None:
        seen = np.minimum(seen, window)
    above = np.concatenate([[0], np.cumsum(seen)])
    pairs = np.zeros(layout.world, np.int64)
    np.add.at(pairs, layout.piece_rank, np.diff(above[layout.piece_start]))
    return pairs


def _key_order(layout: Layout, rank: int, keys: np.ndarray, fetch: RowExchange, rows: int) -> np.ndarray:
    """Index of each gathered key in concat(``rows`` local rows, received rows)."""
    order = np.empty(layout.tokens, np.int64)
    own = layout.rank_tokens(rank)
    order[own] = np.arange(len(own))
    order[fetch.recv_tokens] = rows + np.arange(fetch.rows_in)
    return order[keys]
