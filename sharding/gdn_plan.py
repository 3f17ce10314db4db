"""What Gated DeltaNet needs on one rank: fragments, chains, states that cross ranks, and conv history.

A fragment is a contiguous part of one segment on one rank; its recurrent state starts from its parent fragment's final
state. Where the parent lies on another rank the state arrives through an *entry*; a fragment with children on other
ranks offers its final state through an *exit*. States that cross ranks few times one after another are handed on as
they are, in rounds (`StateRound`). Else an exit below an entry is known locally only as an affine map
``H_exit = A @ H_entry + B``, and the maps of all ranks are folded on the tree of entries and exits (`StateFold`).

Shapes: F local fragments, C chains, X exits and Y entries of this rank; GX, GY exits and entries of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.row_exchange import Moves, RowExchange, TokenOrder, row_exchange, token_order

GDN_EXCHANGES = ("affine", "ulysses")
# Rounds up to which states are handed on: with three, two ranks may have alternate quarters of every trunk and branches
# of it.
MOST_ROUNDS = 3


def handed_on(rounds: int) -> bool:
    """Whether states that cross ranks in so many rounds are handed on as they are; else maps of them are folded."""
    return rounds <= MOST_ROUNDS


@dataclass(frozen=True, eq=False)
class StateFold:
    """The tree of exits and entries over all ranks; equal on every rank.

    Exits and entries are numbered rank by rank, so rank r's exits are one contiguous range.
    """

    exit_counts: np.ndarray  # int64 [P]
    entry_counts: np.ndarray  # int64 [P]
    exit_entry: np.ndarray  # int64 [GX] entry that the exit's state is affine in, -1 where its state is known outright
    entry_exit: np.ndarray  # int64 [GY] exit that feeds the entry
    entry_level: np.ndarray  # int64 [GY] 0 where the feeding exit is known outright, else 1 + level of its entry

    @property
    def rounds(self) -> int:
        """How many times states cross ranks one after another."""
        return int(self.entry_level.max(initial=-1)) + 1


@dataclass(frozen=True, eq=False)
class StateRound:
    """The states that are handed on in one round: those of the entries of one level."""

    moves: Moves
    exits: np.ndarray  # int64 [moves.rows_out] exits of this rank, grouped by receiving rank, none twice in a group
    entries: np.ndarray  # int64 [moves.rows_in] entry slots of this rank, grouped by sending rank; none arrives twice


@dataclass(frozen=True, eq=False)
class GdnPlan:
    """One rank's recurrence and convolution over one pack.

    With ``exchange == "ulysses"`` the tables describe the whole forest in depth-first order (every rank sees all
    tokens of its heads), ``order`` holds the exchange and there are no exits, entries or fetched rows.
    """

    exchange: str
    fragment_row: np.ndarray  # int64 [F + 1] row boundaries
    fragment_parent: np.ndarray  # int64 [F] local fragment, -1 for a zero state or an entry; parents come first
    fragment_entry: np.ndarray  # int64 [F] entry slot of this rank, -1 where none
    chain_fragment: np.ndarray  # int64 [C + 1] first fragment of each chain; inside, each is the next one's parent
    chain_level: np.ndarray  # int64 [C] chains of one level do not depend on each other
    exit_fragment: np.ndarray  # int64 [X]
    exit_entry: np.ndarray  # int64 [X] entry slot of this rank that the exit is affine in, -1 where none
    history: np.ndarray  # int64 [F, W - 1] row in concat(local rows, fetched rows), oldest first; -1 above the root
    history_fetch: RowExchange
    fold: StateFold
    rounds: tuple[StateRound, ...]  # in which states are handed on; none where they do not cross, and where maps do
    entry_level: np.ndarray  # int64 [Y] of this rank's entries, 0 throughout where maps are folded: all arrive at once
    order: TokenOrder | None = None

    @property
    def fragments(self) -> int:
        return len(self.fragment_parent)

    @property
    def awaited_turn(self) -> int:
        """The turn of this rank's first trees, if other ranks wait for states of those; else 0. A tree's turn is 0
        without an entry, else one more than the round in which its state arrives."""
        turns = np.append(1 + self.entry_level, 0)  # last cell: no entry
        of_trees = turns[self.fragment_entry[self.fragment_parent < 0]]
        first = int(of_trees.min(initial=len(self.rounds)))
        return first if first in turns[self.exit_entry] else 0


def gdn_plan(forest: Forest, layout: Layout, rank: int, exchange: str, conv_width: int) -> GdnPlan:
    """Plan one rank's GDN layers.

    Raises:
        ValueError: for an unknown exchange.
    """
    if exchange not in GDN_EXCHANGES:
        raise ValueError(f"gdn_exchange must be one of {', '.join(GDN_EXCHANGES)}, got {exchange!r}")
    if exchange == "affine":
        return _affine_plan(forest, layout, rank, conv_width)
    whole = _affine_plan(forest, contiguous_layout(forest, 1), 0, conv_width)
    return GdnPlan(**{**vars(whole), "exchange": "ulysses", "order": token_order(layout)})


@dataclass(frozen=True, eq=False)
class _Fragments:
    """The fragments of all ranks in depth-first order."""

    start: np.ndarray  # [G + 1] token boundaries
    rank: np.ndarray  # [G]
    parent: np.ndarray  # [G] fragment, -1 at a root

    @property
    def local_parent(self) -> np.ndarray:
        """Parent on the same rank, else -1."""
        same = (self.parent >= 0) & (self.rank[self.parent] == self.rank)
        return np.where(same, self.parent, -1)


def _all_fragments(forest: Forest, layout: Layout) -> _Fragments:
    start = np.union1d(forest.segment_start, layout.piece_start)
    first = start[:-1]
    before = forest.token_parent[first]
    parent = np.where(before >= 0, np.searchsorted(start, before, side="right") - 1, -1)
    return _Fragments(start, layout.owner[first], parent)


def _affine_plan(forest: Forest, layout: Layout, rank: int, conv_width: int) -> GdnPlan:
    every = _all_fragments(forest, layout)
    local_parent = every.local_parent
    crossing = np.flatnonzero((every.parent >= 0) & (local_parent < 0))
    fold, exit_fragment, entry_of, top_entry = _fold(every, local_parent, crossing, layout.world)

    mine = np.flatnonzero(every.rank == rank)
    slot = np.full(len(every.rank) + 1, -1, np.int64)  # last cell: the parent -1 of a root
    slot[mine] = np.arange(len(mine))
    first_exit, first_entry = int(fold.exit_counts[:rank].sum()), int(fold.entry_counts[:rank].sum())
    exits = slice(first_exit, first_exit + int(fold.exit_counts[rank]))
    entries = slice(first_entry, first_entry + int(fold.entry_counts[rank]))
    handed = handed_on(fold.rounds)
    chain_fragment, chain_level = _chains(slot[local_parent[mine]])
    history, fetch = _history(forest, layout, rank, every, conv_width)
    rows = layout.local_row[every.start[mine]]
    return GdnPlan(
        exchange="affine",
        fragment_row=np.append(rows, int(layout.rank_token_count[rank])),
        fragment_parent=slot[local_parent[mine]],
        fragment_entry=_slots(entry_of[mine], first_entry),
        chain_fragment=chain_fragment,
        chain_level=chain_level,
        exit_fragment=slot[exit_fragment[exits]],
        exit_entry=_slots(top_entry[exit_fragment[exits]], first_entry),
        history=history,
        history_fetch=fetch,
        fold=fold,
        rounds=tuple(_state_round(fold, rank, number) for number in range(fold.rounds if handed else 0)),
        entry_level=fold.entry_level[entries] * handed,
    )


def _state_round(fold: StateFold, rank: int, number: int) -> StateRound:
    exit_rank, entry_rank = (
        np.repeat(np.arange(len(counts)), counts) for counts in (fold.exit_counts, fold.entry_counts)
    )
    world = len(fold.exit_counts)
    entry = np.flatnonzero(fold.entry_level == number)
    source, receiver = exit_rank[fold.entry_exit[entry]], entry_rank[entry]
    counts = np.bincount(receiver * world + source, minlength=world**2).reshape(world, world).astype(np.int64)
    # Entries of a rank are numbered by the fragment that feeds them, exits rank by rank: both sides list what goes from
    # one rank to another in the order of the entries.
    sent, received = entry[source == rank], entry[receiver == rank]
    arriving = received[np.argsort(source[receiver == rank], kind="stable")]
    return StateRound(
        Moves(rank, counts),
        exits=fold.entry_exit[sent] - int(fold.exit_counts[:rank].sum()),
        entries=arriving - int(fold.entry_counts[:rank].sum()),
    )


def _slots(entry: np.ndarray, first: int) -> np.ndarray:
    """Global entry numbers as slots of the rank whose first entry is ``first``; -1 stays."""
    return np.where(entry >= 0, entry - first, -1)


def _fold(every: _Fragments, local_parent: np.ndarray, crossing: np.ndarray, world: int):
    """Number exits and entries, and order the entries.

    Returns the fold, the fragment of each exit [GX], each fragment's own entry or -1 [G], and the entry at the top of
    each fragment's local component or -1 [G].
    """
    source = every.parent[crossing]
    exit_fragment = np.unique(source)
    exit_fragment = exit_fragment[np.argsort(every.rank[exit_fragment], kind="stable")]
    exit_number = np.full(len(every.rank), -1, np.int64)
    exit_number[exit_fragment] = np.arange(len(exit_fragment))
    # One entry for each (rank, remote parent): siblings below one remote parent share the state that arrives.
    pair, entry = np.unique(every.rank[crossing] * len(every.rank) + source, return_inverse=True)
    entry_rank, entry_source = pair // max(1, len(every.rank)), pair % max(1, len(every.rank))
    entry_of = np.full(len(every.rank), -1, np.int64)
    entry_of[crossing] = entry

    top = _top(local_parent)
    top_entry = entry_of[top]
    exit_entry, entry_exit = top_entry[exit_fragment], exit_number[entry_source]
    # An entry's source fragment comes after the source of the entry above it, so this order is topological.
    level = np.zeros(len(pair), np.int64)
    for e in np.argsort(entry_source, kind="stable"):
        above = exit_entry[entry_exit[e]]
        level[e] = 0 if above < 0 else level[above] + 1
    fold = StateFold(
        exit_counts=np.bincount(every.rank[exit_fragment], minlength=world).astype(np.int64),
        entry_counts=np.bincount(entry_rank, minlength=world).astype(np.int64),
        exit_entry=exit_entry,
        entry_exit=entry_exit,
        entry_level=level,
    )
    return fold, exit_fragment, entry_of, top_entry


def _top(parent: np.ndarray) -> np.ndarray:
    """The root of each node's tree, by pointer doubling."""
    up = np.where(parent >= 0, parent, np.arange(len(parent)))
    while True:
        further = up[up]
        if (further == up).all():
            return up
        up = further


