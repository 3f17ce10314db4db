"""Backward in five products: p and ds are computed once, kept in a workspace, and read by the kernel of dk and dv.

With p, ds, lse2 and delta as in `backward_pass`: a first kernel owns query rows, computes dq = scale * ds k, and stores
p and ds of its blocks in the dtype of q (they are rounded to it for their products anyway). A second one owns key rows:
dk = scale * ds^T q and dv = p^T dout are plain products over the stored blocks of a key tile. Blocks are worked off in
waves that fit into the workspace; dk and dv of a wave are added to those before it, in float32 and in the waves' order:
no atomics. `backward_pass` computes p and ds three times in its place, eight products.

Shapes: Nq query rows, Nk key rows, QH query heads, KH kv heads, D head size, DP padded to a power of two, P packs of
query heads, S blocks of the largest wave. Workspace: [2, P, S, ROWS, BLOCK], p before ds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.triton.backward_pass import empty_gradients, row_statistics
from cp_engine.kernels.attention.triton.blocks import KEY_ENTRY, ROW_ENTRY, Blocks, Wave, build_blocks
from cp_engine.kernels.attention.triton.primitives import (
    Sizes,
    in_registers,
    load_bits,
    load_keys,
    load_packed,
    packed_at,
    packed_heads,
    sources,
)
from cp_engine.kernels.shared.triton import LOG2_E, padded, precision, tl, triton

WORKSPACE = 3 << 30  # bytes of stored p and ds; one tile of query rows may need more


@dataclass(frozen=True)
class Stored:
    """Tile sizes and launch options of both kernels; measured on an H200 at head size 256, see docs/log.md."""

    scores: Sizes = Sizes(128, 32, 8, 4, 1)  # rows of a block; keys of a step
    product: Sizes = Sizes(64, 128, 8, 3)  # rows of a step; keys of a block
    workspace: int = WORKSPACE


IN_USE = Stored()


@triton.jit
def _scores_step(
    acc, stored, queries, grads, keys, values, lse2, delta, seen, scale_log2, store_row, column,
    BORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store p and ds of a step, [ROWS, KEYS], in the dtype of the inputs; add ds k to ``acc``."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    dp = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
    weights = tl.exp2(scores * scale_log2 - lse2[:, None])
    if BORDER:
        weights = tl.where(seen, weights, 0.0)
    ds = (weights * (dp - delta[:, None])).to(keys.dtype)
    acc = tl.dot(ds, keys, acc, input_precision=PRECISION)
    # After the product, for which nothing waits before the next step: its matrix units work while p and ds are stored.
    # Both in one copy, since a copy waits until the one before it has been read from shared memory.
    stored.store([0, store_row, column], tl.permute(tl.join(weights.to(keys.dtype), ds), (2, 0, 1)))
    return acc


@triton.jit(do_not_specialize=["first_entry", "first_slot", "slots", "query_rows", "key_rows"])
def _scores_kernel(
    q, k, v, out, lse, dout, dq, stored, entries, places, words, first_entry, first_slot, slots, query_rows, key_rows,
    scale, scale_log2,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PACK: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, ENTRY: tl.constexpr,
    DESCRIBED: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    DOUT_ROW: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """``Q_ROW`` and so on: elements from one row of an input to the next. A block is walked in steps of KEYS keys."""
    PACKS: tl.constexpr = QH // PACK
    PARTS: tl.constexpr = BLOCK // KEYS
    pack = tl.program_id(0) % PACKS
    entry = entries + (first_entry + tl.program_id(0) // PACKS) * ENTRY
    start, slot = tl.load(entry) * TOKENS, tl.load(entry + 1)
    full, blocks, mask = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    head = pack * PACK
    kv_head = head // (QH // KH)
    row, col, key = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, KEYS)
    queries = load_packed(q, start, head, row, col, query_rows, PACK, Q_ROW, D, DP, TOKENS, False, False)
    grads = load_packed(dout, start, head, row, col, query_rows, PACK, DOUT_ROW, D, DP, TOKENS, False, False)
    live = (row // PACK < TOKENS) & (start + row // PACK < query_rows)
    row_lse2, row_delta = row_statistics(
        out, lse, grads, start, head, row, col, query_rows, live, QH, D, DP, PACK, TOKENS, OUT_ROW
    )
    queries, grads = in_registers(queries, HELD > 0), in_registers(grads, HELD > 1)
    acc = tl.zeros([ROWS, DP], tl.float32)
    place = tl.load(places + slot)
    first_row = (pack * slots + slot - first_slot) * ROWS

    for step in range(0, full * PARTS):
        passed = (step % PARTS) * KEYS
        keys = load_keys(k, place + passed, kv_head, key, col, key_rows, K_ROW, D, DP, True, DESCRIBED)
        values = load_keys(v, place + passed, kv_head, key, col, key_rows, V_ROW, D, DP, True, DESCRIBED)
        acc = _scores_step(
            acc, stored, queries, grads, keys, values, row_lse2, row_delta, True, scale_log2,
            first_row + step // PARTS * ROWS, passed, False, PRECISION,
        )  # fmt: skip
        # The next block's place is read a step before it is used.
        place = tl.load(places + slot + (step + 1) // PARTS)

    for step in range(full * PARTS, blocks * PARTS):
        passed = (step % PARTS) * KEYS
        keys = load_keys(k, place + passed, kv_head, key, col, key_rows, K_ROW, D, DP, False, DESCRIBED)
        values = load_keys(v, place + passed, kv_head, key, col, key_rows, V_ROW, D, DP, False, DESCRIBED)
        seen = load_bits(words, mask + step // PARTS - full, row // PACK, passed + key, TOKENS, BLOCK)
        acc = _scores_step(
            acc, stored, queries, grads, keys, values, row_lse2, row_delta, seen, scale_log2,
            first_row + step // PARTS * ROWS, passed, True, PRECISION,
        )  # fmt: skip
        place = tl.load(places + slot + (step + 1) // PARTS)

    result = packed_at(dq, start, head, row, col, PACK, QH * D, D)
    tl.store(result, (acc * scale).to(dq.dtype.element_ty), mask=live[:, None] & (col < D)[None, :])


@triton.jit
def _key_product(
    acc, stored, source, items, first, count, base, slots, kv_head, query_rows, PACKS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PACK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Add to ``acc`` [BLOCK, DP], over a key tile's items: a stored block, transposed, times the rows of ``source``."""
    PARTS: tl.constexpr = ROWS // STEP
    row, col = tl.arange(0, STEP), tl.arange(0, DP)
    for pack in range(kv_head * PACKS, (kv_head + 1) * PACKS):
        item = items + tl.cast(first, tl.int64) * 2
        number, token = tl.load(item), tl.load(item + 1)
        for step in range(0, count * PARTS):
            passed = (step % PARTS) * STEP
            block = stored.load([base + (pack * slots + number) * ROWS + passed, 0])
            if DESCRIBED:
                at = token + passed // PACK
                rows = load_packed(
                    source, at, pack * PACK, row, col, query_rows, PACK, STRIDE, D, DP, STEP // PACK, False, True
                )
            else:
                at = passed + row
                rows = load_packed(
                    source, token, pack * PACK, at, col, query_rows, PACK, STRIDE, D, DP, TOKENS, False, False
                )
            acc = tl.dot(tl.trans(block), rows, acc, input_precision=PRECISION)
            after = item + (step + 1) // PARTS * 2
            number, token = tl.load(after), tl.load(after + 1)
    return acc


