"""Gradients of k, v, beta and g through w and u, and the end of dk and dg.

With T = (I + A)^-1, ``w = T (b 2^G k)`` and ``u = T (b v)`` (A, D and m: see `inside`)::

    X = T^T dw        dk += b 2^G X        Y = T^T du        dv = b Y
    dA = -(X w^T + Y u^T)  where A is not zero,  E = dA D
    M = b E           dk += (sum over heads of M) k + (sum over heads of M)^T k
    db_i = 2^G_i X_i . k_i + Y_i . v_i + sum_j E_ij k_i . k_j
    dG_i = b_i 2^G_i X_i . k_i + sum_j dA_ij A_ij - sum_j dA_ji A_ji        dg_j = sum_i m_ij dG_i

One program adds up the value heads of a key head. Products with a transposed matrix load it transposed; ``M^T k`` is
``(k^T M)^T``. Formed from w and u, dA takes two products, and none of them waits for another product of pairs; formed
from T alone (``-T^T (dw (b 2^G k)^T + du (b v)^T) T^T``) it takes four, one after the other.

Shapes: n tokens, Hk key heads, H value heads, K and V head sizes (KP, VP: padded), C chunk size.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.gdn.triton.chain_tables import CHUNK_COLUMNS
from cp_engine.kernels.gdn.triton.primitives import (
    decay_between,
    load_columns,
    load_each,
    load_rows,
    load_seen,
    on_hopper,
)
from cp_engine.kernels.shared.triton import padded, precision, tl, triton

WARPS = 8
# Two buffers of the tiles of 128 numbers in 16 bits take 192 of Hopper's 227 KiB; on Ampere the same code spills.
STAGES = 2
LARGEST_TWICE = 128


@triton.jit(do_not_specialize=["tokens_in_all"])
def _solve_backward_kernel(
    k, v, beta, decay, inverse, ancestors, w, u, dw, du, dk_states, dtotal, dk, dv, dbeta, dg, chunks,
    tokens_in_all,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    C: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    row, inner, column = tl.arange(0, C), tl.arange(0, KP), tl.arange(0, VP)
    live = row < tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    seen = load_seen(ancestors, start, row, live)
    above = seen & (row[:, None] != row[None, :])
    keys = load_rows(k, start, row, key_head, inner, live, HK, K)
    keys_t = load_columns(k, start, row, key_head, inner, live, HK, K)
    sum_dk = tl.zeros([C, KP], dtype=tl.float32)
    sum_pairs = tl.zeros([C, C], dtype=tl.float32)
    for member in range(0, H // HK):
        head = key_head * (H // HK) + member
        share = load_each(beta, start, row, head, live, H).to(tl.float32)
        total = load_each(decay, start, row, head, live, H)
        inverse_t = load_columns(inverse, start, row, head, row, live, H, C)
        dvalues = load_rows(du, start, row, head, column, live, H, V)
        values = load_rows(v, start, row, head, column, live, H, V)
        u_t = load_columns(u, start, row, head, column, live, H, V)
        dkeys = load_rows(dw, start, row, head, inner, live, H, K)
        # Read again, and so are products of keys formed again below: held over the loop they would spill.
        keys_again = load_rows(k, start, row, key_head, inner, live, HK, K)
        w_t = load_columns(w, start, row, head, inner, live, H, K)

        through = tl.dot(inverse_t, dvalues, input_precision=PRECISION)
        at = dv + start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
        tl.store(at, (through * share[:, None]).to(dv.dtype.element_ty), mask=live[:, None] & (column < V)[None, :])
        dshare = tl.sum(through * values, 1)
        pairs = tl.dot(through.to(u_t.dtype), u_t, input_precision=PRECISION)
        through = tl.dot(inverse_t, dkeys, input_precision=PRECISION)
        own = tl.sum(through * keys_again, 1) * tl.exp2(total)
        sum_dk += through * (share * tl.exp2(total))[:, None]
        pairs = tl.dot(through.to(w_t.dtype), w_t, pairs, input_precision=PRECISION)
        pairs = -pairs * decay_between(total[:, None], total[None, :], above)
        of_pairs = pairs * tl.dot(keys, keys_t, input_precision=PRECISION)
        dshare += own + tl.sum(of_pairs, 1)
        tl.store(dbeta + start * H + head + row * H, dshare.to(dbeta.dtype.element_ty), mask=live)
        sum_pairs += pairs * share[:, None]
        of_pairs *= share[:, None]
        of_total = own * share + tl.sum(of_pairs, 1) - tl.sum(of_pairs, 0)
        for part in tl.static_range(PARTS):
            of_total += load_each(dtotal + tl.cast(tokens_in_all, tl.int64) * (part * H), start, row, head, live, H)
        below = tl.sum(tl.where(seen, of_total[:, None], 0.0), 0)
        tl.store(dg + start * H + head + row * H, below, mask=live)
    sum_dk += load_rows(dk_states, start, row, key_head, inner, live, HK, K)
    of_pairs_k = sum_pairs.to(keys.dtype)
    sum_dk = tl.dot(of_pairs_k, keys, sum_dk, input_precision=PRECISION)
    sum_dk += tl.trans(tl.dot(keys_t, of_pairs_k, input_precision=PRECISION))
    at = dk + start * (HK * K) + key_head * K + row[:, None] * (HK * K) + inner[None, :]
    tl.store(at, sum_dk.to(dk.dtype.element_ty), mask=live[:, None] & (inner < K)[None, :])


def solve_backward(
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    inverse: torch.Tensor,
    ancestors: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    dk_states: torch.Tensor,
    dtotal: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of k [n, Hk, K], v [n, H, V], beta [n, H] and the log decay g (float32 [n, H]).

    Args:
        decay: float32 [n, H] cumulative log2 decay inside each chunk.
        inverse: [n, H, C] T of each chunk.
        w: [n, H, K]; ``dw`` alike.
        u: [n, H, V]; ``du`` alike.
        dk_states: float32 [n, Hk, K], the other terms of dk.
        dtotal: float32 [parts, n, H], the other terms of the gradient of the cumulative (natural) log decay.
    """
    (heads, value_dim), (key_heads, key_dim) = v.shape[1:], k.shape[1:]
    dk, dv, dbeta = torch.empty_like(k), torch.empty_like(v), torch.empty_like(beta)
    dg = torch.empty_like(decay)
    twice = k.element_size() == 2 and max(key_dim, value_dim) <= LARGEST_TWICE and on_hopper(k.device)
    _solve_backward_kernel[(len(chunks), key_heads)](
        k, v, beta, decay, inverse, ancestors, w, u, dw, du, dk_states, dtotal, dk, dv, dbeta, dg, chunks, len(k),
        HK=key_heads, H=heads, K=key_dim, V=value_dim, KP=padded(key_dim), VP=padded(value_dim), C=chunk_size,
        PARTS=len(dtotal), PRECISION=precision(k.dtype), CHUNK_COLUMNS=CHUNK_COLUMNS,
        num_warps=WARPS, num_stages=STAGES if twice else 1,
    )  # fmt: skip
    return dk, dv, dbeta, dg
