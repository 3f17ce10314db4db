"""Gradients of k, v, beta and g through w and u, and the end of dk and dg.

With T = (I + A)^-1, ``w = T (b 2^G k)`` and ``u = T (b v)`` (A, D and m: see `inside`)::

    X = T^T dw        dk += b 2^G X        Y = T^T du        dv = b Y
    dA = -T^T (dw (b 2^G k)^T + du (b v)^T) T^T  where A is not zero,  E = dA D
    M = b E           dk += (sum over heads of M) k + (sum over heads of M)^T k
    db_i = 2^G_i X_i . k_i + Y_i . v_i + sum_j E_ij k_i . k_j
    dG_i = b_i 2^G_i X_i . k_i + sum_j dA_ij A_ij - sum_j dA_ji A_ji        dg_j = sum_i m_ij dG_i

One program adds up the value heads of a key head. Products with a transposed matrix load it transposed; ``M^T k`` is
``(k^T M)^T``; ``X_i . k_i`` is column i of T times ``dw k^T``, summed, and ``Y_i . v_i`` alike.

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
)
from cp_engine.kernels.gdn.triton.solve_backward_from_solutions import solve_backward_from_solutions_kernel
from cp_engine.kernels.shared.triton import padded, precision, tl, triton

WARPS = 8
STAGES = 2
FROM_SOLUTIONS = False  # `solve_backward_from_solutions`


@triton.jit(do_not_specialize=["tokens_in_all"])
def _solve_backward_kernel(
    k, v, beta, decay, inverse, ancestors, dw, du, dk_states, dtotal, dk, dv, dbeta, dg, chunks, tokens_in_all,
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
    similar = tl.dot(keys, keys_t, input_precision=PRECISION)
    sum_dk = load_rows(dk_states, start, row, key_head, inner, live, HK, K)
    sum_pairs = tl.zeros([C, C], dtype=tl.float32)
    for member in range(0, H // HK):
        head = key_head * (H // HK) + member
        share = load_each(beta, start, row, head, live, H).to(tl.float32)
        total = load_each(decay, start, row, head, live, H)
        erasing = share * tl.exp2(total)
        inverse_t = load_columns(inverse, start, row, head, row, live, H, C)
        dvalues = load_rows(du, start, row, head, column, live, H, V)
        through_u = tl.dot(inverse_t, dvalues, input_precision=PRECISION)
        at = dv + start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
        live_value = live[:, None] & (column < V)[None, :]
        tl.store(at, (through_u * share[:, None]).to(dv.dtype.element_ty), mask=live_value)
        values_t = load_columns(v, start, row, head, column, live, H, V)
        product = tl.dot(dvalues, values_t, input_precision=PRECISION)
        solved = load_rows(inverse, start, row, head, row, live, H, C)
        dshare = tl.sum(product * solved, 0)
        dinverse = product * share[None, :]
        dkeys = load_rows(dw, start, row, head, inner, live, H, K)
        product = tl.dot(dkeys, keys_t, input_precision=PRECISION)
        own = tl.sum(product * solved, 0)
        dshare += own * tl.exp2(total)
        dinverse = tl.where(above, dinverse + product * erasing[None, :], 0.0)
        sum_dk += tl.dot(inverse_t, dkeys, input_precision=PRECISION) * erasing[:, None]
        half = tl.dot(dinverse.to(inverse_t.dtype), inverse_t, input_precision=PRECISION)
        pairs = tl.dot(inverse_t, half.to(inverse_t.dtype), input_precision=PRECISION)
        pairs = -pairs * decay_between(total[:, None], total[None, :], above)
        dshare += tl.sum(pairs * similar, 1)
        tl.store(dbeta + start * H + head + row * H, dshare.to(dbeta.dtype.element_ty), mask=live)
        pairs *= share[:, None]
        sum_pairs += pairs

        # Both terms of a pair's decay in the layout [i, j], then the sums over the tokens below.
        of_pairs = pairs * similar
        of_total = own * erasing + tl.sum(of_pairs, 1) - tl.sum(of_pairs, 0)
        for part in tl.static_range(PARTS):
            of_total += load_each(dtotal + tl.cast(tokens_in_all, tl.int64) * (part * H), start, row, head, live, H)
        below = tl.sum(tl.where(seen, of_total[:, None], 0.0), 0)
        tl.store(dg + start * H + head + row * H, below, mask=live)
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
    kernel = solve_backward_from_solutions_kernel if FROM_SOLUTIONS else _solve_backward_kernel
    solutions = (w, u) if FROM_SOLUTIONS else ()
    kernel[(len(chunks), key_heads)](
        k, v, beta, decay, inverse, ancestors, *solutions, dw, du, dk_states, dtotal, dk, dv, dbeta, dg, chunks, len(k),
        HK=key_heads, H=heads, K=key_dim, V=value_dim, KP=padded(key_dim), VP=padded(value_dim), C=chunk_size,
        PARTS=len(dtotal), PRECISION=precision(k.dtype), CHUNK_COLUMNS=CHUNK_COLUMNS,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return dk, dv, dbeta, dg
