"""Recurrent states handed on from rank to rank as they are, one round after another, and their gradients handed back.

Shapes: X, Y exits and entries of this rank; trailing axes [H, K, V] are a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.sharding.exchange.rows import take_rows
from cp_engine.sharding.exchange.transport import Part, Transport, ship
from cp_engine.sharding.gdn_plan import StateRound
from cp_engine.sharding.row_exchange import Moves


@dataclass(frozen=True, eq=False)
class RoundTables:
    """A `StateRound` ready to execute."""

    moves: Moves
    exits: torch.Tensor  # int64 [moves.rows_out]
    entries: torch.Tensor  # int64 [moves.rows_in]


def round_tables(round_: StateRound, device: torch.device | str = "cpu") -> RoundTables:
    exits, entries = (torch.as_tensor(x, device=device) for x in (round_.exits, round_.entries))
    return RoundTables(round_.moves, exits, entries)


def hand_on(exits: torch.Tensor, tables: RoundTables, transport: Transport | None) -> torch.Tensor:
    """States of this rank's exits [X, ...] to the ranks that start from them; every rank must call it.

    Returns:
        The states that arrive [moves.rows_in, ...], those of the entries ``tables.entries``.
    """
    part = Part(tables.moves, tuple(exits.shape[1:]))
    (states,) = ship([part], [lambda out: take_rows(exits, tables.exits, out)], exits, transport)
    return states


def hand_back(dentry: torch.Tensor, tables: RoundTables, exits: int, transport: Transport | None) -> torch.Tensor:
    """Gradients of the states that arrived, from [Y, ...] of all entries, to the ranks that they came from.

    Returns:
        Gradients of this rank's exit states [X, ...], zero for exits of other rounds. What several ranks return is
        added in the order of the ranks.
    """
    part = Part(tables.moves.back, tuple(dentry.shape[1:]))
    (came,) = ship([part], [lambda out: take_rows(dentry, tables.entries, out)], dentry, transport)
    dexit = dentry.new_zeros((exits, *dentry.shape[1:]))
    counts = part.moves.recv_counts
    for of_rank, gradients in zip(tables.exits.split(counts), came.split(counts), strict=True):
        if len(of_rank):
            dexit[of_rank] += gradients  # no exit twice
    return dexit
