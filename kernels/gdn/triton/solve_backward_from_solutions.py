"""`solve_backward` from w and u: with X = T^T dw and Y = T^T du, ``dA = -(X w^T + Y u^T)`` where A is not zero.

So the gradient of A takes two products in place of four, none of which waits for another product of pairs, at the price
of loading w and u. The other formulas are those of `solve_backward`.

Shapes: as in `solve_backward`.
"""

from __future__ import annotations

from cp_engine.kernels.gdn.triton.primitives import decay_between, load_columns, load_each, load_rows, load_seen
from cp_engine.kernels.shared.triton import tl, triton


@triton.jit(do_not_specialize=["tokens_in_all"])
def solve_backward_from_solutions_kernel(
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
