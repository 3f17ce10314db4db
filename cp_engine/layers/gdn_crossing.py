"""How recurrent states cross ranks in the middle of the Gated DeltaNet mixer: handed on in rounds, or by affine maps.

Both have the mixer's four steps. Forward: `start` sends off what this rank knows without other ranks' states, and
`outputs` takes what arrives. Backward: `pull` sends off the gradients that other ranks wait for first, and `gradients`
takes those that arrive. See `cp_engine.sharding.gdn_plan` for which of the two a plan asks for.

Shapes: X and Y exits and entries of this rank, H value heads, K and V head sizes, GXA and h as in
`cp_engine.sharding.exchange.states`.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.gdn import api as gdn
from cp_engine.layers.gdn_tables import GdnTables
from cp_engine.sharding.exchange.in_flight import InFlight
from cp_engine.sharding.exchange.kept import is_taken, kept
from cp_engine.sharding.exchange.rows import accumulation_dtype, put_rows
from cp_engine.sharding.exchange.state_rounds import hand_back, hand_on
from cp_engine.sharding.exchange.states import fold_entry_states, fold_exit_cotangents
from cp_engine.sharding.exchange.transport import Transport


class HandedOn:
    """Every state is computed once and goes on as it is. A pack in which no state crosses ranks has no rounds."""

    def __init__(self, tables: GdnTables, backend: str, transport: Transport | None):
        self._rounds, self._transport = tables.rounds, transport
        self._tables, self._entries = tables.of_backend(backend), tables.entries
        self._awaited_turn = tables.plan.awaited_turn
        self._exits = len(tables.plan.exit_fragment)

    def start(self, inputs: gdn.Inputs, stages) -> None:
        self._forward = gdn.forward(inputs, stages, self._tables)
        shape = (self._entries, inputs.v.shape[1], inputs.k.shape[2], inputs.v.shape[2])
        self._entry_states = inputs.v.new_empty(shape, dtype=accumulation_dtype(inputs.v.dtype))
        self._turn, self._moving = 0, self._hand_on(0)
        # A product of the caller's would fill the card and hold up the ranks that wait for this one.
        while self._turn < self._awaited_turn:
            self._arrive()

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """o, entry states [Y, H, K, V], and no A."""
        for turn in range(len(self._rounds) + 1):
            if turn > self._turn:
                self._arrive()
            self._forward.run(turn, self._entry_states if turn else None)
        return self._forward.outputs(), self._entry_states, self._entry_states.new_empty(0)

    def _arrive(self) -> None:
        """The states that the next turn starts from, and off with those that others wait for."""
        (arrived,) = self._moving.wait()
        put_rows(arrived, self._rounds[self._turn].entries, self._entry_states)
        self._turn += 1
        self._moving = self._hand_on(self._turn)

    def _hand_on(self, number: int) -> InFlight | None:
        if number == len(self._rounds):
            return None
        of_round, transport = self._rounds[number], self._transport
        exits = self._forward.leaving(number, self._entry_states if number else None)
        return InFlight(lambda: kept("exchange", lambda: (hand_on(exits, of_round, transport),), exits), exits)

    def pull(self, inputs: gdn.Inputs, stages, pulled, entry_states: torch.Tensor, _transition: torch.Tensor) -> None:
        self._backward = gdn.backward(inputs, stages, pulled, entry_states, self._tables)
        self._moving = self._hand_back(len(self._rounds), _no_exits)

    def gradients(self) -> gdn.Inputs:
        for turn in range(len(self._rounds) - 1, 0, -1):
            arriving = self._moving
            self._moving = self._hand_back(turn, arriving.wait)
            arriving.wait()
            del arriving  # its gradients, before the last turn's passes
        if self._moving is None:
            return self._backward.gradients(_no_exits)
        grads = self._backward.gradients(self._moving.wait)
        self._moving.wait()
        return grads

    def _hand_back(self, turn: int, dexit) -> InFlight | None:
        """The gradients of the states that trees of this turn start from."""
        if not turn:
            return None
        of_round, exits, transport = self._rounds[turn - 1], self._exits, self._transport
        dentry = self._backward.entering(turn, dexit)
        return InFlight(lambda: hand_back(dentry, of_round, exits, transport), dentry)


def _no_exits() -> None:
    """Gradients of the exit states of the last turn: its trees have none."""


class ByMaps:
    """One exchange of maps however often states cross; chunks that lead to an exit are walked twice."""

    def __init__(self, tables: GdnTables, backend: str, transport: Transport | None):
        self._fold, self._transport = tables.fold, transport
        self._tables = tables.of_backend(backend)

    def start(self, inputs: gdn.Inputs, stages) -> None:
        fold, transport = self._fold, self._transport
        # Only the fold reads the summary, and a recomputation has the fold's result.
        summary = () if is_taken("exchange") else gdn.exit_summary(inputs, stages, self._tables)
        self._states = InFlight(
            lambda: kept("exchange", lambda: fold_entry_states(*summary, fold, transport), inputs.v), inputs.v, *summary
        )
        self._forward = gdn.forward(inputs, stages, self._tables)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """o, entry states [Y, H, K, V], and A of all ranks for this rank's heads [GXA, h, K, K]."""
        self._forward.run(0, None)
        entry_states, transition = self._states.wait()
        self._forward.run(1, entry_states)
        return self._forward.outputs(), entry_states, transition

    def pull(self, inputs: gdn.Inputs, stages, pulled, entry_states: torch.Tensor, transition: torch.Tensor) -> None:
        fold, transport = self._fold, self._transport
        dentry, pulled = gdn.begin_backward(inputs, stages, pulled, entry_states, self._tables)
        self._backward = gdn.backward(inputs, stages, pulled, entry_states, self._tables)
        self._dexit = InFlight(lambda: fold_exit_cotangents(dentry, transition, fold, transport), dentry, transition)

    def gradients(self) -> gdn.Inputs:
        grads = self._backward.gradients(self._dexit.wait)
        self._dexit.wait()
        return grads


def crossing_of(tables: GdnTables, backend: str, transport: Transport | None) -> HandedOn | ByMaps:
    by_maps = not tables.rounds and not tables.fold.empty
    return (ByMaps if by_maps else HandedOn)(tables, backend, transport)
