"""What the recurrence of a layout costs each rank, counted: chunks, and states that cross ranks.

Shapes: F fragments of all ranks in depth-first order, P ranks, R rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cp_engine.sharding.gdn_plan import handed_on


@dataclass(frozen=True, eq=False)
class TurnFigures:
    """Counts of states that are handed on in R rounds. A tree of turn t starts from a state that arrives in round
    t - 1, one of turn 0 from zero; what leaves it leaves in round t."""

    exit_trees: np.ndarray  # int64 [R + 1, P] chunks of local trees with an exit
    exit_chains: np.ndarray  # int64 [R + 1, P] of these the ones of chains that lead to it, or end below it
    other_trees: np.ndarray  # int64 [R + 1, P] and of those without
    leave: np.ndarray  # int64 [R, P] states that leave, once for each rank that receives them
    arrive: np.ndarray  # int64 [R, P]


@dataclass(frozen=True, eq=False)
class MapFigures:
    """Counts of states that cross ranks by affine maps, one entry a rank; int64 [P]."""

    entries: np.ndarray  # states that arrive
    exits: np.ndarray  # states that leave
    maps: np.ndarray  # exits below an entry: these leave as affine maps
    exit_chunks: np.ndarray  # of fragments at or above an exit
    through_chunks: np.ndarray  # of these the ones below an entry: they need an affine map
    entry_chunks: np.ndarray  # of local trees below an entry
    entry_only_chunks: np.ndarray  # of these trees the ones without an exit
    exit_tree_chunks: np.ndarray  # of local trees with an exit


@dataclass(frozen=True, eq=False)
class RecurrentFigures:
    """Counts of one layout in a recurrent layer.

    Chunks hold at most 64 tokens and restart at every fragment. A local tree is a fragment that starts from zero or
    from another rank's state, with all that stands below it on the same rank.
    """

    chunks: np.ndarray  # int64 [P]
    crossing: TurnFigures | MapFigures | None = None  # as `gdn_plan` lets states cross ranks; None where none does

    @property
    def entries(self) -> np.ndarray:
        """int64 [P]: states that arrive."""
        if self.crossing is None:
            return np.zeros_like(self.chunks)
        return self.crossing.arrive.sum(0) if isinstance(self.crossing, TurnFigures) else self.crossing.entries

    @property
    def maps(self) -> int:
        """Affine maps that all ranks send."""
        return int(self.crossing.maps.sum()) if isinstance(self.crossing, MapFigures) else 0


def sum_by(group: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """int64 [groups]: exact sums (a float64 bincount rounds above 2**53)."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, value)
    return total


def recurrent_figures(chunks: np.ndarray, rank: np.ndarray, parent: np.ndarray, world: int) -> RecurrentFigures:
    """Count over the fragments of all ranks.

    Args:
        chunks, rank, parent: int64 [F]; the parent is -1 at a root.
    """
    found = RecurrentFigures(sum_by(rank, chunks, world))
    crossing = (parent >= 0) & (rank[parent] != rank)
    if not crossing.any():
        return found
    local = np.where(crossing | (parent < 0), np.arange(len(rank)), parent)
    top, further = local, local[local]
    while (further != top).any():
        top, further = further, further[further]
    turn, above = np.zeros(len(rank), np.int64), top
    while (below := crossing[above]).any() and handed_on(int(turn.max())):
        turn += below
        above = np.where(below, top[parent[above]], above)
    fragments = _Crossing(chunks, rank, parent, local, top, crossing, world)
    counts = fragments.in_turns(turn) if handed_on(int(turn.max())) else fragments.by_maps()
    return replace(found, crossing=counts)


@dataclass(frozen=True, eq=False)
class _Crossing:
    """Fragments of all ranks, of which some are fed from other ranks; [F] each."""

    chunks: np.ndarray
    rank: np.ndarray
    parent: np.ndarray
    local: np.ndarray  # parent on the same rank, a fragment itself at the top of its local tree
    top: np.ndarray  # of its local tree
    crossing: np.ndarray  # the parent is on another rank
    world: int

    @cached_property
    def entry(self) -> tuple[np.ndarray, np.ndarray]:
        """Rank and feeding fragment of each entry: siblings below one remote parent share the state that arrives."""
        fragments = len(self.rank)
        key = np.unique(self.rank[self.crossing] * fragments + self.parent[self.crossing])
        return key // fragments, key % fragments

    @cached_property
    def is_exit(self) -> np.ndarray:
        found = np.zeros(len(self.rank), bool)
        found[self.parent[self.crossing]] = True
        return found

    @cached_property
    def with_exit(self) -> np.ndarray:
        """Some fragment of the local tree is an exit."""
        found = np.zeros(len(self.rank), bool)
        found[self.top[self.is_exit]] = True
        return found[self.top]

    @property
    def to_exit(self) -> np.ndarray:
        """At or above an exit on the same rank."""
        return _lifted(self.is_exit, self.local, self.top)

    @property
    def on_exit_chain(self) -> np.ndarray:
        """The chain leads to an exit. It goes on from a fragment to the next one of its rank, if that is a child."""
        of_rank = np.argsort(self.rank, kind="stable")
        number = np.empty_like(of_rank)
        number[of_rank] = np.arange(len(of_rank))
        # Most local trees have no exit.
        part = of_rank[self.with_exit[of_rank]]
        place = np.empty_like(of_rank)
        place[part] = np.arange(len(part))
        opens = number[self.local[part]] != number[part] - 1
        leads = _lifted(self.is_exit[part], place[self.local[part]], place[self.top[part]])
        found = np.zeros(len(of_rank), bool)
        found[part] = leads[opens][np.cumsum(opens) - 1]
        return found

    def in_turns(self, turn: np.ndarray) -> TurnFigures:
        world, turns = self.world, int(turn.max()) + 1
        group = (turn * 3 + self.with_exit + self.on_exit_chain) * world + self.rank
        others, beside, chains = sum_by(group, self.chunks, turns * 3 * world).reshape(turns, 3, world).swapaxes(0, 1)
        receiver, source = self.entry
        leave, arrive = (
            np.bincount(turn[source] * world + ranks, minlength=(turns - 1) * world).reshape(turns - 1, world)
            for ranks in (self.rank[source], receiver)
        )
        return TurnFigures(beside + chains, chains, others, leave, arrive)

    def by_maps(self) -> MapFigures:
        to_exit = self.to_exit
        below = self.crossing[self.top]
        members = (to_exit, to_exit & below, below, below & ~self.with_exit, self.with_exit)
        return MapFigures(
            np.bincount(self.entry[0], minlength=self.world),
            *(np.bincount(self.rank[kept], minlength=self.world) for kept in (self.is_exit, self.is_exit & below)),
            *(sum_by(self.rank[kept], self.chunks[kept], self.world) for kept in members),
        )


def _lifted(marked: np.ndarray, parent: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Marks passed on to all that stands above; a top is its own parent."""
    found, up = marked.copy(), parent
    while True:  # the parents 1, 2, 4, ... above; at last the tops
        found[up[found]] = True
        if (up == top).all():
            return found
        up = up[up]
