"""The gated delta rule over a forest of chunks, staged, in eager torch (any device, float32 and float64).

Token step of a value head: ``H_t = a_t (I - b_t k_t^T k_t) H_{t-1} + b_t k_t^T v_t``, ``o_t = s q_t H_t`` with
``a = e^g`` and ``s = K^-1/2``. In a chunk with cumulative log decay G, ``D_ij = e^{G_i - G_j}`` for j <= i and
``L_ij = b_i (k_i . k_j) D_ij`` for j < i:

    w = (I + L)^-1 (b e^G k)    u = (I + L)^-1 (b v)    carried k = e^{G_C - G_i} k_i    decay = e^{G_C}
    v' = u - w H                o = s e^G q H + s ((q k^T) D) v'

(Yang et al., "Gated Delta Networks", 2024.) Everything but the state pass is independent of the tree and runs batched
over all chunks, in blocks of bounded memory; its gradient is a local autograd over a recomputation of each block.

Shapes: n rows, Hk key heads, H value heads, B chunks of a block, C chunk width, K and V head sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cp_engine.kernels.gdn.chunks import ChunkGroup, ChunkTables
from cp_engine.kernels.gdn.state_pass import BackwardStage, ForwardStates, ReverseStates, Stage, run_summary

# Elements of one [B, H, C, C] matrix of a block: 4 MiB in float64, which stays near the caches.
BLOCK_ELEMENTS = 1 << 19


class Inputs(NamedTuple):
    """Rows of one rank in the accumulation dtype; q and k are L2-normalised, q not yet scaled."""

    q: torch.Tensor  # [n, Hk, K]
    k: torch.Tensor  # [n, Hk, K]
    v: torch.Tensor  # [n, H, V]
    g: torch.Tensor  # [n, H] log decay, at most 0
    beta: torch.Tensor  # [n, H]

    def with_zero_row(self) -> Inputs:
        """Append the row that chunk padding points to: it neither decays nor writes."""
        return Inputs(*(torch.cat([x, x.new_zeros((1, *x.shape[1:]))]) for x in self))

    def zero_state(self) -> torch.Tensor:
        """[H, K, V]."""
        return self.v.new_zeros((self.v.shape[1], self.k.shape[2], self.v.shape[2]))

    def of_chunks(self, rows: torch.Tensor) -> Inputs:
        """Heads before tokens: [B, C] -> q, k [B, Hk, C, K], v [B, H, C, V], g, beta [B, H, C]."""
        return Inputs(*(x[rows].transpose(1, 2) for x in self))


class _Within(NamedTuple):
    """Quantities of a block of chunks that no other chunk enters."""

    w: torch.Tensor  # [B, H, C, K]
    u: torch.Tensor  # [B, H, C, V]
    carried_k: torch.Tensor  # [B, H, C, K]
    decay: torch.Tensor  # [B, H]


class _Reading(NamedTuple):
    query: torch.Tensor  # [B, H, C, K] s e^G q
    attention: torch.Tensor  # [B, H, C, C] s (q k^T) D


def _blocks(group: ChunkGroup, heads: int) -> list[slice]:
    size = max(1, BLOCK_ELEMENTS // (heads * group.width**2))
    return [slice(lo, lo + size) for lo in range(0, len(group.rows), size)]


def _decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative log decay G [B, H, C] and D [B, H, C, C]."""
    total = g.cumsum(-1)
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    # Masked before the exponential: above the diagonal it may overflow.
    return total, (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


def _within(x: Inputs, total: torch.Tensor, decays: torch.Tensor) -> _Within:
    repeat = x.v.shape[1] // x.k.shape[1]
    k = x.k.repeat_interleave(repeat, 1)
    beta = x.beta[..., None]
    products = (x.k @ x.k.mT).repeat_interleave(repeat, 1)
    lower = beta * products * decays
    right = torch.cat([beta * total.exp()[..., None] * k, beta * x.v], dim=-1)
    # Reads only what stands below the diagonal.
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], x.v.shape[-1]], dim=-1)
    return _Within(w, u, (total[..., -1:] - total).exp()[..., None] * k, total[..., -1].exp())


def _reading(x: Inputs, total: torch.Tensor, decays: torch.Tensor) -> _Reading:
    repeat = x.v.shape[1] // x.k.shape[1]
    q = x.q * x.q.shape[-1] ** -0.5
    query = total.exp()[..., None] * q.repeat_interleave(repeat, 1)
    return _Reading(query, (q @ x.k.mT).repeat_interleave(repeat, 1) * decays)


def chunk_stages(inputs: Inputs, tables: ChunkTables) -> list[Stage]:
    """The tree-independent half of the forward, once over all chunks."""
    padded, stages = inputs.with_zero_row(), []
    for group in tables.groups:
        parts = []
        for block in _blocks(group, inputs.v.shape[1]):
            x = padded.of_chunks(group.rows[block])
            parts.append(_within(x, *_decays(x.g)))
        stages.append(Stage(*(torch.cat(column) for column in zip(*parts, strict=True))))
    return stages


def exit_summary(inputs: Inputs, stages: list[Stage], tables: ChunkTables) -> tuple[torch.Tensor, torch.Tensor]:
    """B [X, H, K, V] of every exit and A [XA, H, K, K] of the exits below an entry."""
    return run_summary(stages, tables, inputs.zero_state())


