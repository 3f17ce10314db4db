"""The state pass: one program walks the chunks of one chain for some columns of one head's state.

With G the cumulative log2 decay inside a chunk: ``v' = u - w H``, ``H+ = 2^G_C H + k^T (2^(G_C - G) v')``. A chain
starts from its slot (zero, an entry, or the branch point above it) and leaves float32 states at its own branch points.
Columns beyond V belong to A: there u is zero, so that a state [B | A] that starts at [0 | I] becomes the affine map of
the chain, and no chunk's transition is ever built. States that other stages read are kept as rows in the dtype of u.

Shapes: n tokens, Hk key heads, H value heads, K and V head sizes (KP: K padded), C chunk size, S slots, R state rows,
Y entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from cp_engine.kernels.gdn.triton.chain_tables import CHAIN_COLUMNS, CHUNK_COLUMNS, StatePass
from cp_engine.kernels.gdn.triton.launch import state_sizes
from cp_engine.kernels.gdn.triton.primitives import load_columns, load_each, load_rows
from cp_engine.kernels.gdn.triton.tiles import tile_rows, tiles_fit
from cp_engine.kernels.gdn.triton.twigs import run_twigs
from cp_engine.kernels.shared.triton import padded, precision, tl, triton


@triton.jit(do_not_specialize=["first_chain", "slots"])
def _state_kernel(
    k, w, u, decay, ends, states, rows, new_v, chunks, chains, first_chain, slots,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK_COLUMNS: tl.constexpr, CHAIN_COLUMNS: tl.constexpr,
):  # fmt: skip
    chain = chains + (first_chain + tl.program_id(0)) * CHAIN_COLUMNS
    head = tl.program_id(1)
    row, inner = tl.arange(0, C), tl.arange(0, KP)
    # Blocks of columns do not straddle the border between B and A.
    VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    block = tl.program_id(2)
    of_a = block >= VALUE_BLOCKS
    column = (block - tl.where(of_a, VALUE_BLOCKS, 0)) * BV + tl.arange(0, BV)
    live_column = column < tl.where(of_a, COLUMNS - V, V)
    first, count = tl.load(chain), tl.load(chain + 1)
    # Without an entry above there is no A.
    count = tl.where(of_a & (tl.load(chain + 3) == 0), 0, count)
    inside = inner[:, None] * COLUMNS + (column + tl.where(of_a, V, 0))[None, :]
    live_state = (inner < K)[:, None] & live_column[None, :]
    # Conditions of one number are spread over the columns: Triton's interpreters disagree on block & number.
    has_value = live_column & (column * 0 + block < VALUE_BLOCKS)
    slot = tl.cast(tl.load(chain + 2), tl.int64)
    state = tl.load(states + (slot * H + head) * (K * COLUMNS) + inside, mask=live_state, other=0.0)
    # Numbers of the next chunk are loaded a chunk ahead: nothing in the loop waits for an address.
    start = tl.cast(tl.load(chunks + first * CHUNK_COLUMNS), tl.int64)
    tokens = tl.load(chunks + first * CHUNK_COLUMNS + 1)
    slot = tl.load(chunks + first * CHUNK_COLUMNS + 2)
    state_row = tl.load(chunks + first * CHUNK_COLUMNS + 6)
    last = tl.load(ends + first * H + head)
    for i in range(0, count):
        ahead = first + tl.minimum(i + 1, count - 1)
        next_start = tl.cast(tl.load(chunks + ahead * CHUNK_COLUMNS), tl.int64)
        next_tokens = tl.load(chunks + ahead * CHUNK_COLUMNS + 1)
        next_slot = tl.load(chunks + ahead * CHUNK_COLUMNS + 2)
        next_row = tl.load(chunks + ahead * CHUNK_COLUMNS + 6)
        next_last = tl.load(ends + ahead * H + head)
        live = row < tokens
        value_at = start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
        live_value = live[:, None] & live_column[None, :]
        line = tl.cast(start, tl.int32)
        if TILES:
            # Rows beyond the chunk's are those of another one: what comes of them is masked.
            erased = w.load([line, head * K])
        else:
            erased = load_rows(w, start, row, head, inner, live, H, K)
        value = tl.load(u + value_at, mask=live[:, None] & has_value[None, :], other=0.0).to(tl.float32)
        value -= tl.dot(erased, state.to(erased.dtype), input_precision=PRECISION)
        total = load_each(decay, start, row, head, live, H)
        # In a chunk of several fragments the last token may have decayed less than others; nobody reads its state.
        left_value = tl.where(live[:, None], value * tl.exp2(tl.minimum(last - total, 0.0))[:, None], 0.0)
        if TILES:
            keys = tl.trans(k.load([line, head // (H // HK) * K]))
        else:
            # Nobody reads the state that leaves a leaf: its keys stay where they are.
            goes_on = live & (row * 0 + state_row >= 0)
            keys = load_columns(k, start, row, head // (H // HK), inner, goes_on, HK, K)
        state = tl.dot(keys, left_value.to(keys.dtype), state * tl.exp2(last), input_precision=PRECISION)
        if KEEP:
            tl.store(new_v + value_at, value.to(new_v.dtype.element_ty), mask=live_value)
            at = rows + (tl.cast(state_row, tl.int64) * H + head) * (K * V) + inner[:, None] * V + column[None, :]
            tl.store(at, state.to(rows.dtype.element_ty), mask=live_state & (column * 0 + state_row >= 0)[None, :])
        if (slot >= 0) & (slot < slots):
            left = states + (tl.cast(slot, tl.int64) * H + head) * (K * COLUMNS) + inside
            tl.store(left, state, mask=live_state)
        start, tokens, slot, state_row, last = next_start, next_tokens, next_slot, next_row, next_last


class Chains(Enum):
    """Which chains of a wave a pass walks."""

    ALL = "all"
    OPEN = "open"  # those that lead to an exit; their parents do so too
    CLOSED = "closed"  # the others, when those have been walked


@dataclass(frozen=True, eq=False)
class States:
    """Where a state pass writes."""

    slots: torch.Tensor  # float32 [S, H, K, V]
    rows: torch.Tensor  # [R, H, K, V] in the dtype of u; at least one, since no tensor descriptor is empty

    @classmethod
    def empty(cls, k: torch.Tensor, u: torch.Tensor, walk: StatePass) -> States:
        shape = (u.shape[1], k.shape[2], u.shape[2])
        slots = torch.empty((walk.slots, *shape), dtype=torch.float32, device=u.device)
        return cls(slots, u.new_empty((max(1, walk.rows), *shape)))


def run_states(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    decay: torch.Tensor,
    ends: torch.Tensor,
    entry_states: torch.Tensor | None,
    new_v: torch.Tensor,
    states: States,
    walk: StatePass,
    chunk_size: int,
    alone: bool,
    chains: Chains = Chains.ALL,
) -> None:
    """What the output and the backward need of the state pass, for the chunks of one wave: ``states`` and ``new_v``.

    Args:
        k: [n, Hk, K].
        w: [n, H, K].
        u: [n, H, V].
        decay: float32 [n, H] cumulative log2 decay inside each chunk.
        ends: float32 [N, H] that of each chunk's last token.
        entry_states: float32 [Y, H, K, V]; None for a wave that no entry reaches.
        new_v: [n, H, V] takes v'.
        alone: whether no other pass runs at the same time.
    """
    if chains is not Chains.CLOSED:
        states.slots[0] = 0
        if entry_states is not None:
            states.slots[1 : 1 + len(entry_states)] = entry_states
            states.rows[: len(entry_states)] = entry_states
    _launch(k, w, u, decay, ends, states.slots, states.rows, new_v, walk, chunk_size, alone=alone, chains=chains)
    if chains is not Chains.OPEN:
        run_twigs(w, u, states.rows, new_v, walk, chunk_size)


def run_summary(
    k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, decay: torch.Tensor, ends: torch.Tensor, entries: int,
    walk: StatePass, chunk_size: int,
) -> torch.Tensor:  # fmt: skip
    """Affine maps [B | A] of all slots, float32 [S, H, K, V + K]; A only where a slot is below an entry.

    Without entries there is no A: [S, H, K, V]. Arguments as in `run_states`.
    """
    heads, value_dim = u.shape[1:]
    key_dim = k.shape[2]
    columns = value_dim + (key_dim if entries else 0)
    states = torch.empty((walk.slots, heads, key_dim, columns), dtype=torch.float32, device=u.device)
    states[: 1 + entries] = 0
    if entries:
        states[1 : 1 + entries, :, :, value_dim:] = torch.eye(key_dim, dtype=torch.float32, device=u.device)
    _launch(k, w, u, decay, ends, states, None, None, walk, chunk_size, alone=True, chains=Chains.ALL)
    return states


def _launch(
    k, w, u, decay, ends, states, rows, new_v, walk: StatePass, chunk_size: int, *, alone: bool, chains: Chains
) -> None:
    heads, value_dim = u.shape[1:]
    key_heads, key_dim = k.shape[1:]
    columns = states.shape[3]
    tiles = tiles_fit(k, key_dim)
    if tiles and walk.levels:
        k, w = (tile_rows(x, chunk_size, key_dim) for x in (k, w))
    for first, open_end, last in walk.levels:
        begin = open_end if chains is Chains.CLOSED else first
        end = open_end if chains is Chains.OPEN else last
        if begin == end:
            continue
        sizes = state_sizes(key_dim, value_dim, u.dtype, (end - begin) * heads, alone)
        blocks = triton.cdiv(value_dim, sizes.columns) + triton.cdiv(columns - value_dim, sizes.columns)
        _state_kernel[(end - begin, heads, blocks)](
            k, w, u, decay, ends, states, rows, new_v, walk.chunks, walk.chains, begin, walk.slots,
            HK=key_heads, H=heads, K=key_dim, V=value_dim, COLUMNS=columns, KP=padded(key_dim), BV=sizes.columns,
            C=chunk_size, KEEP=rows is not None, TILES=tiles, PRECISION=precision(u.dtype),
            CHUNK_COLUMNS=CHUNK_COLUMNS, CHAIN_COLUMNS=CHAIN_COLUMNS,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
