"""The state pass over a forest of chunks and its adjoint: the only stages that know the tree.

Equations (one value head, chunk of C tokens, entry state H):
``v' = u - w H``, ``H+ = gamma H + K~^T v'``; backward ``dv' = dv'_local + K~ dH+`` and
``dH = gamma dH+ + (s e^G q)^T dO - w^T dv'``. A parent's dH+ is the sum of its children's dH.

Every step runs all chunks of one level as one batched product. Trees of one turn need states of their own and of the
entries only, so that a pass goes turn by turn where states are handed on from rank to rank.

Shapes: N chunks of a group, H value heads, C chunk width, K and V head sizes, S slots, Y entries, X exits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.kernels.gdn.chunks import ChunkTables, Step


@dataclass(frozen=True, eq=False)
class Stage:
    """What the state pass needs of one group of chunks."""

    w: torch.Tensor  # [N, H, C, K]
    u: torch.Tensor  # [N, H, C, V]
    carried_k: torch.Tensor  # [N, H, C, K] keys decayed to the end of the chunk
    decay: torch.Tensor  # [N, H] decay over the whole chunk


@dataclass(frozen=True, eq=False)
class BackwardStage:
    """What the adjoint of the state pass needs of one group besides its `Stage`."""

    query: torch.Tensor  # [N, H, C, K] scaled queries, decayed from the start of the chunk
    dout: torch.Tensor  # [N, H, C, V]
    dv_local: torch.Tensor  # [N, H, C, V] gradient of v' through outputs of the same chunk


def place_entry_states(states: torch.Tensor, entry_states: torch.Tensor) -> None:
    """Put the states that arrived from other ranks [Y, H, K, V] into their slots."""
    states[1 : 1 + len(entry_states)] = entry_states


def read_states(states: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """The state that each chunk starts from: its predecessor's, its parent fragment's, an entry's or zero."""
    return states[reads]


def add_to_parents(dstates: torch.Tensor, reads: torch.Tensor, dstate: torch.Tensor) -> None:
    """Add the children's state gradients to their parents' slots, in the order of the chunks (on a CPU)."""
    dstates.index_add_(0, reads, dstate)


def _advance(stage: Stage, state: torch.Tensor, begin: int, end: int, with_values: bool = True):
    """v' and H+ of chunks [begin, end) from their entry states."""
    part = slice(begin, end)
    new_v = -(stage.w[part] @ state)
    if with_values:
        new_v += stage.u[part]
    return new_v, stage.decay[part, :, None, None] * state + stage.carried_k[part].mT @ new_v


class ForwardStates:
    """The forward pass: states in slots [S, H, K, V] and v' of each group [N, H, C, V]."""

    def __init__(self, stages: list[Stage], tables: ChunkTables, zero: torch.Tensor):
        self.states = zero.new_empty((tables.slots, *zero.shape))
        self.states[0] = 0
        self.new_v = [torch.empty_like(stage.u) for stage in stages]
        self._stages, self._tables = stages, tables

    def run(self, turn: int, entry_states: torch.Tensor | None) -> None:
        """The chunks of a turn.

        Args:
            entry_states: [Y, H, K, V], those that the turn needs among them; None for turn 0.
        """
        if entry_states is not None:
            place_entry_states(self.states, entry_states)
        for step in self._tables.steps:
            if self._tables.groups[step.group].turn == turn:
                self._step(step)

    def _step(self, step: Step) -> None:
        stage, new_v, part = self._stages[step.group], self.new_v[step.group], slice(step.begin, step.end)
        state = read_states(self.states, self._tables.groups[step.group].reads[part])
        writing = step.state_end - step.begin
        value, after = _advance(stage, state[:writing], step.begin, step.state_end)
        self.states[step.slot : step.slot + writing] = after
        rest = slice(step.state_end, step.end)
        new_v[step.begin : step.state_end] = value
        new_v[rest] = stage.u[rest] - stage.w[rest] @ state[writing:]


def run_summary(stages: list[Stage], tables: ChunkTables, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Affine maps of the exits, ``H_exit = A H_entry + B``, over the chunks that lead to an exit.

    A is advanced in the delta form (the state pass without values, from the identity), which never builds a chunk's
    transition matrix.

    Args:
        zero: [H, K, V] a zero state.

    Returns:
        B [X, H, K, V] of all exits; A [XA, H, K, K] of those below an entry.
    """
    heads, key_dim, _ = zero.shape
    offset = zero.new_empty((tables.slots, *zero.shape))
    offset[: 1 + tables.entries] = 0
    transition = zero.new_empty((tables.slots if len(tables.through_slot) else 1, heads, key_dim, key_dim))
    if len(tables.through_slot):
        transition[1 : 1 + tables.entries] = torch.eye(key_dim, dtype=zero.dtype, device=zero.device)
    for step in tables.steps:
        if step.exit_end == step.begin:
            continue
        stage, group = stages[step.group], tables.groups[step.group]
        reads = group.reads[step.begin : step.exit_end]
        slots = slice(step.slot, step.slot + step.exit_end - step.begin)
        offset[slots] = _advance(stage, read_states(offset, reads), step.begin, step.exit_end)[1]
        if group.turn:
            state = read_states(transition, reads)
            transition[slots] = _advance(stage, state, step.begin, step.exit_end, with_values=False)[1]
    return offset[tables.exit_slot], transition[tables.through_slot]


class ReverseStates:
    """The reverse pass: gradients of the states in slots [S + 1, H, K, V], whose last one is zero (so that ``writes``
    indexes it), and the gradient of v' of each group [N, H, C, V]."""

    def __init__(self, stages: list[Stage], backward: list[BackwardStage], tables: ChunkTables, zero: torch.Tensor):
        self.dstates = zero.new_zeros((tables.slots + 1, *zero.shape))
        self.dnew_v = [torch.empty_like(part.dv_local) for part in backward]
        self._stages, self._backward, self._tables = stages, backward, tables

    def run(self, turn: int, dexit: torch.Tensor | None) -> None:
        """The chunks of a turn, when those of later turns have run.

        Args:
            dexit: [X, H, K, V] gradients of the exit states, of which it reads its own; None for zero.
        """
        tables = self._tables
        if dexit is not None:
            mine = tables.exits_of[turn]
            self.dstates.index_add_(0, tables.exit_slot[mine], dexit[mine])
        for step in reversed(tables.steps):
            if tables.groups[step.group].turn == turn:
                self._step(step)

    def _step(self, step: Step) -> None:
        group, dstates = self._tables.groups[step.group], self.dstates
        stage, back, part = self._stages[step.group], self._backward[step.group], slice(step.begin, step.end)
        writing = step.state_end - step.begin
        wrote = slice(step.begin, step.state_end)
        dafter = dstates[step.slot : step.slot + writing]
        dvalue = back.dv_local[part].clone()
        dvalue[:writing] += stage.carried_k[wrote] @ dafter
        dstate = back.query[part].mT @ back.dout[part] - stage.w[part].mT @ dvalue
        dstate[:writing] += stage.decay[wrote, :, None, None] * dafter
        add_to_parents(dstates, group.reads[part], dstate)
        self.dnew_v[step.group][part] = dvalue