class Forward:
    """The forward after the stages that no other chunk enters, turn by turn."""

    def __init__(self, inputs: Inputs, stages: list[Stage], tables: ChunkTables):
        self._inputs, self._tables = inputs, tables
        self._pass = ForwardStates(stages, tables, inputs.zero_state())
        self._done: set[int] = set()

    def leaving(self, turn: int, entry_states: torch.Tensor | None) -> torch.Tensor:
        """States of all exits [X, H, K, V], of which those of this turn and of earlier ones are right."""
        self.run(turn, entry_states)
        return self._pass.states[self._tables.exit_slot]

    def run(self, turn: int, entry_states: torch.Tensor | None) -> None:
        """What `leaving` has left to do of a turn."""
        if turn not in self._done:
            self._pass.run(turn, entry_states)
        self._done.add(turn)

    def outputs(self) -> torch.Tensor:
        """o [n, H, V] when all turns have run; rows outside fragments are zero."""
        padded = self._inputs.with_zero_row()
        out = torch.zeros_like(padded.v)
        for group, values in zip(self._tables.groups, self._pass.new_v, strict=True):
            for block in _blocks(group, self._inputs.v.shape[1]):
                x = padded.of_chunks(group.rows[block])
                read = _reading(x, *_decays(x.g))
                o = read.query @ self._pass.states[group.reads[block]] + read.attention @ values[block]
                out[group.rows[block]] = o.transpose(1, 2)
        return out[:-1]


def backward_stages(inputs: Inputs, dout: torch.Tensor, tables: ChunkTables) -> list[BackwardStage]:
    """The tree-independent half of the backward before the reverse state pass; ``dout`` [n, H, V]."""
    padded, stages = inputs.with_zero_row(), []
    dout = torch.cat([dout, dout.new_zeros((1, *dout.shape[1:]))])
    for group in tables.groups:
        parts = []
        for block in _blocks(group, inputs.v.shape[1]):
            x = padded.of_chunks(group.rows[block])
            read = _reading(x, *_decays(x.g))
            do = dout[group.rows[block]].transpose(1, 2)
            parts.append((read.query, do, read.attention.mT @ do))
        stages.append(BackwardStage(*(torch.cat(column) for column in zip(*parts, strict=True))))
    return stages


def entry_cotangents(
    inputs: Inputs, stages: list[Stage], backward: list[BackwardStage], tables: ChunkTables
) -> torch.Tensor:
    """Gradients of the entry states [Y, H, K, V] when the gradients of all exit states are zero."""
    reverse = ReverseStates(stages, backward, tables, inputs.zero_state())
    for turn in range(1, len(tables.exits_of)):
        reverse.run(turn, None)
    return reverse.dstates[1 : 1 + tables.entries]


class Backward:
    """The backward after the stages that no other chunk enters, from the last turn to the first."""

    def __init__(
        self,
        inputs: Inputs,
        stages: list[Stage],
        backward: list[BackwardStage],
        entry_states: torch.Tensor,
        tables: ChunkTables,
    ):
        self._inputs, self._backward, self._tables = inputs, backward, tables
        self._forward = ForwardStates(stages, tables, inputs.zero_state())
        for turn in range(len(tables.exits_of)):
            self._forward.run(turn, entry_states)
        self._reverse = ReverseStates(stages, backward, tables, inputs.zero_state())
        self._left = len(tables.exits_of)  # turns

    def entering(self, turn: int, dexit: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        """Gradients of all entry states [Y, H, K, V], of which those of this turn are right.

        Args:
            dexit: gives the gradients of the exit states [X, H, K, V], those of this turn among them.
        """
        if turn < self._left:
            self._reverse.run(turn, dexit())
            self._left = turn
        return self._reverse.dstates[1 : 1 + self._tables.entries]

    def gradients(self, dexit: Callable[[], torch.Tensor | None]) -> Inputs:
        """Of the inputs, with the turns that `entering` was not asked for."""
        for turn in reversed(range(self._left)):
            self._reverse.run(turn, dexit())
        inputs, forward, reverse = self._inputs, self._forward, self._reverse
        padded = inputs.with_zero_row()
        grads = Inputs(*(torch.zeros_like(x) for x in padded))
        each = zip(self._tables.groups, self._backward, forward.new_v, reverse.dnew_v, strict=True)
        for group, back, value, dvalue in each:
            for block in _blocks(group, inputs.v.shape[1]):
                rows = group.rows[block]
                state, dafter = forward.states[group.reads[block]], reverse.dstates[group.writes[block]]
                cotangents = (
                    -dvalue[block] @ state.mT,
                    dvalue[block],
                    value[block] @ dafter.mT,
                    (state * dafter).sum((-1, -2)),
                    back.dout[block] @ state.mT,
                    back.dout[block] @ value[block].mT,
                )
                for total, part in zip(grads, _block_gradients(padded.of_chunks(rows), cotangents), strict=True):
                    total[rows] = part.transpose(1, 2)
        return Inputs(*(x[:-1] for x in grads))


def _block_gradients(x: Inputs, cotangents: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Pull the gradients of w, u, carried k, decay, query and attention back to a block's inputs."""
    with torch.enable_grad():
        leaf = Inputs(*(part.detach().requires_grad_() for part in x))
        total, decays = _decays(leaf.g)
        staged = (*_within(leaf, total, decays), *_reading(leaf, total, decays))
    return torch.autograd.grad(staged, leaf, cotangents)
