"""out and lse: one program owns a tile of packed query rows and walks over its key tiles.

Scores are kept in powers of two: softmax's scale is folded into ``scale_log2 = scale * log2(e)``.

Shapes: Nq query rows, Nk key rows, QH query heads, KH kv heads, D head size, DP padded to a power of two.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.triton.primitives import (
    in_registers,
    load_bits,
    load_keys,
    load_packed,
    next_tile,
    packed_at,
    packed_heads,
    row_source,
    row_tiles,
    sources,
)
from cp_engine.kernels.attention.triton.tiles import ENTRY, tiles_on_device
from cp_engine.kernels.shared.triton import LOG2_E, padded, precision, tl, triton


@triton.jit
def _attend(acc, total, peak, scores, values, scale_log2, BORDER: tl.constexpr, PRECISION: tl.constexpr):
    """Online softmax: one more tile of scores and values."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    base = new_peak
    if BORDER:  # a row may have seen nothing yet
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit(do_not_specialize=["query_rows", "key_rows"])
def _forward_kernel(
    q, k, v, out, lse, entries, range_lo, range_tiles, border_lo, words, query_rows, key_rows, scale_log2,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PACK: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, ENTRY: tl.constexpr, DESCRIBED: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, HELD: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """``Q_ROW`` and so on: elements from one row of an input to the next."""
    entry = entries + tl.program_id(0) * ENTRY
    start = tl.load(entry)
    index, full = tl.load(entry + 2), tl.load(entry + 3)
    border, border_end = tl.load(entry + 4), tl.load(entry + 5)
    head = tl.program_id(1) * PACK
    kv_head = head // (QH // KH)
    row, col, key = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, KEYS)
    queries = load_packed(q, start, head, row, col, query_rows, PACK, Q_ROW, D, DP, TOKENS, False, OWNED)
    queries = in_registers(queries, HELD > 0)
    acc = tl.zeros([ROWS, DP], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)

    place, left = tl.load(range_lo + index), tl.load(range_tiles + index)
    for _ in range(0, full):
        keys = load_keys(k, place, kv_head, key, col, key_rows, K_ROW, D, DP, True, DESCRIBED)
        values = load_keys(v, place, kv_head, key, col, key_rows, V_ROW, D, DP, True, DESCRIBED)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        acc, total, peak = _attend(acc, total, peak, scores, values, scale_log2, False, PRECISION)
        index, place, left = next_tile(range_lo, range_tiles, index, place, left, KEYS, 1)

    for at in range(border, border_end):
        place = tl.load(border_lo + at)
        keys = load_keys(k, place, kv_head, key, col, key_rows, K_ROW, D, DP, False, DESCRIBED)
        values = load_keys(v, place, kv_head, key, col, key_rows, V_ROW, D, DP, False, DESCRIBED)
        seen = load_bits(words, at, row // PACK, key, TOKENS, KEYS)
        scores = tl.where(seen, tl.dot(queries, tl.trans(keys), input_precision=PRECISION), -float("inf"))
        acc, total, peak = _attend(acc, total, peak, scores, values, scale_log2, True, PRECISION)

    token = start + row // PACK
    live = (row // PACK < TOKENS) & (token < query_rows)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    result = packed_at(out, start, head, row, col, PACK, QH * D, D)
    tl.store(result, acc.to(out.dtype.element_ty), mask=live[:, None] & (col < D)[None, :])
    natural = tl.where(
        total == 0.0, -float("inf"), (peak + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453
    )
    tl.store(lse + tl.cast(token, tl.int64) * QH + head + row % PACK, natural, mask=live)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, intervals: Intervals, scale: float, accumulate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention`; arguments are as `primitives.adjoining` says."""
    query_rows, query_heads, size = q.shape
    key_rows, kv_heads = k.shape[:2]
    pack = packed_heads(query_heads // kv_heads)
    sizes, tiles = row_tiles("forward", q, pack, intervals, tiles_on_device)
    out = torch.empty(q.shape, dtype=torch.float32 if accumulate else q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    strides = {"Q_ROW": q.stride(0), "K_ROW": k.stride(0), "V_ROW": v.stride(0)}
    (k, v), described = sources([x.view(key_rows, kv_heads * size) for x in (k, v)], [sizes.keys, size])
    queries, owned = row_source(q, sizes, pack)
    if out.numel():
        _forward_kernel[(tiles.tiles, query_heads // pack)](
            queries, k, v, out, lse, tiles.entries, tiles.range_lo, tiles.range_tiles, tiles.border_lo, tiles.words,
            query_rows, key_rows, scale * LOG2_E,
            QH=query_heads, KH=kv_heads, D=size, DP=padded(size), PACK=pack, TOKENS=sizes.rows // pack,
            ROWS=sizes.rows, KEYS=sizes.keys, PRECISION=precision(q.dtype), ENTRY=ENTRY,
            DESCRIBED=described, HELD=sizes.held, OWNED=owned, num_warps=sizes.warps, num_stages=sizes.stages,
            **strides,
        )  # fmt: skip
    return out, lse
