"""Both passes over states, wave by wave, with what reads their states right behind them: the outputs of the forward,
and dq, dk, dw and dg of the backward.

Where states are handed on from rank to rank, a turn of trees ends with states for other ranks, or begins with their
gradients (`Forward.leaving`, `Backward.entering`). What only this rank reads is computed when those are on their way.
Where maps are folded, `begin_backward` walks once, before gradients cross ranks, what is final by then.

Shapes: n rows, H value heads, K and V head sizes, R state rows, Y entries, X exits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from cp_engine.kernels.gdn.reference import Inputs
from cp_engine.kernels.gdn.triton.backward_pass import HalfAdjoint, begin_adjoint, run_adjoint
from cp_engine.kernels.gdn.triton.chain_tables import ChainTables, StatePass
from cp_engine.kernels.gdn.triton.dqkwg import Gradients, dqkwg
from cp_engine.kernels.gdn.triton.forward_pass import Chains, States, run_states
from cp_engine.kernels.gdn.triton.launch import Beside
from cp_engine.kernels.gdn.triton.output import run_output
from cp_engine.kernels.gdn.triton.solve_backward import solve_backward
from cp_engine.kernels.gdn.triton.stages import Stages, in_fragments, with_padding

# Rows of states and of their gradients (1 MiB each with 32 bf16 heads of 128 x 128) that `begin_backward` keeps while
# gradients cross ranks. Of waves beyond that the reverse pass runs twice.
KEPT_ROWS = 4096


def _of_turn(tables: ChainTables, turn: int, exits: bool) -> list[int]:
    return [number for number, wave in enumerate(tables.waves) if wave.turn == turn and wave.exits == exits]


class Forward:
    """The forward after the stages that no other chunk enters, turn by turn."""

    def __init__(self, inputs: Inputs, stages: Stages, tables: ChainTables):
        self._tables, self._stages = tables, stages
        self._q, self._k = in_fragments(inputs.q, tables), in_fragments(inputs.k, tables)
        self._new_v, self._out = torch.empty_like(stages.u), torch.empty_like(stages.u)
        self._zero = inputs.v
        # A wave whose outputs are to be computed, and which of its chains have been walked.
        self._unread: tuple[StatePass, States, Chains] | None = None
        self._left: set[int] = set(range(len(tables.waves)))

    def leaving(self, turn: int, entry_states: torch.Tensor | None) -> torch.Tensor:
        """States of all exits, float32 [X, H, K, V], of which those of this turn are right.

        Args:
            entry_states: float32 [Y, H, K, V], those of this turn among them; None where it needs none.
        """
        tables, u = self._tables, self._stages.u
        shape = (tables.exits, u.shape[1], self._k.shape[2], u.shape[2])
        exits = torch.empty(shape, dtype=torch.float32, device=u.device)
        for number in _of_turn(tables, turn, exits=True):
            states = self._walk(number, entry_states, Chains.OPEN)
            wave = tables.waves[number]
            exits.index_copy_(0, wave.exit, states.slots.index_select(0, wave.exit_slot))
            del states  # before those of the next wave are made
        return exits

    def run(self, turn: int, entry_states: torch.Tensor | None) -> None:
        """What `leaving` has left to do of a turn: all, if it was not called."""
        for exits in (True, False):
            for number in _of_turn(self._tables, turn, exits):
                if number in self._left:
                    self._walk(number, entry_states, Chains.ALL)
        self._read()

    def outputs(self) -> torch.Tensor:
        """o [n, H, V] when all turns have run; rows outside fragments are zero."""
        assert not self._left and self._unread is None
        if not self._tables.chunks:
            return torch.zeros_like(self._zero)
        return with_padding(self._out, self._tables)

    def _walk(self, number: int, entry_states: torch.Tensor | None, chains: Chains) -> States:
        self._read()
        wave = self._tables.waves[number]
        states = States.empty(self._k, self._stages.u, wave)
        self._run_states(entry_states, states, wave, chains)
        self._left.remove(number)
        self._unread = wave, states, chains
        return states

    def _run_states(self, entry_states: torch.Tensor | None, states: States, wave: StatePass, chains: Chains) -> None:
        at, size = self._stages, self._tables.chunk_size
        rows = (self._k, at.w, at.u, at.decay, at.ends)
        run_states(*rows, entry_states, self._new_v, states, wave, size, alone=True, chains=chains)

    def _read(self) -> None:
        if self._unread is None:
            return
        (wave, states, walked), self._unread = self._unread, None
        if walked is Chains.OPEN:
            self._run_states(None, states, wave, Chains.CLOSED)
        run_output(
            self._q, self._k, self._new_v, self._stages.decay, self._tables.ancestors, states.rows, self._out, wave,
            self._tables.chunk_size,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Begun:
    """What both passes over states have computed before gradients cross ranks, of the waves below entries."""

    new_v: torch.Tensor  # [n, H, V] v'
    # Rows of states [R, H, K, V], and the reverse pass; `Backward` takes them out.
    waves: list[tuple[torch.Tensor, HalfAdjoint] | None]


def begin_backward(
    inputs: Inputs,
    stages: Stages,
    dout: torch.Tensor,
    dv_local: torch.Tensor,
    entry_states: torch.Tensor,
    tables: ChainTables,
) -> tuple[torch.Tensor, Begun]:
    """Gradients of the entry states, float32 [Y, H, K, V], when the gradients of all exit states are zero; and what is
    final of the passes by then, as far as it is worth its memory.

    Args:
        dv_local: what `backward_stages` made; its memory takes the gradient of v' where that is final.
        entry_states: float32 [Y, H, K, V].
    """
    q, k, dout = (in_fragments(x, tables) for x in (inputs.q, inputs.k, dout))
    w, u, decay, ends, size = stages.w, stages.u, stages.decay, stages.ends, tables.chunk_size
    dentry = no_entry_gradients(k, u, tables)
    new_v, begun, room = torch.empty_like(u), [], KEPT_ROWS
    for wave in tables.waves:
        if not wave.below:
            begun.append(None)
            continue
        # Of states and of their gradients; gradients that chains start from are float32.
        needed = 2 * wave.rows + 2 * len(wave.chains) * wave.exits
        gradients = partial(begin_adjoint, q, k, w, dout, decay, ends, dv_local, dentry, wave, size)
        if needed > room:
            gradients(keep=False)
            begun.append(None)
            continue
        room -= needed
        states = States.empty(k, u, wave)
        pass_again = partial(run_states, k, w, u, decay, ends, entry_states, new_v, states, wave, size, alone=False)
        beside = Beside(pass_again, k.device)
        half = gradients(keep=True)
        beside.join()
        begun.append((states.rows, half))
        del states, pass_again  # slots, before those of the next wave are made
    return dentry, Begun(new_v, begun)


def no_entry_gradients(k: torch.Tensor, u: torch.Tensor, tables: ChainTables) -> torch.Tensor:
    shape = (tables.entries, u.shape[1], k.shape[2], u.shape[2])
    return torch.zeros(shape, dtype=torch.float32, device=k.device)


class Backward:
    """The backward after the stages that no other chunk enters, from the last turn to the first."""

    def __init__(
        self,
        inputs: Inputs,
        stages: Stages,
        dout: torch.Tensor,
        dv_local: torch.Tensor,
        entry_states: torch.Tensor,
        tables: ChainTables,
        begun: Begun | None,
    ):
        """
        Args:
            dv_local: what `backward_stages` made; its memory takes the gradient of v'.
            entry_states: float32 [Y, H, K, V].
            begun: what `begin_backward` made; None where it was not called.
        """
        self._inputs, self._stages, self._tables, self._entry_states = inputs, stages, tables, entry_states
        self._q, self._k, self._dout = (in_fragments(x, tables) for x in (inputs.q, inputs.k, dout))
        self._dv_local = dv_local
        self._begun = Begun(torch.empty_like(stages.u), [None] * len(tables.waves)) if begun is None else begun
        self._gradients = Gradients.empty(self._k, stages.u.shape[1])
        self._unread: tuple[StatePass, torch.Tensor, torch.Tensor] | None = None  # rows of states and their gradients
        self._left = list(range(len(tables.waves)))

    def entering(self, turn: int, dexit: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        """Gradients of the entry states, float32 [Y, H, K, V], of which those of this turn are right. Each turn has its
        own: those of the turn before may be on their way.

        Args:
            dexit: gives the gradients of the exit states, float32 [X, H, K, V], those of this turn among them; called
                when nothing else is left to do.
        """
        dentry = no_entry_gradients(self._k, self._stages.u, self._tables)
        for exits in (False, True):
            for number in _of_turn(self._tables, turn, exits):
                self._walk(number, dexit, dentry)
        return dentry

    def gradients(self, dexit: Callable[[], torch.Tensor | None]) -> Inputs:
        """Of the inputs, each in the dtype of its input, with the turns that `entering` was not asked for."""
        tables, stages, inputs = self._tables, self._stages, self._inputs
        if not tables.chunks:
            return Inputs(*(torch.zeros_like(x) for x in inputs))
        for number in sorted(self._left, key=lambda number: tables.waves[number].exits):
            self._walk(number, dexit, None)
        self._read()
        grads = self._gradients
        k, v, beta = (in_fragments(x, tables) for x in (inputs.k, inputs.v, inputs.beta))
        dk, dv, dbeta, dg = solve_backward(
            k, v, stages.decay, beta, stages.inverse, tables.ancestors, stages.w, stages.u, grads.dw, self._dv_local,
            grads.dk, grads.dtotal, tables.chunk_rows, tables.chunk_size,
        )  # fmt: skip
        results = (grads.dq, dk, dv, dg, dbeta)
        return Inputs(*(with_padding(grad.to(x.dtype), tables) for grad, x in zip(results, inputs, strict=True)))

    def _walk(self, number: int, dexit: Callable[[], torch.Tensor | None], dentry: torch.Tensor | None) -> None:
        self._read()
        wave, done, at = self._tables.waves[number], self._begun.waves[number], self._stages
        k, size = self._k, self._tables.chunk_size
        self._begun.waves[number] = None
        self._left.remove(number)
        reverse = partial(run_adjoint, self._q, k, at.w, self._dout, at.decay, at.ends, self._dv_local)
        if done is not None:
            rows, half = done
            self._unread = wave, rows, reverse(dexit(), wave, size, half=half) if wave.exits else half.rows
            return
        states = States.empty(k, at.u, wave)
        pass_again = partial(
            run_states, k, at.w, at.u, at.decay, at.ends, self._entry_states, self._begun.new_v, states, wave, size,
            alone=False,
        )  # fmt: skip
        # Neither the states nor their gradients need the other, and either leaves room on the multiprocessors. States
        # do not wait for other ranks either.
        beside = Beside(pass_again, k.device)
        dstates = reverse(dexit() if wave.exits else None, wave, size, dentry=dentry)
        beside.join()
        self._unread = wave, states.rows, dstates

    def _read(self) -> None:
        if self._unread is None:
            return
        (wave, rows, dstates), self._unread = self._unread, None
        dqkwg(
            self._q, self._k, self._begun.new_v, self._stages.decay, self._tables.ancestors, rows, self._dout, dstates,
            self._dv_local, wave, self._tables.chunk_size, self._gradients,
        )  # fmt: skip
