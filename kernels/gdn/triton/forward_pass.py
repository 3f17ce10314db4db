"""The state pass: one program walks the chunks of one chain for some columns of one head's state.

With G the cumulative log2 decay inside a chunk: ``v' = u - w H``, ``H+ = 2^G_C H + k^T (2^(G_C - G) v')``. A chain
starts from its slot (zero, an entry, or the branch point above it) and leaves float32 states at its own branch points.
Columns beyond V belong to A: there u is zero, so that a state [B | A] that starts at [0 | I] becomes the affine map of
the chain, and no chunk's transition is ever built. States that other stages read are kept as rows in the dtype of u.

Shapes: n tokens, Hk key heads, H value heads, K and V head sizes (KP: K padded), C chunk size, S slots, R state rows,
Y entries.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.attention.triton.compiler import tl, triton
from cp_engine.kernels.gdn.triton.chain_tables import CHAIN_COLUMNS, CHUNK_COLUMNS, StatePass
from cp_engine.kernels.gdn.triton.primitives import load_columns, load_rows, padded, precision, state_sizes


@triton.jit(do_not_specialize=["first_chain"])
def _state_kernel(
    k, w, u, decay, states, rows, new_v, chunks, chains, first_chain,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
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
    for i in range(0, count):
        chunk = first + i
        start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
        tokens = tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
        slot = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS + 2), tl.int64)
        live = row < tokens
        erased = load_rows(w, start, row, head, inner, live, H, K)
        value_at = start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
        live_value = live[:, None] & live_column[None, :]
        value = tl.load(u + value_at, mask=live[:, None] & has_value[None, :], other=0.0).to(tl.float32)
        value -= tl.dot(erased, state.to(erased.dtype), input_precision=PRECISION)
        if KEEP:
            tl.store(new_v + value_at, value.to(new_v.dtype.element_ty), mask=live_value)
        total = tl.load(decay + start * H + head + row * H, mask=live, other=0.0)
        last = tl.load(decay + (start + tokens - 1) * H + head)
        value = tl.where(live[:, None], value * tl.exp2(last - total)[:, None], 0.0)
        keys = load_columns(k, start, row, head // (H // HK), inner, live, HK, K)
        state = tl.dot(keys, value.to(keys.dtype), state * tl.exp2(last), input_precision=PRECISION)
        left = states + (slot * H + head) * (K * COLUMNS) + inside
        tl.store(left, state, mask=live_state & (column * 0 + slot >= 0)[None, :])
        if KEEP:
            state_row = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS + 6), tl.int64)
            at = rows + (state_row * H + head) * (K * V) + inner[:, None] * V + column[None, :]
            tl.store(at, state.to(rows.dtype.element_ty), mask=live_state & (column * 0 + state_row >= 0)[None, :])


def run_states(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    decay: torch.Tensor,
    entry_states: torch.Tensor | None,
    new_v: torch.Tensor,
    walk: StatePass,
    chunk_size: int,
) -> torch.Tensor:
    """What the output and the backward need of the state pass, for the chunks of one wave.

    Args:
        k: [n, Hk, K].
        w: [n, H, K].
        u: [n, H, V].
        decay: float32 [n, H] cumulative log2 decay inside each chunk.
        entry_states: float32 [Y, H, K, V]; None for a wave that no entry reaches.
        new_v: [n, H, V] takes v'.

    Returns:
        States in rows [R, H, K, V], in the dtype of ``u``.
    """
    heads, value_dim = u.shape[1:]
    shape = (heads, k.shape[2], value_dim)
    states = torch.empty((walk.slots, *shape), dtype=torch.float32, device=u.device)
    rows = u.new_empty((walk.rows, *shape))
    states[0] = 0
    if entry_states is not None:
        states[1 : 1 + len(entry_states)] = entry_states
        rows[: len(entry_states)] = entry_states
    _launch(k, w, u, decay, states, rows, new_v, walk, chunk_size)
    return rows


def run_summary(
    k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, decay: torch.Tensor, entries: int, walk: StatePass,
    chunk_size: int,
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
    _launch(k, w, u, decay, states, None, None, walk, chunk_size)
    return states


def _launch(k, w, u, decay, states, rows, new_v, walk: StatePass, chunk_size: int) -> None:
    heads, value_dim = u.shape[1:]
    key_heads, key_dim = k.shape[1:]
    columns = states.shape[3]
    sizes = state_sizes(value_dim, u.dtype)
    blocks = triton.cdiv(value_dim, sizes.columns) + triton.cdiv(columns - value_dim, sizes.columns)
    for begin, end in walk.levels:
        _state_kernel[(end - begin, heads, blocks)](
            k, w, u, decay, states, rows, new_v, walk.chunks, walk.chains, begin,
            HK=key_heads, H=heads, K=key_dim, V=value_dim, COLUMNS=columns, KP=padded(key_dim), BV=sizes.columns,
            C=chunk_size, KEEP=rows is not None, PRECISION=precision(u.dtype),
            CHUNK_COLUMNS=CHUNK_COLUMNS, CHAIN_COLUMNS=CHAIN_COLUMNS,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