@triton.jit(do_not_specialize=["first_entry", "slots", "query_rows"])
def _key_products_kernel(
    stored, q, dout, dk, dv, entries, items, first_entry, slots, query_rows,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PACK: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, ENTRY: tl.constexpr,
    DESCRIBED: tl.constexpr, Q_ROW: tl.constexpr, DOUT_ROW: tl.constexpr,
):  # fmt: skip
    """Add a wave's part of dv (program 0 of axis 1) or dk (1) of a key tile to what is there, dk unscaled."""
    PACKS: tl.constexpr = QH // KH // PACK
    # An axis of its own: a number that is known to be 0 lets the compiler drop the loop over packs, and then it gives
    # dv's and dk's tiles shared memory apart, twice what a card has.
    kv_head = tl.program_id(0)
    entry = entries + (first_entry + tl.program_id(2)) * ENTRY
    start, height, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    key, col = tl.arange(0, BLOCK), tl.arange(0, DP)
    at = kv_head * D + (tl.cast(start, tl.int64) + key)[:, None] * (KH * D) + col[None, :]
    mask = (key < height)[:, None] & (col < D)[None, :]
    if tl.program_id(1) == 0:
        # What earlier waves left is read first: after the products there are no registers for it.
        acc = _key_product(
            tl.load(dv + at, mask=mask, other=0.0), stored, dout, items, first, count, 0, slots, kv_head,
            query_rows, PACKS, D, DP, PACK, TOKENS, ROWS, STEP, PRECISION, DESCRIBED, DOUT_ROW,
        )  # fmt: skip
        tl.store(dv + at, acc, mask=mask)
    else:
        base = QH // PACK * slots * ROWS
        acc = _key_product(
            tl.load(dk + at, mask=mask, other=0.0), stored, q, items, first, count, base, slots, kv_head,
            query_rows, PACKS, D, DP, PACK, TOKENS, ROWS, STEP, PRECISION, DESCRIBED, Q_ROW,
        )  # fmt: skip
        tl.store(dk + at, acc, mask=mask)


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
    # dk and dv of several waves are summed in float32.
    dq, dk, dv = empty_gradients(q, k, v, accumulate_q, True)
    dk.zero_()
    dv.zero_()
    if dq.numel() and intervals.key_end:
        _fill(q, k, v, out, lse, dout, dq, dk, dv, intervals, scale)
    else:
        dq.zero_()
    dk.mul_(scale)
    return (dq, dk, dv) if accumulate_kv else (dq, dk.to(k.dtype), dv.to(v.dtype))


