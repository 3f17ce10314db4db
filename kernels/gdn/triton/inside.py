"""Stages inside a chunk: cumulative decays, the matrix that the solve inverts, and the gradient of v' through outputs.

With m_ij = 1 where token j is i or above it on i's root path (in a chunk of one fragment: j <= i), g in the log2
domain::

    G_i = sum_j m_ij g_j       D_ij = m_ij 2^(G_i - G_j)
    A_ij = b_i (k_i . k_j) D_ij for j != i       dv'_local = s ((q k^T) D)^T dO

Shapes: n tokens, N chunks, Hk key heads, H value heads, K and V head sizes, C chunk size.
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
    load_seers,
)
from cp_engine.kernels.shared.triton import LOG2_E, padded, precision, tl, triton

BLOCK_KEYS = 64
BLOCK_HEADS = 32  # of the decays: lines of memory are read whole
WARPS = 4
STAGES = 3


@triton.jit
def _decay_kernel(
    g, ancestors, decay, ends, chunks, factor,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    tokens = tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    row, head = tl.arange(0, C), tl.program_id(1) * BH + tl.arange(0, BH)
    live_head = head < H
    bits = tl.load(ancestors + start + row, mask=row < tokens, other=0)
    total = tl.zeros([C, BH], dtype=tl.float32)
    for token in range(0, tokens):
        own = tl.load(g + (start + token) * H + head, mask=live_head, other=0.0).to(tl.float32)
        total += tl.where((((bits >> tl.cast(token, tl.int64)) & 1) != 0)[:, None], own[None, :], 0.0)
    total *= factor
    at = decay + start * H + row[:, None] * H + head[None, :]
    tl.store(at, total, mask=(row < tokens)[:, None] & live_head[None, :])
    end = tl.sum(tl.where((row == tokens - 1)[:, None], total, 0.0), 0)
    tl.store(ends + chunk * H + head, end, mask=live_head)


@triton.jit
def _products_kernel(
    k, beta, decay, ancestors, products, chunks,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    row = tl.arange(0, C)
    live = row < tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    similar = tl.zeros([C, C], dtype=tl.float32)
    for block in range(0, tl.cdiv(K, BK)):
        inner = block * BK + tl.arange(0, BK)
        keys = load_rows(k, start, row, key_head, inner, live, HK, K)
        keys_t = load_columns(k, start, row, key_head, inner, live, HK, K)
        similar = tl.dot(keys, keys_t, similar, input_precision=PRECISION)
    above = load_seen(ancestors, start, row, live) & (row[:, None] != row[None, :])
    for member in range(0, H // HK):
        head = key_head * (H // HK) + member
        total = load_each(decay, start, row, head, live, H)
        share = load_each(beta, start, row, head, live, H).to(tl.float32)
        matrix = similar * decay_between(total[:, None], total[None, :], above) * share[:, None]
        at = products + start * (H * C) + head * C + row[:, None] * (H * C) + row[None, :]
        tl.store(at, matrix, mask=live[:, None] & (row >= 0)[None, :])


@triton.jit
def _value_gradient_kernel(
    q, k, dout, decay, ancestors, dvalue, chunks, scale,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    row, column = tl.arange(0, C), tl.arange(0, VP)
    live = row < tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    scores_t = tl.zeros([C, C], dtype=tl.float32)
    for block in range(0, tl.cdiv(K, BK)):
        inner = block * BK + tl.arange(0, BK)
        keys = load_rows(k, start, row, key_head, inner, live, HK, K)
        queries_t = load_columns(q, start, row, key_head, inner, live, HK, K)
        scores_t = tl.dot(keys, queries_t, scores_t, input_precision=PRECISION)
    scores_t *= scale
    seers = load_seers(ancestors, start, row, live)
    for member in range(0, H // HK):
        head = key_head * (H // HK) + member
        total = load_each(decay, start, row, head, live, H)
        weights = scores_t * decay_between(total[None, :], total[:, None], seers)
        grads = load_rows(dout, start, row, head, column, live, H, V)
        part = tl.dot(weights.to(grads.dtype), grads, input_precision=PRECISION)
        at = dvalue + start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
        tl.store(at, part.to(dvalue.dtype.element_ty), mask=live[:, None] & (column < V)[None, :])


def cumulative_decay(
    g: torch.Tensor, ancestors: torch.Tensor, chunks: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decays g [n, H] summed along the path inside each chunk, in the log2 domain: float32 [n, H], and those of
    each chunk's last token [N, H]."""
    decay = torch.empty_like(g, dtype=torch.float32)
    ends = torch.empty((len(chunks), g.shape[1]), dtype=torch.float32, device=g.device)
    heads = g.shape[1]
    block = min(BLOCK_HEADS, triton.next_power_of_2(heads))
    _decay_kernel[(len(chunks), triton.cdiv(heads, block))](
        g, ancestors, decay, ends, chunks, LOG2_E,
        H=heads, BH=block, C=chunk_size, CHUNK_COLUMNS=CHUNK_COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return decay, ends


def key_products(
    k: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, ancestors: torch.Tensor, chunks: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:  # fmt: skip
    """A of each chunk, float32 [n, H, C], from k [n, Hk, K] and beta [n, H]."""
    (tokens, heads), (key_heads, key_dim) = beta.shape, k.shape[1:]
    products = torch.empty((tokens, heads, chunk_size), dtype=torch.float32, device=k.device)
    _products_kernel[(len(chunks), key_heads)](
        k, beta, decay, ancestors, products, chunks,
        HK=key_heads, H=heads, K=key_dim, BK=min(BLOCK_KEYS, padded(key_dim)), C=chunk_size,
        PRECISION=precision(k.dtype), CHUNK_COLUMNS=CHUNK_COLUMNS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return products


def value_gradient_inside(
    q: torch.Tensor, k: torch.Tensor, dout: torch.Tensor, decay: torch.Tensor, ancestors: torch.Tensor,
    chunks: torch.Tensor, chunk_size: int,
) -> torch.Tensor:  # fmt: skip
    """Gradient of v' [n, H, V] through the outputs of the same chunk; q and k [n, Hk, K], dout [n, H, V]."""
    (heads, value_dim), (key_heads, key_dim) = dout.shape[1:], k.shape[1:]
    dvalue = torch.empty_like(dout)
    _value_gradient_kernel[(len(chunks), key_heads)](
        q, k, dout, decay, ancestors, dvalue, chunks, key_dim**-0.5,
        HK=key_heads, H=heads, K=key_dim, V=value_dim, BK=min(BLOCK_KEYS, padded(key_dim)), VP=padded(value_dim),
        C=chunk_size, PRECISION=precision(k.dtype), CHUNK_COLUMNS=CHUNK_COLUMNS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return dvalue
