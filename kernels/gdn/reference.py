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

from typing import NamedTuple

import torch

from cp_engine.kernels.gdn.chunks import ChunkGroup, ChunkTables
from cp_engine.kernels.gdn.state_pass import BackwardStage, Stage, run_adjoint, run_states, run_summary

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


def outputs(inputs: Inputs, stages: list[Stage], entry_states: torch.Tensor, tables: ChunkTables) -> torch.Tensor:
    """o [n, H, V] given the states [Y, H, K, V] at the entries; rows outside fragments are zero."""
    states, new_v = run_states(stages, tables, entry_states)
    padded = inputs.with_zero_row()
    out = torch.zeros_like(padded.v)
    for group, values in zip(tables.groups, new_v, strict=True):
        for block in _blocks(group, inputs.v.shape[1]):
            x = padded.of_chunks(group.rows[block])
            read = _reading(x, *_decays(x.g))
            o = read.query @ states[group.reads[block]] + read.attention @ values[block]
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
    dstates, _ = run_adjoint(stages, backward, tables, None, inputs.zero_state(), only_below_entries=True)
    return dstates[1 : 1 + tables.entries]


def input_gradients(
    inputs: Inputs,
    stages: list[Stage],
    backward: list[BackwardStage],
    entry_states: torch.Tensor,
    dexit: torch.Tensor,
    tables: ChunkTables,
) -> Inputs:
    """Gradients of the inputs, given those of the exit states ``dexit`` [X, H, K, V]."""
    states, new_v = run_states(stages, tables, entry_states)
    dstates, dnew_v = run_adjoint(stages, backward, tables, dexit, inputs.zero_state())
    padded = inputs.with_zero_row()
    grads = Inputs(*(torch.zeros_like(x) for x in padded))
    for group, back, value, dvalue in zip(tables.groups, backward, new_v, dnew_v, strict=True):
        for block in _blocks(group, inputs.v.shape[1]):
            rows = group.rows[block]
            state, dafter = states[group.reads[block]], dstates[group.writes[block]]
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
