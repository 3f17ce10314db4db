"""`dqkwg` by tensor descriptors: whole tiles are fetched by the copy unit, so that no register holds an address.

The formulas are those of `dqkwg`, in another order. With P_ij = dS_ij (q_i . k_j) the part of dG through pairs of the
chunk is ``sum_j P_ij - sum_j P_ji``, so that products of dS with q and k are formed once for all value heads of a key
head, from the sum of their dS. ``sum(H dH+)`` is the trace of H dH+^T: matrix units add up its products in float32.

Shapes: as in `dqkwg`.
"""

from __future__ import annotations

from cp_engine.kernels.gdn.triton.primitives import decay_between, load_columns, load_each, load_rows, load_seen
from cp_engine.kernels.shared.triton import tl, triton


@triton.jit(do_not_specialize=["tokens_in_all"])
def dqkwg_tiles_kernel(
    q, k, new_v, decay, ancestors, states, dout, dstates, dnew_v, dq, dk, dw, dg, chunks, members, tokens_in_all, scale,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    # All blocks and heads of a chunk run together: they read the same rows.
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    block, key_head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % HK
    chunk = tl.load(members + tl.program_id(0) // (BLOCKS * HK))
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    tokens = tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    enters = tl.load(chunks + chunk * CHUNK_COLUMNS + 5)
    leaves = tl.load(chunks + chunk * CHUNK_COLUMNS + 6)
    row, inner = tl.arange(0, C), block * BK + tl.arange(0, BK)
    live = row < tokens
    live_out = live[:, None] & (inner < K)[None, :]
    queries = load_rows(q, start, row, key_head, inner, live, HK, K)
    keys = load_rows(k, start, row, key_head, inner, live, HK, K)
    keys_t = load_columns(k, start, row, key_head, inner, live, HK, K)
    seen = load_seen(ancestors, start, row, live)
    similar = tl.dot(queries, keys_t, input_precision=PRECISION)
    sum_dq, sum_dk = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    sum_scores = tl.zeros([C, C], dtype=tl.float32)
    line = tl.cast(start, tl.int32)
    for member in range(0, H // HK):
        head = key_head * (H // HK) + member
        total = load_each(decay, start, row, head, live, H)
        last = tl.load(decay + (start + tokens - 1) * H + head)
        # Rows beyond the chunk's are those of another one. A state without a row lies outside, which gives zeros.
        grads, values = dout.load([line, head * V]), new_v.load([line, head * V])
        dvalues = dnew_v.load([line, head * V])
        h = states.load([(enters * H + head) * K + block * BK, 0])
        dh = dstates.load([(leaves * H + head) * K + block * BK, 0])
        values_t, h_t, dh_t = tl.trans(values), tl.trans(h), tl.trans(dh)
        scores = tl.dot(grads, values_t, input_precision=PRECISION)
        scores *= decay_between(total[:, None], total[None, :], seen) * scale
        scores = tl.where(seen, scores, 0.0)
        sum_scores += scores
        scores *= similar
        dtotal = tl.sum(scores, 1) - tl.sum(scores, 0)
        out = start * (H * K) + head * K + row[:, None] * (H * K) + inner[None, :]
        derased = tl.dot(dvalues, h_t, input_precision=PRECISION)
        tl.store(dw + out, (-derased).to(dw.dtype.element_ty), mask=live_out)
        dqueries = tl.dot(grads, h_t, input_precision=PRECISION) * (tl.exp2(total) * scale)[:, None]
        sum_dq += dqueries
        # In a chunk of several fragments the last token may have decayed less than others.
        dkeys = tl.dot(values, dh_t, input_precision=PRECISION)
        dkeys = tl.where(live[:, None], dkeys * tl.exp2(tl.minimum(last - total, 0.0))[:, None], 0.0)
        sum_dk += dkeys
        of_keys = tl.sum(keys * dkeys, 1)
        dtotal += tl.sum(queries * dqueries, 1) - of_keys
        # sum(H dH+) is the trace of a product: matrix units add it up in float32.
        overlap = tl.dot(h, dh_t, input_precision=PRECISION)
        trace = tl.sum(tl.sum(tl.where(inner[:, None] == inner[None, :], overlap, 0.0), 1), 0)
        dlast_token = tl.sum(of_keys, 0) + tl.exp2(last) * trace
        dtotal += tl.where(row == tokens - 1, dlast_token, 0.0)
        part = tl.cast(block, tl.int64) * tokens_in_all + start
        tl.store(dg + part * H + head + row * H, dtotal, mask=live)
    weights = sum_scores.to(keys.dtype)
    out = start * (HK * K) + key_head * K + row[:, None] * (HK * K) + inner[None, :]
    sum_dq = tl.dot(weights, keys, sum_dq, input_precision=PRECISION)
    tl.store(dq + out, sum_dq.to(dq.dtype.element_ty), mask=live_out)
    queries_t = load_columns(q, start, row, key_head, inner, live, HK, K)
    sum_dk += tl.trans(tl.dot(queries_t, weights, input_precision=PRECISION))
    tl.store(dk + out, sum_dk, mask=live_out)
