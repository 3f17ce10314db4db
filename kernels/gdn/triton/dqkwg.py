"""Gradients of q, k, w and of the decays through the output and the state pass, chunk by chunk.

Two kernels: `dqkwg_tiles` where tensor descriptors can stand for the rows, and the one here for everything else.

With G the cumulative log2 decay inside a chunk, D_ij = 2^(G_i - G_j) for j <= i, s = K^-1/2, H the state entering the
chunk and dH+ the gradient of the one leaving it::

    dw = -dv' H^T                    dS = s D (dO v'^T)
    dq = s 2^G (dO H^T) + dS k       dk = dS^T q + dR  with  dR = 2^(G_C - G) (v' dH+^T)
    dG_i = q_i . dq_i - k_i . dk_i   and at the last token also  sum_j k_j . dR_j + 2^G_C sum(H dH+)

(dG in units of the natural logarithm; in a chunk of several fragments D is zero unless j is above i on its root path.)
``dS^T q`` is computed as ``(q^T dS)^T``: with Triton 3.4 to 3.7.0 a product whose operand is transposed in registers is
wrong on Hopper.

Shapes: n rows, Hk key heads, H value heads, K and V head sizes, N chunks, C chunk size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.kernels.gdn.triton.chain_tables import CHUNK_COLUMNS, StatePass
from cp_engine.kernels.gdn.triton.dqkwg_tiles import dqkwg_tiles_kernel
from cp_engine.kernels.gdn.triton.primitives import decay_between, load_columns, load_each, load_rows, load_seen
from cp_engine.kernels.gdn.triton.tiles import tile_rows, tile_states, tiles_fit
from cp_engine.kernels.shared.triton import padded, precision, tl, triton

# One program adds up the value heads of a key head.
BLOCK_KEYS = 64
BLOCK_VALUES = 64  # with tiles all values are one block
WARPS = 8
STAGES = 2
# Of the kernel without tiles two programs share a multiprocessor's 65,536 registers: another one hides the loads at the
# start and the end of each.
REGISTERS = 65536 // (2 * 32 * WARPS)


@triton.jit(do_not_specialize=["tokens_in_all"])
def _dqkwg_kernel(
    q, k, new_v, decay, ancestors, states, dout, dstates, dnew_v, dq, dk, dw, dg, chunks, members, tokens_in_all, scale,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, key_head = tl.load(members + tl.program_id(0)), tl.program_id(1)
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    tokens = tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    enters = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS + 5), tl.int64)
    leaves = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS + 6), tl.int64)
    row, inner = tl.arange(0, C), tl.program_id(2) * BK + tl.arange(0, BK)
    live = row < tokens
    live_out = live[:, None] & (inner < K)[None, :]
    sum_dq, sum_dk = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    for member in range(0, H // HK):
        head = key_head * (H // HK) + member
        dqueries, dkeys = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
        derased = tl.zeros([C, BK], dtype=tl.float32)
        scores = tl.zeros([C, C], dtype=tl.float32)
        dlast = tl.zeros([BV], dtype=tl.float32)
        for block in range(0, tl.cdiv(V, BV)):
            column = block * BV + tl.arange(0, BV)
            grads = load_rows(dout, start, row, head, column, live, H, V)
            values = load_rows(new_v, start, row, head, column, live, H, V)
            dvalues = load_rows(dnew_v, start, row, head, column, live, H, V)
            at = head * (K * V) + inner[None, :] * V + column[:, None]
            live_state = (inner < K)[None, :] & (column < V)[:, None]
            # No row: a zero state enters, or nobody reads the state that leaves.
            live_h = live_state & (column * 0 + enters >= 0)[:, None]
            live_dh = live_state & (column * 0 + leaves >= 0)[:, None]
            h = tl.load(states + enters * (H * K * V) + at, mask=live_h, other=0.0)  # [BV, BK]
            dh = tl.load(dstates + leaves * (H * K * V) + at, mask=live_dh, other=0.0)
            dlast += tl.sum(h.to(tl.float32) * dh.to(tl.float32), 1)
            dqueries = tl.dot(grads, h, dqueries, input_precision=PRECISION)
            dkeys = tl.dot(values, dh, dkeys, input_precision=PRECISION)
            derased = tl.dot(dvalues, h, derased, input_precision=PRECISION)
            values_t = load_columns(new_v, start, row, head, column, live, H, V)
            scores = tl.dot(grads, values_t, scores, input_precision=PRECISION)
        out = start * (H * K) + head * K + row[:, None] * (H * K) + inner[None, :]
        tl.store(dw + out, (-derased).to(dw.dtype.element_ty), mask=live_out)

        total = load_each(decay, start, row, head, live, H)
        last = tl.load(decay + (start + tokens - 1) * H + head)
        seen = load_seen(ancestors, start, row, live)
        scores *= decay_between(total[:, None], total[None, :], seen) * scale
        queries = load_rows(q, start, row, key_head, inner, live, HK, K)
        keys = load_rows(k, start, row, key_head, inner, live, HK, K)
        # In a chunk of several fragments the last token may have decayed less than others.
        dkeys *= tl.where(live, tl.exp2(tl.minimum(last - total, 0.0)), 0.0)[:, None]
        dlast_token = tl.sum(tl.sum(keys * dkeys, 1), 0)
        dlast_token += tl.exp2(last) * tl.sum(dlast, 0)
        dqueries *= (tl.exp2(total) * scale)[:, None]
        dqueries = tl.dot(scores.to(keys.dtype), keys, dqueries, input_precision=PRECISION)
        queries_t = load_columns(q, start, row, key_head, inner, live, HK, K)
        dkeys += tl.trans(tl.dot(queries_t, scores.to(keys.dtype), input_precision=PRECISION))
        dtotal = tl.sum(queries * dqueries, 1) - tl.sum(keys * dkeys, 1)
        dtotal += tl.where(row == tokens - 1, dlast_token, 0.0)
        part = tl.cast(tl.program_id(2), tl.int64) * tokens_in_all + start
        tl.store(dg + part * H + head + row * H, dtotal, mask=live)
        sum_dq += dqueries
        sum_dk += dkeys
    out = start * (HK * K) + key_head * K + row[:, None] * (HK * K) + inner[None, :]
    tl.store(dq + out, sum_dq.to(dq.dtype.element_ty), mask=live_out)
    tl.store(dk + out, sum_dk, mask=live_out)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients through outputs and state pass; those through w and u (from dw and dnew_v) come on top."""

    dq: torch.Tensor  # [n, Hk, K] in the dtype of k
    dk: torch.Tensor  # float32 [n, Hk, K]
    dw: torch.Tensor  # [n, H, K] in the dtype of k
    dtotal: torch.Tensor  # float32 [parts, n, H] of the cumulative (natural) log decay, to be summed

    @classmethod
    def empty(cls, k: torch.Tensor, heads: int) -> Gradients:
        tokens, _, key_dim = k.shape
        parts = triton.cdiv(key_dim, _block_keys(key_dim))
        dtotal = torch.empty((parts, tokens, heads), dtype=torch.float32, device=k.device)
        dk = torch.empty_like(k, dtype=torch.float32)
        return cls(torch.empty_like(k), dk, k.new_empty((tokens, heads, key_dim)), dtotal)


