"""The output stage: ``o = s 2^G (q H) + s ((q k^T) D) v'``, with H read from the row that enters the chunk.

fla's kernel reads one state a chunk; here siblings read their parent's, and chunks of a root none.

Shapes: n tokens, Hk key heads, H value heads, K and V head sizes, C chunk size, R state rows.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.gdn.triton.chain_tables import CHUNK_COLUMNS, StatePass
from cp_engine.kernels.gdn.triton.primitives import (
    Sizes,
    decay_between,
    load_columns,
    load_each,
    load_rows,
    load_seen,
)
from cp_engine.kernels.shared.triton import padded, precision, tl, triton

BLOCK_KEYS = 64
# Two programs on a multiprocessor, each with both blocks of keys on their way from the start.
OUTPUT = Sizes(128, 4, 3)
FLOAT32 = Sizes(32, 8, 1)


@triton.jit
def _output_kernel(
    q, k, new_v, decay, ancestors, states, out, chunks, members, scale,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.load(members + tl.program_id(0)), tl.program_id(1)
    key_head = head // (H // HK)
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    tokens = tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    enters = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS + 5), tl.int64)
    row, column = tl.arange(0, C), tl.program_id(2) * BV + tl.arange(0, BV)
    live = row < tokens
    live_column = (column < V) & (column * 0 + enters >= 0)
    total = load_each(decay, start, row, head, live, H)
    values = load_rows(new_v, start, row, head, column, live, H, V)
    read, scores = tl.zeros([C, BV], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for block in range(0, tl.cdiv(K, BK)):
        inner = block * BK + tl.arange(0, BK)
        queries = load_rows(q, start, row, key_head, inner, live, HK, K)
        keys_t = load_columns(k, start, row, key_head, inner, live, HK, K)
        at = states + (enters * H + head) * (K * V) + inner[:, None] * V + column[None, :]
        state = tl.load(at, mask=(inner < K)[:, None] & live_column[None, :], other=0.0)
        read = tl.dot(queries, state, read, input_precision=PRECISION)
        scores = tl.dot(queries, keys_t, scores, input_precision=PRECISION)
    scores *= decay_between(total[:, None], total[None, :], load_seen(ancestors, start, row, live))
    read *= tl.exp2(total)[:, None]
    read = tl.dot(scores.to(values.dtype), values, read, input_precision=PRECISION) * scale
    at = out + start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
    tl.store(at, read.to(out.dtype.element_ty), mask=live[:, None] & (column < V)[None, :])


def run_output(
    q: torch.Tensor,
    k: torch.Tensor,
    new_v: torch.Tensor,
    decay: torch.Tensor,
    ancestors: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor,
    walk: StatePass,
    chunk_size: int,
) -> None:
    """Fill in ``out`` [n, H, V] for the chunks of one wave.

    Args:
        q: [n, Hk, K], not scaled; k alike.
        new_v: [n, H, V] v'.
        decay: float32 [n, H] cumulative log2 decay inside each chunk.
        ancestors: int64 [n] of the tables.
        states: [R, H, K, V] in rows.
    """
    heads, value_dim = new_v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    sizes = FLOAT32 if new_v.dtype == torch.float32 else OUTPUT
    columns = min(sizes.columns, padded(value_dim))
    _output_kernel[(len(walk.members), heads, triton.cdiv(value_dim, columns))](
        q, k, new_v, decay, ancestors, states, out, walk.chunks, walk.members, key_dim**-0.5,
        HK=key_heads, H=heads, K=key_dim, V=value_dim, BK=min(BLOCK_KEYS, padded(key_dim)), BV=columns,
        C=chunk_size, PRECISION=precision(new_v.dtype), CHUNK_COLUMNS=CHUNK_COLUMNS,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