def _chains(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Heavy paths among local fragments, and the level of each: how many chains stand above it."""
    fragments = len(parent)
    opens = parent != np.arange(fragments) - 1
    opens[:1] = True
    chain_of = np.cumsum(opens) - 1
    first = np.flatnonzero(opens)
    level: list[int] = []
    for head in parent[first].tolist():
        level.append(0 if head < 0 else level[chain_of[head]] + 1)
    return np.append(first, fragments), np.asarray(level, np.int64)


def _history(forest: Forest, layout: Layout, rank: int, every: _Fragments, conv_width: int):
    """Rows that the convolution reads above each local fragment, and the exchange that fetches the remote ones.

    The history is the last ``conv_width - 1`` tokens of the root path, possibly from several short segments on
    several ranks.
    """
    # One column more than tokens, for the token above a root.
    up = np.append(forest.token_parent, -1)
    token = np.empty((len(every.rank), conv_width - 1), np.int64)
    above = every.start[:-1]
    for column in range(conv_width - 2, -1, -1):
        above = up[above]
        token[:, column] = above
    needed = []
    for peer in range(layout.world):
        seen = np.unique(token[every.rank == peer])
        needed.append(seen[seen >= 0])
    fetch = row_exchange(layout, rank, needed)
    row = np.full(layout.tokens + 1, -1, np.int64)  # last cell: above a root
    own = layout.rank_tokens(rank)
    row[own] = np.arange(len(own))
    row[fetch.recv_tokens] = int(layout.rank_rows[rank]) + np.arange(fetch.rows_in)
    return row[token[every.rank == rank]], fetch
