"""Recurrent states across ranks: affine summaries of the exits become states at the entries.

Summaries move by head: each rank receives all exits for its share of the heads, folds them on the tree of exits and
entries, and sends the entry states back. The volume does not depend on the number of ranks, and A stays with the owner
of the head, so that backward moves only the cotangents of entries and exits.

The fold itself is small and computes in float64: that is exact enough for any depth, and no global setting of float32
products (tf32) reaches it. Children are added in rounds in which no parent occurs twice, so their order is fixed.

Shapes: X, Y exits and entries of this rank, GX, GY of all ranks; XA, GXA exits below an entry; H heads, h heads of
this rank's share; K, V head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from cp_engine.sharding.exchange.transport import Part, Transport, ship
from cp_engine.sharding.gdn_plan import StateFold
from cp_engine.sharding.row_exchange import Moves

# (targets, sources) of each round, int64: the k-th round holds the k-th source of every target that has so many.
Rounds = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, eq=False)
class FoldLevel:
    """Exits whose state follows from the exits of earlier levels."""

    exits: torch.Tensor  # int64 [E]
    parents: torch.Tensor  # int64 [E] the exit that feeds the entry above each exit
    transitions: torch.Tensor  # int64 [E] each exit's place among the exits that carry an A
    sums: Rounds  # of the exits over their parents


@dataclass(frozen=True, eq=False)
class FoldMoves:
    """Which rank sends how many matrices of a head to which head owner. Own heads "move" too."""

    exits: Moves
    throughs: Moves
    entries: Moves


@dataclass(frozen=True, eq=False)
class FoldTables:
    """A `StateFold` ready to execute on one rank."""

    rank: int
    exit_counts: list[int]
    entry_counts: list[int]
    through_counts: list[int]  # exits below an entry
    entry_exit: torch.Tensor  # int64 [GY]
    entry_sums: Rounds  # of the entries over the exits that feed them
    levels: tuple[FoldLevel, ...]
    _moves: dict[int, FoldMoves] = field(default_factory=dict)  # by number of heads

    @property
    def empty(self) -> bool:
        """No state crosses ranks, on any rank."""
        return len(self.entry_exit) == 0

    def head_bounds(self, heads: int) -> list[int]:
        """Rank r folds the heads from bound r to bound r + 1."""
        world = len(self.exit_counts)
        return [heads * r // world for r in range(world + 1)]

    def moves(self, heads: int) -> FoldMoves:
        """To the head owners, of layers with so many heads."""
        if heads not in self._moves:
            share = np.diff(self.head_bounds(heads))[:, None]
            every = (np.asarray(counts) for counts in (self.exit_counts, self.through_counts, self.entry_counts))
            self._moves[heads] = FoldMoves(*(Moves(self.rank, share * counts) for counts in every))
        return self._moves[heads]


def fold_tables(fold: StateFold, rank: int, device: torch.device | str = "cpu") -> FoldTables:
    through = fold.exit_entry >= 0
    exit_rank = np.repeat(np.arange(len(fold.exit_counts)), fold.exit_counts)
    # Level of an exit below an entry: one more than that entry's.
    level = np.where(through, fold.entry_level[fold.exit_entry] + 1 if len(fold.entry_exit) else 0, 0)
    transition = np.cumsum(through) - 1
    levels = []
    for number in range(1, int(level.max(initial=0)) + 1):
        exits = np.flatnonzero(level == number)
        parents = fold.entry_exit[fold.exit_entry[exits]]
        tables = [torch.as_tensor(x, device=device) for x in (exits, parents, transition[exits])]
        levels.append(FoldLevel(*tables, _rounds(parents, device)))
    return FoldTables(
        rank=rank,
        exit_counts=fold.exit_counts.tolist(),
        entry_counts=fold.entry_counts.tolist(),
        through_counts=np.bincount(exit_rank[through], minlength=len(fold.exit_counts)).tolist(),
        entry_exit=torch.as_tensor(fold.entry_exit, device=device),
        entry_sums=_rounds(fold.entry_exit, device),
        levels=tuple(levels),
    )


def _rounds(target: np.ndarray, device) -> Rounds:
    order = np.argsort(target, kind="stable")
    new = np.append(True, np.diff(target[order]) != 0)[: len(order)]
    index = np.arange(len(order))
    turn = index - np.maximum.accumulate(np.where(new, index, 0))
    parts = [order[turn == number] for number in range(int(turn.max(initial=-1)) + 1)]
    return tuple(tuple(torch.as_tensor(x, device=device) for x in (target[part], part)) for part in parts)


def fold_entry_states(
    offset: torch.Tensor, transition: torch.Tensor, tables: FoldTables, transport: Transport | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """States at this rank's entries from the exits' maps ``H_exit = A H_entry + B``. Not differentiable by itself.

    Every rank must call it, also one without exits and entries; when no rank has any, nothing moves.

    Args:
        offset: B [X, H, K, V] in the accumulation dtype.
        transition: A [XA, H, K, K] of the exits below an entry, in the order of the exits.

    Returns:
        Entry states [Y, H, K, V], and A of all ranks for this rank's heads [GXA, h, K, K], which backward needs.
    """
    if tables.empty:
        return offset, transition
    heads = offset.shape[1]
    moves, bounds = tables.moves(heads), tables.head_bounds(heads)
    received, transition = _to_head_owners(
        [offset, transition],
        [moves.exits, moves.throughs],
        [sum(tables.exit_counts), sum(tables.through_counts)],
        bounds,
        transport,
    )
    state = received.double()
    for level in tables.levels:
        state[level.exits] += transition[level.transitions].double() @ state[level.parents]
    mine = tables.entry_counts[tables.rank]
    states = _from_head_owners(state[tables.entry_exit], offset, mine, moves.entries.back, bounds, transport)
    return states, transition


def fold_exit_cotangents(
    dentry: torch.Tensor, transition: torch.Tensor, tables: FoldTables, transport: Transport | None
) -> torch.Tensor:
    """Adjoint of `fold_entry_states` in B: gradients of this rank's exit states [X, H, K, V].

    Args:
        dentry: [Y, H, K, V] gradients of the entry states with zero gradients at this rank's exits.
        transition: the A that `fold_entry_states` returned.
    """
    if tables.empty:
        return dentry
    heads = dentry.shape[1]
    moves, bounds = tables.moves(heads), tables.head_bounds(heads)
    (cotangent,) = _to_head_owners([dentry], [moves.entries], [sum(tables.entry_counts)], bounds, transport)
    dstate = cotangent.new_zeros((sum(tables.exit_counts), *cotangent.shape[1:]), dtype=torch.float64)
    _add(dstate, cotangent, tables.entry_sums)
    for level in reversed(tables.levels):
        above = transition[level.transitions].double().mT @ dstate[level.exits]
        _add(dstate, above, level.sums)
    return _from_head_owners(dstate, dentry, tables.exit_counts[tables.rank], moves.exits.back, bounds, transport)


def _add(total: torch.Tensor, x: torch.Tensor, rounds: Rounds) -> None:
    for targets, sources in rounds:
        total[targets] += x[sources]


def _to_head_owners(
    tensors: list[torch.Tensor],
    moves: list[Moves],
    totals: list[int],
    bounds: list[int],
    transport: Transport | None,
) -> list[torch.Tensor]:
    """Tensors [N_rank, H, a, b] -> [sum N, h, a, b], all in one shipment; what moves is a head's matrix [a, b].

    Args:
        totals: sum N of each; a rank may own no head.
    """
    spans = list(zip(bounds[:-1], bounds[1:], strict=True))
    parts = [Part(move, tuple(t.shape[2:])) for t, move in zip(tensors, moves, strict=True)]
    packs = [partial(_pack_by_head, t, spans) for t in tensors]
    received = ship(parts, packs, tensors[0], transport)
    lo, hi = spans[moves[0].rank]
    return [rows.view(n, hi - lo, *t.shape[2:]) for rows, n, t in zip(received, totals, tensors, strict=True)]


def _pack_by_head(x: torch.Tensor, spans: list[tuple[int, int]], out: torch.Tensor) -> None:
    """The heads of each span after each other: [N, H, a, b] into [N H, a, b]."""
    torch.cat([x[:, lo:hi].reshape(-1, *x.shape[2:]) for lo, hi in spans], out=out)


def _from_head_owners(
    x: torch.Tensor, like: torch.Tensor, mine: int, moves: Moves, bounds: list[int], transport: Transport | None
) -> torch.Tensor:
    """float64 [sum N, h, K, V] of this rank's heads -> [mine, H, K, V] of this rank's exits or entries, as ``like``."""
    part = Part(moves, tuple(x.shape[2:]))
    (received,) = ship([part], [lambda out: out.copy_(x.flatten(0, 1))], like, transport)
    parts = received.split(moves.recv_counts)
    heads = zip(parts, bounds[:-1], bounds[1:], strict=True)
    return torch.cat([part.view(mine, hi - lo, *x.shape[2:]) for part, lo, hi in heads], dim=1)