def _block_keys(key_dim: int) -> int:
    return min(BLOCK_KEYS, padded(key_dim))


def dqkwg(
    q: torch.Tensor,
    k: torch.Tensor,
    new_v: torch.Tensor,
    decay: torch.Tensor,
    ancestors: torch.Tensor,
    states: torch.Tensor,
    dout: torch.Tensor,
    dstates: torch.Tensor,
    dnew_v: torch.Tensor,
    walk: StatePass,
    chunk_size: int,
    out: Gradients,
) -> None:
    """Fill in ``out`` for the chunks of one wave.

    Args:
        q: [n, Hk, K], not scaled; k alike.
        new_v: [n, H, V] v'; ``dout`` and ``dnew_v`` alike.
        decay: float32 [n, H] cumulative log2 decay inside each chunk.
        ancestors: int64 [n] of the tables.
        states: [R, H, K, V] in rows; ``dstates`` alike, their gradients.
    """
    tokens, heads, value_dim = new_v.shape
    key_heads, key_dim = k.shape[1:]
    common = {
        "HK": key_heads, "H": heads, "K": key_dim, "V": value_dim, "BK": _block_keys(key_dim), "C": chunk_size,
        "PRECISION": precision(k.dtype), "CHUNK_COLUMNS": CHUNK_COLUMNS, "num_warps": WARPS, "num_stages": STAGES,
    }  # fmt: skip
    parts, results = len(out.dtotal), (out.dq, out.dk, out.dw, out.dtotal)
    if tiles_fit(k, value_dim, key_dim):
        new_v, dout, dnew_v = (tile_rows(x, chunk_size, value_dim) for x in (new_v, dout, dnew_v))
        states, dstates = (tile_states(x, _block_keys(key_dim), value_dim) for x in (states, dstates))
        kernel = dqkwg_tiles_kernel[(len(walk.members) * key_heads * parts,)]
    else:
        kernel = _dqkwg_kernel[(len(walk.members), key_heads, parts)]
        common |= {"BV": min(BLOCK_VALUES, padded(value_dim)), "maxnreg": REGISTERS}
    kernel(
        q, k, new_v, decay, ancestors, states, dout, dstates, dnew_v, *results,
        walk.chunks, walk.members, tokens, key_dim**-0.5, **common,
    )  # fmt: skip
