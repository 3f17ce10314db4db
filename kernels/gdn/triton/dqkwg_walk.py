"""`dqkwg_tiles` with several chunks a program: tiles of the next head or chunk are fetched while this one's are used.

Shapes: as in `dqkwg`.
"""

from __future__ import annotations

from cp_engine.kernels.gdn.triton.primitives import decay_between, load_each, load_seen
from cp_engine.kernels.shared.triton import tl, triton


@triton.jit(do_not_specialize=["tokens_in_all", "count"])
def dqkwg_walk_kernel(
    q, k, new_v, decay, ancestors, states, dout, dstates, dnew_v, dq, dk, dw, dg, chunks, members, tokens_in_all, count,
    scale,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    CHUNKS: tl.constexpr, PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    GROUP: tl.constexpr = H // HK
    block, key_head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % HK
    first = tl.program_id(0) // (BLOCKS * HK) * CHUNKS
    row, inner = tl.arange(0, C), block * BK + tl.arange(0, BK)
    sum_dq, sum_dk = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    sum_scores = tl.zeros([C, C], dtype=tl.float32)
    for step in range(0, tl.minimum(CHUNKS, count - first) * GROUP):
        chunk = tl.load(members + first + step // GROUP)
        head = key_head * GROUP + step % GROUP
        start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
        tokens = tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
        enters = tl.load(chunks + chunk * CHUNK_COLUMNS + 5)
        leaves = tl.load(chunks + chunk * CHUNK_COLUMNS + 6)
        line = tl.cast(start, tl.int32)
        # Rows beyond the chunk's are those of another one. A state without a row lies outside, which gives zeros.
        queries, keys = q.load([line, key_head * K + block * BK]), k.load([line, key_head * K + block * BK])
        grads, values = dout.load([line, head * V]), new_v.load([line, head * V])
        dvalues = dnew_v.load([line, head * V])
        h = states.load([(enters * H + head) * K + block * BK, 0])
        dh = dstates.load([(leaves * H + head) * K + block * BK, 0])
        values_t, h_t, dh_t = tl.trans(values), tl.trans(h), tl.trans(dh)
        live = row < tokens
        seen = load_seen(ancestors, start, row, live)
        total = load_each(decay, start, row, head, live, H)
        last = tl.load(decay + (start + tokens - 1) * H + head)
        scores = tl.dot(grads, values_t, input_precision=PRECISION)
        scores *= decay_between(total[:, None], total[None, :], seen) * scale
        scores = tl.where(seen, scores, 0.0)
        # Sums start anew at the first head of a group.
        goes_on = tl.minimum(tl.cast(step % GROUP, tl.float32), 1.0)
        sum_scores = sum_scores * goes_on + scores
        scores *= tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(seen, scores, 0.0)
        dtotal = tl.sum(scores, 1) - tl.sum(scores, 0)
        live_out = live[:, None] & (inner < K)[None, :]
        out = start * (H * K) + head * K + row[:, None] * (H * K) + inner[None, :]
        derased = tl.dot(dvalues, h_t, input_precision=PRECISION)
        tl.store(dw + out, (-derased).to(dw.dtype.element_ty), mask=live_out)
        dqueries = tl.dot(grads, h_t, input_precision=PRECISION) * (tl.exp2(total) * scale)[:, None]
        sum_dq = sum_dq * goes_on + dqueries
        # In a chunk of several fragments the last token may have decayed less than others.
        dkeys = tl.dot(values, dh_t, input_precision=PRECISION)
        dkeys = tl.where(live[:, None], dkeys * tl.exp2(tl.minimum(last - total, 0.0))[:, None], 0.0)
        sum_dk = sum_dk * goes_on + dkeys
        of_keys = tl.sum(keys * dkeys, 1)
        dtotal += tl.sum(queries * dqueries, 1) - of_keys
        # sum(H dH+) is the trace of a product: matrix units add it up in float32.
        overlap = tl.dot(h, dh_t, input_precision=PRECISION)
        trace = tl.sum(tl.sum(tl.where(inner[:, None] == inner[None, :], overlap, 0.0), 1), 0)
        dlast_token = tl.sum(of_keys, 0) + tl.exp2(last) * trace
        dtotal += tl.where(row == tokens - 1, dlast_token, 0.0)
        part = tl.cast(block, tl.int64) * tokens_in_all + start
        tl.store(dg + part * H + head + row * H, dtotal, mask=live)
        if step % GROUP == GROUP - 1:
            weights = sum_scores.to(keys.dtype)
            out = start * (HK * K) + key_head * K + row[:, None] * (HK * K) + inner[None, :]
            all_dq = tl.dot(weights, keys, sum_dq, input_precision=PRECISION)
            all_dk = sum_dk + tl.trans(tl.dot(tl.trans(queries), weights, input_precision=PRECISION))
            tl.store(dq + out, all_dq.to(dq.dtype.element_ty), mask=live_out)
            tl.store(dk + out, all_dk, mask=live_out)