def blocks_of(q: torch.Tensor, kv_heads: int, intervals: Intervals, on_device: bool = True) -> Blocks:
    """The blocks of a call, made at the first one; ``on_device``: where calls read them, else on the host."""
    pack = packed_heads(q.shape[1] // kv_heads)
    packs, tokens, keys = q.shape[1] // pack, IN_USE.scores.rows // pack, IN_USE.product.keys
    most = IN_USE.workspace // (2 * packs * IN_USE.scores.rows * keys * q.dtype.itemsize)
    at_once = torch.cuda.get_device_properties(q.device).multi_processor_count if q.device.type == "cuda" else 1
    multiple = max(at_once // packs, 1)
    name = f"triton blocks {tokens} {keys} {most} {multiple}"
    take = intervals.on_device if on_device else intervals.prepared
    return take(name, lambda made: build_blocks(made, tokens, keys, max(most, 1), multiple))


def _fill(q, k, v, out, lse, dout, dq, dk, dv, intervals: Intervals, scale: float) -> None:
    """dq; dv, and dk before its scale, added to zeros."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    query_rows, query_heads, size = q.shape
    key_rows, kv_heads = k.shape[:2]
    pack = packed_heads(query_heads // kv_heads)
    packs, sizes, block = query_heads // pack, IN_USE.scores, IN_USE.product.keys
    blocks = blocks_of(q, kv_heads, intervals)
    workspace = torch.empty((2, packs * blocks.most * sizes.rows, block), dtype=q.dtype, device=q.device)
    written = TensorDescriptor.from_tensor(workspace, [2, sizes.rows, sizes.keys])
    read = TensorDescriptor.from_tensor(workspace.flatten(0, 1), [IN_USE.product.rows, block])
    (keys, values), described = sources([x.view(key_rows, kv_heads * size) for x in (k, v)], [sizes.keys, size])
    shape = {"QH": query_heads, "KH": kv_heads, "D": size, "DP": padded(size), "PACK": pack}
    shape |= {"TOKENS": sizes.rows // pack, "ROWS": sizes.rows, "BLOCK": block, "PRECISION": precision(q.dtype)}
    shape |= {"Q_ROW": q.stride(0), "DOUT_ROW": dout.stride(0)}
    for wave in blocks.waves:
        _scores_kernel[(wave.row_entries[1] * packs,)](
            q, keys, values, out, lse, dout, dq, written, blocks.row_entries, blocks.places, blocks.words,
            wave.row_entries[0], wave.first_slot, blocks.most, query_rows, key_rows, scale, scale * LOG2_E,
            KEYS=sizes.keys, ENTRY=ROW_ENTRY, DESCRIBED=described, K_ROW=k.stride(0), V_ROW=v.stride(0),
            OUT_ROW=out.stride(0), HELD=sizes.held, num_warps=sizes.warps, num_stages=sizes.stages, **shape,
        )  # fmt: skip
        _launch_key_products(q, dout, read, dk, dv, blocks, wave, shape)


def _launch_key_products(q, dout, stored, dk, dv, blocks: Blocks, wave: Wave, shape: dict) -> None:
    sizes, pack = IN_USE.product, shape["PACK"]
    # A step's rows are whole tokens only where a tile has no rows to spare.
    whole = sizes.rows % pack == 0 and shape["ROWS"] % pack == 0
    given, described = sources([q, dout], [sizes.rows // pack, pack, q.shape[2]]) if whole else ([q, dout], False)
    if wave.key_entries[1]:
        _key_products_kernel[(shape["KH"], 2, wave.key_entries[1])](
            stored, *given, dk, dv, blocks.key_entries, blocks.items, wave.key_entries[0], blocks.most, q.shape[0],
            STEP=sizes.rows, ENTRY=KEY_ENTRY, DESCRIBED=described,
            num_warps=sizes.warps, num_stages=sizes.stages, **shape,
        )  # fmt: skip
