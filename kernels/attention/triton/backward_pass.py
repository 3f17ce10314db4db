"""dq by owner of query rows, dk and dv by owner of key rows: no atomics, every sum in a fixed order.

With p = exp2(s * scale_log2 - lse2) and ds = p * (dp - delta), where lse2 = lse * log2(e) and delta = dout . out:
dq = scale * ds k, dk = scale * ds^T q, dv = p^T dout.

Shapes: Nq query rows, Nk key rows, QH query heads, KH kv heads, D head size, DP padded to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.triton.primitives import (
    Sizes,
    in_registers,
    kernel_sizes,
    load_bits,
    load_keys,
    load_packed,
    makes_apart,
    next_tile,
    packed_at,
    packed_heads,
    row_source,
    row_tiles,
    sources,
)
from cp_engine.kernels.attention.triton.tiles import ENTRY, TileList, tiles_on_device
from cp_engine.kernels.shared.triton import LOG2_E, padded, precision, tl, triton

LISTED_TOKENS = 16  # a listed tile has at least about so many, or the lists grow long


@triton.jit
def row_statistics(
    out, lse, grads, start, head, row, cols, query_rows, live, QH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PACK: tl.constexpr, TOKENS: tl.constexpr, OUT_ROW: tl.constexpr,
):  # fmt: skip
    """lse2 and delta of the packed rows from token ``start`` on, both [len(row)]; ``grads``: their rows of dout."""
    results = load_packed(out, start, head, row, cols, query_rows, PACK, OUT_ROW, D, DP, TOKENS, False, False)
    delta = tl.sum(results.to(tl.float32) * grads.to(tl.float32), 1)
    at = (tl.cast(start, tl.int64) + row // PACK) * QH + head + row % PACK
    natural = tl.load(lse + at, mask=live, other=0.0)
    # A row that sees nothing has no visible score; any finite number in place of its lse gives p = 0.
    return tl.where(natural == -float("inf"), 0.0, natural * 1.4426950408889634), delta


@triton.jit
def _dq_step(dq, queries, grads, keys, values, lse2, delta, seen, scale_log2, BORDER: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weights = tl.exp2(scores * scale_log2 - lse2[:, None])
    if BORDER:
        weights = tl.where(seen, weights, 0.0)
    dp = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
    ds = weights * (dp - delta[:, None])
    return tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["query_rows", "key_rows"])
def _dq_kernel(
    q, k, v, out, lse, dout, lse2, delta, dq, entries, range_lo, range_tiles, border_lo, words, query_rows, key_rows,
    scale, scale_log2,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PACK: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, ENTRY: tl.constexpr, DESCRIBED: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, OUT_ROW: tl.constexpr, DOUT_ROW: tl.constexpr,
    HELD: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """Also fills lse2 and delta. ``Q_ROW`` and so on: elements from one row of an input to the next."""
    entry = entries + tl.program_id(0) * ENTRY
    start = tl.load(entry)
    index, full = tl.load(entry + 2), tl.load(entry + 3)
    border, border_end = tl.load(entry + 4), tl.load(entry + 5)
    head = tl.program_id(1) * PACK
    kv_head = head // (QH // KH)
    row, col, key = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, KEYS)
    queries = load_packed(q, start, head, row, col, query_rows, PACK, Q_ROW, D, DP, TOKENS, False, OWNED)
    grads = load_packed(dout, start, head, row, col, query_rows, PACK, DOUT_ROW, D, DP, TOKENS, False, False)
    live = (row // PACK < TOKENS) & (start + row // PACK < query_rows)
    row_lse2, row_delta = row_statistics(
        out, lse, grads, start, head, row, col, query_rows, live, QH, D, DP, PACK, TOKENS, OUT_ROW
    )
    statistic = (tl.cast(tl.program_id(1), tl.int64) * query_rows + start) * PACK + row
    tl.store(lse2 + statistic, row_lse2, mask=live)
    tl.store(delta + statistic, row_delta, mask=live)
    queries, grads = in_registers(queries, HELD > 0), in_registers(grads, HELD > 1)
    acc = tl.zeros([ROWS, DP], tl.float32)

    place, left = tl.load(range_lo + index), tl.load(range_tiles + index)
    for _ in range(0, full):
        keys = load_keys(k, place, kv_head, key, col, key_rows, K_ROW, D, DP, True, DESCRIBED)
        values = load_keys(v, place, kv_head, key, col, key_rows, V_ROW, D, DP, True, DESCRIBED)
        acc = _dq_step(acc, queries, grads, keys, values, row_lse2, row_delta, True, scale_log2, False, PRECISION)
        index, place, left = next_tile(range_lo, range_tiles, index, place, left, KEYS, 1)

    for at in range(border, border_end):
        place = tl.load(border_lo + at)
        keys = load_keys(k, place, kv_head, key, col, key_rows, K_ROW, D, DP, False, DESCRIBED)
        values = load_keys(v, place, kv_head, key, col, key_rows, V_ROW, D, DP, False, DESCRIBED)
        seen = load_bits(words, at, row // PACK, key, TOKENS, KEYS)
        acc = _dq_step(acc, queries, grads, keys, values, row_lse2, row_delta, seen, scale_log2, True, PRECISION)

    result = packed_at(dq, start, head, row, col, PACK, QH * D, D)
    tl.store(result, (acc * scale).to(dq.dtype.element_ty), mask=live[:, None] & (col < D)[None, :])


@triton.jit
def _dkdv_step(dk, dv, keys, values, queries, grads, lse2, delta, seen, scale_log2, BORDER: tl.constexpr,
               PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    """Everything transposed: keys down, query rows across."""
    scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    weights = tl.exp2(scores * scale_log2 - lse2[None, :])
    if BORDER:
        weights = tl.where(seen, weights, 0.0)
    if DV:
        dv = tl.dot(weights.to(grads.dtype), grads, dv, input_precision=PRECISION)
    if DK:
        dp = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
        ds = weights * (dp - delta[None, :])
        dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["query_rows", "key_rows"])
def _dkdv_kernel(
    q, k, v, dout, lse2, delta, dk, dv, entries, range_lo, range_tiles, border_lo, words, query_rows, key_rows,
    scale, scale_log2,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PACK: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, ENTRY: tl.constexpr, DESCRIBED: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, DOUT_ROW: tl.constexpr,
    PARTS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """dk, dv or both, as DK and DV say. A listed tile is walked in PARTS tiles of TOKENS tokens."""
    entry = entries + tl.program_id(0) * ENTRY
    start = tl.load(entry)
    first, full = tl.load(entry + 2), tl.load(entry + 3) * PARTS
    border, border_end = tl.load(entry + 4) * PARTS, tl.load(entry + 5) * PARTS
    kv_head = tl.program_id(1)
    row, col, key = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, KEYS)
    keys = load_keys(k, start, kv_head, key, col, key_rows, K_ROW, D, DP, False, OWNED)
    values = load_keys(v, start, kv_head, key, col, key_rows, V_ROW, D, DP, False, OWNED)
    dk_acc = tl.zeros([KEYS, DP], tl.float32)
    dv_acc = tl.zeros([KEYS, DP], tl.float32)
    # Rows of a tile beyond its last packed token are masked even in full tiles.
    EXACT: tl.constexpr = TOKENS * PACK == ROWS
    inside = row < TOKENS * PACK
    PACKS: tl.constexpr = QH // KH // PACK

    for pack in range(0, PACKS):
        one = kv_head * PACKS + pack
        head = one * PACK
        statistic = tl.cast(one, tl.int64) * query_rows * PACK
        index = first
        place, left = tl.load(range_lo + index), tl.load(range_tiles + index) * PARTS
        for _ in range(0, full):
            queries = load_packed(q, place, head, row, col, query_rows, PACK, Q_ROW, D, DP, TOKENS, EXACT, DESCRIBED)
            grads = load_packed(
                dout, place, head, row, col, query_rows, PACK, DOUT_ROW, D, DP, TOKENS, EXACT, DESCRIBED
            )
            at_row = statistic + tl.cast(place, tl.int64) * PACK + row
            row_lse2 = tl.load(lse2 + at_row, mask=inside, other=0.0)
            row_delta = tl.load(delta + at_row, mask=inside, other=0.0)
            dk_acc, dv_acc = _dkdv_step(
                dk_acc, dv_acc, keys, values, queries, grads, row_lse2, row_delta, True, scale_log2, False, PRECISION,
                DK, DV,
            )  # fmt: skip
            index, place, left = next_tile(range_lo, range_tiles, index, place, left, TOKENS, PARTS)

        for at in range(border, border_end):
            listed = at // PARTS
            passed = (at % PARTS) * TOKENS
            place = tl.load(border_lo + listed) + passed
            queries = load_packed(q, place, head, row, col, query_rows, PACK, Q_ROW, D, DP, TOKENS, False, DESCRIBED)
            grads = load_packed(
                dout, place, head, row, col, query_rows, PACK, DOUT_ROW, D, DP, TOKENS, False, DESCRIBED
            )
            at_row = statistic + tl.cast(place, tl.int64) * PACK + row
            live = inside & (place + row // PACK < query_rows)
            row_lse2 = tl.load(lse2 + at_row, mask=live, other=0.0)
            row_delta = tl.load(delta + at_row, mask=live, other=0.0)
            seen = inside[None, :] & load_bits(words, listed, key, passed + row // PACK, KEYS, TOKENS * PARTS)
            dk_acc, dv_acc = _dkdv_step(
                dk_acc, dv_acc, keys, values, queries, grads, row_lse2, row_delta, seen, scale_log2, True, PRECISION,
                DK, DV,
            )  # fmt: skip

    at = kv_head * D + (tl.cast(start, tl.int64) + key)[:, None] * (KH * D) + col[None, :]
    mask = (key < tl.load(entry + 1))[:, None] & (col < D)[None, :]
    if DK:
        tl.store(dk + at, (dk_acc * scale).to(dk.dtype.element_ty), mask=mask)
    if DV:
        tl.store(dv + at, dv_acc.to(dv.dtype.element_ty), mask=mask)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    intervals: Intervals,
    scale: float,
    accumulate_q: bool,
    accumulate_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention_backward`; arguments are as `primitives.adjoining` says."""
    query_rows, query_heads, size = q.shape
    key_rows, kv_heads = k.shape[:2]
    dq, dk, dv = empty_gradients(q, k, v, accumulate_q, accumulate_kv)
    # Nobody sees the keys from key_end on.
    dk[intervals.key_end :].zero_()
    dv[intervals.key_end :].zero_()
    if not dq.numel():
        return dq, dk.zero_(), dv.zero_()
    pack = packed_heads(query_heads // kv_heads)
    # Both [QH / PACK, Nq * PACK], so that a tile's packed rows lie side by side.
    lse2, delta = (torch.empty_like(lse) for _ in range(2))
    shape = {"QH": query_heads, "D": size, "DP": padded(size), "PACK": pack}
    shape |= {"Q_ROW": q.stride(0), "K_ROW": k.stride(0), "V_ROW": v.stride(0), "DOUT_ROW": dout.stride(0)}
    shape |= {"KH": kv_heads, "PRECISION": precision(q.dtype), "ENTRY": ENTRY}
    factors = scale, scale * LOG2_E

    sizes, tiles = row_tiles("dq", q, pack, intervals, tiles_on_device)
    (keys, values), described = sources([x.view(key_rows, kv_heads * size) for x in (k, v)], [sizes.keys, size])
    queries, owned = row_source(q, sizes, pack)
    _dq_kernel[(tiles.tiles, query_heads // pack)](
        queries, keys, values, out, lse, dout, lse2, delta, dq, tiles.entries, tiles.range_lo, tiles.range_tiles,
        tiles.border_lo, tiles.words, query_rows, key_rows, *factors, DESCRIBED=described, TOKENS=sizes.rows // pack,
        ROWS=sizes.rows, KEYS=sizes.keys, HELD=sizes.held, OWNED=owned, OUT_ROW=out.stride(0), num_warps=sizes.warps,
        num_stages=sizes.stages, **shape,
    )  # fmt: skip

    for kernel, sizes, parts, tiles in key_tiles(q, pack, intervals, tiles_on_device):
        tokens = sizes.rows // pack
        (queries, grads), described = sources([q, dout], [tokens, pack, size])
        (keys, values), owned = sources([x.view(key_rows, kv_heads * size) for x in (k, v)], [sizes.keys, size])
        if tiles.tiles:
            _dkdv_kernel[(tiles.tiles, kv_heads)](
                queries, keys, values, grads, lse2, delta, dk, dv, tiles.entries, tiles.range_lo, tiles.range_tiles,
                tiles.border_lo, tiles.words, query_rows, intervals.key_end, *factors, DESCRIBED=described,
                DK="dk" in kernel, DV="dv" in kernel, PARTS=parts, TOKENS=tokens, OWNED=owned,
                ROWS=sizes.rows, KEYS=sizes.keys, num_warps=sizes.warps, num_stages=sizes.stages, **shape,
            )  # fmt: skip
    return dq, dk, dv


def empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, accumulate_q: bool, accumulate_kv: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised dq, dk, dv, those that are accumulated in float32."""
    widened = (q, accumulate_q), (k, accumulate_kv), (v, accumulate_kv)
    return tuple(torch.empty(x.shape, dtype=torch.float32 if wide else x.dtype, device=x.device) for x, wide in widened)


def key_tiles(
    q: torch.Tensor, pack: int, intervals: Intervals, take: Callable[..., TileList]
) -> list[tuple[str, Sizes, int, TileList]]:
    """The launches that own key rows: (kernel, sizes, parts that a listed tile is walked in, tile list)."""
    made = []
    for kernel in ("dk", "dv") if makes_apart(q.shape[2], q.dtype) else ("dkdv",):
        sizes = kernel_sizes(kernel, q.shape[2], q.dtype, q.device)
        tokens = sizes.rows // pack
        parts = max(1, LISTED_TOKENS // tokens)
        made.append((kernel, sizes, parts, take(intervals, "keys", sizes.keys, tokens * parts)))
    return made
