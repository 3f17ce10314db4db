"""The reverse state pass: one program walks one chain from its end, for some columns of one head's state gradient.

With G the cumulative log2 decay inside a chunk: ``dv' = dv'_local + 2^(G_C - G) k dH+`` and
``dH = 2^G_C dH+ + s (2^G q)^T dO - w^T dv'``. At a branch point dH+ also takes the dH of every chain that starts there
(a list in a fixed order, no atomics), the gradient of its exit, and the dH of its twigs, formed on the spot: their own
dH+ is zero, so that their dv' is dv'_local. The gradient of v' takes the place of ``dv'_local``.

Shapes: n tokens, Hk key heads, H value heads, K and V head sizes (KP: K padded), C chunk size, C chains of
the first level, X exits, R state rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.kernels.gdn.triton.chain_tables import CHAIN_COLUMNS, CHUNK_COLUMNS, StatePass
from cp_engine.kernels.gdn.triton.launch import state_sizes
from cp_engine.kernels.gdn.triton.primitives import load_columns, load_each, load_rows
from cp_engine.kernels.gdn.triton.tiles import tile_rows, tiles_fit
from cp_engine.kernels.shared.triton import padded, precision, tl, triton

SUM_ELEMENTS = 1024  # of one program of `_sum_kernel`


@triton.jit
def _keys(k, start, row, head, inner, live, HK: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr):
    """`load_rows`. A tile's rows beyond the chunk's are those of another one: what comes of them is masked."""
    if TILES:
        keys = k.load([tl.cast(start, tl.int32), head * K])
    else:
        keys = load_rows(k, start, row, head, inner, live, HK, K)
    return keys


@triton.jit
def _columns(x, start, row, head, inner, live, HEADS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr):
    """`load_columns`. A tile's columns beyond the chunk's tokens are those of another one: they meet zeros."""
    if TILES:
        columns = tl.trans(x.load([tl.cast(start, tl.int32), head * K]))
    else:
        columns = load_columns(x, start, row, head, inner, live, HEADS, K)
    return columns


@triton.jit(do_not_specialize=["first_chain", "first_below", "first_kept"])
def _adjoint_kernel(
    q, k, w, dout, decay, ends, dv_local, dexit, dbelow, dstarts, drows, dnew_v, chunks, chains, reader_ptr, reader,
    twig_ptr, twigs, first_chain, first_below, first_kept, scale,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, KEEP: tl.constexpr, STARTS: tl.constexpr, EXITS: tl.constexpr, TWIGS: tl.constexpr,
    TILES: tl.constexpr, PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr, CHAIN_COLUMNS: tl.constexpr,
):  # fmt: skip
    chain = chains + (first_chain + tl.program_id(0)) * CHAIN_COLUMNS
    head = tl.program_id(1)
    key_head = head // (H // HK)
    row, inner = tl.arange(0, C), tl.arange(0, KP)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    live_state = (inner < K)[:, None] & (column < V)[None, :]
    inside = head * (K * V) + inner[:, None] * V + column[None, :]
    keeps = column * 0 + tl.program_id(0) >= first_kept - first_chain
    first, count = tl.load(chain), tl.load(chain + 1)
    dstate = tl.zeros([KP, BV], dtype=tl.float32)
    # From branch point to branch point: the inner loop holds no other, so that it can be pipelined.
    left = count
    while left > 0:
        top = first + left - 1
        slot = tl.load(chunks + top * CHUNK_COLUMNS + 2)
        begin = tl.load(reader_ptr + slot, mask=slot >= 0, other=0)
        end = tl.load(reader_ptr + slot + 1, mask=slot >= 0, other=0)
        for place in range(begin, end):
            child = tl.cast(tl.load(reader + place) - first_below, tl.int64)
            dstate += tl.load(dbelow + child * (H * K * V) + inside, mask=live_state, other=0.0)
        if EXITS:
            leaves_at = tl.cast(tl.load(chunks + top * CHUNK_COLUMNS + 3), tl.int64)
            at_exit = dexit + leaves_at * (H * K * V) + inside
            dstate += tl.load(at_exit, mask=live_state & (column * 0 + leaves_at >= 0)[None, :], other=0.0)
        if TWIGS:
            begin = tl.load(twig_ptr + slot, mask=slot >= 0, other=0)
            end = tl.load(twig_ptr + slot + 1, mask=slot >= 0, other=0)
            for place in range(begin, end):
                twig = tl.load(twigs + place)
                start = tl.cast(tl.load(chunks + twig * CHUNK_COLUMNS), tl.int64)
                live = row < tl.load(chunks + twig * CHUNK_COLUMNS + 1)
                total = load_each(decay, start, row, head, live, H)
                local = load_rows(dv_local, start, row, head, column, live, H, V)
                read = load_rows(dout, start, row, head, column, live, H, V)
                queries = _columns(q, start, row, key_head, inner, live, HK, K, TILES)
                erased = _columns(w, start, row, head, inner, live, H, K, TILES)
                read *= (tl.exp2(total) * scale)[:, None]
                dstate = tl.dot(queries, read.to(queries.dtype), dstate, input_precision=PRECISION)
                dstate -= tl.dot(erased, local, input_precision=PRECISION)
        run = tl.load(chunks + top * CHUNK_COLUMNS + 4)
        left -= run
        # Numbers of the chunk above are loaded a chunk ahead, so that nothing in the loop waits for an address; so is
        # dv_local, which then takes no shared memory.
        start = tl.cast(tl.load(chunks + top * CHUNK_COLUMNS), tl.int64)
        tokens = tl.load(chunks + top * CHUNK_COLUMNS + 1)
        state_row = tl.load(chunks + top * CHUNK_COLUMNS + 6)
        last = tl.load(ends + top * H + head)
        local = load_rows(dv_local, start, row, head, column, row < tokens, H, V)
        for i in range(0, run):
            ahead = top - tl.minimum(i + 1, run - 1)
            next_start = tl.cast(tl.load(chunks + ahead * CHUNK_COLUMNS), tl.int64)
            next_tokens = tl.load(chunks + ahead * CHUNK_COLUMNS + 1)
            next_row = tl.load(chunks + ahead * CHUNK_COLUMNS + 6)
            next_last = tl.load(ends + ahead * H + head)
            live = row < tokens
            total = load_each(decay, start, row, head, live, H)
            # The state that leaves a leaf has no gradient: its keys stay where they are.
            goes_on = live & (row * 0 + state_row >= 0)
            read = load_rows(dout, start, row, head, column, live, H, V)
            keys = _keys(k, start, row, key_head, inner, goes_on, HK, K, TILES)
            queries = _columns(q, start, row, key_head, inner, live, HK, K, TILES)
            erased = _columns(w, start, row, head, inner, live, H, K, TILES)
            if KEEP:
                kept = live_state & (keeps & (column * 0 + state_row >= 0))[None, :]
                at_row = drows + tl.cast(state_row, tl.int64) * (H * K * V) + inside
                tl.store(at_row, dstate.to(drows.dtype.element_ty), mask=kept)
            dvalue = tl.dot(keys, dstate.to(keys.dtype), input_precision=PRECISION)
            # In a chunk of several fragments the last token may have decayed less than others; dstate is zero there.
            dvalue *= tl.where(live, tl.exp2(tl.minimum(last - total, 0.0)), 0.0)[:, None]
            dvalue += local
            if KEEP:
                at = dnew_v + start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
                tl.store(at, dvalue.to(dnew_v.dtype.element_ty), mask=live[:, None] & (keeps & (column < V))[None, :])
            read *= (tl.exp2(total) * scale)[:, None]
            dstate = tl.dot(queries, read.to(queries.dtype), dstate * tl.exp2(last), input_precision=PRECISION)
            dstate -= tl.dot(erased, dvalue.to(erased.dtype), input_precision=PRECISION)
            local = load_rows(dv_local, next_start, row, head, column, row < next_tokens, H, V)
            start, tokens, state_row, last = next_start, next_tokens, next_row, next_last
    if STARTS:
        at = dstarts + tl.cast(tl.program_id(0), tl.int64) * (H * K * V) + inside
        tl.store(at, dstate, mask=live_state)


@triton.jit
def _sum_kernel(dstarts, reader_ptr, reader, sums, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the gradients of the chains that start from entry ``program_id(0)``, slot 1 + it, in a fixed order."""
    entry = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = element < ELEMENTS
    at = sums + tl.cast(entry, tl.int64) * ELEMENTS + element
    total = tl.load(at, mask=live, other=0.0)
    for place in range(tl.load(reader_ptr + entry + 1), tl.load(reader_ptr + entry + 2)):
        chain = tl.cast(tl.load(reader + place), tl.int64)
        total += tl.load(dstarts + chain * ELEMENTS + element, mask=live, other=0.0)
    tl.store(at, total, mask=live)


@dataclass(frozen=True, eq=False)
class HalfAdjoint:
    """The reverse pass of a wave with zero gradients at its exits: final but for the chains that lead to an exit."""

    rows: torch.Tensor  # [R, H, K, V] gradients of states
    starts: list[torch.Tensor]  # of each level, float32 [C, H, K, V], those of the states that its chains start from


def run_adjoint(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    dout: torch.Tensor,
    decay: torch.Tensor,
    ends: torch.Tensor,
    dv_local: torch.Tensor,
    dexit: torch.Tensor | None,
    walk: StatePass,
    chunk_size: int,
    half: HalfAdjoint | None = None,
    dentry: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the gradients of the inputs need of the reverse state pass, for the chunks of one wave.

    Args:
        q: [n, Hk, K], not scaled.
        dout: [n, H, V].
        ends: float32 [N, H] cumulative log2 decay of each chunk's last token.
        dv_local: [n, H, V] gradient of v' through outputs of the same chunk; takes the whole gradient of v'.
        dexit: float32 [X, H, K, V] gradients of the exit states; None for a wave without exits.
        half: what `begin_adjoint` made of this wave; then only chains that lead to an exit are walked, with no other
            pass beside them.
        dentry: float32 [Y, H, K, V], to which the gradients of the entry states are added; None where nobody asks.

    Returns:
        Gradients of the states in rows [R, H, K, V] in the dtype of ``dv_local``; those of entries are not written.
    """
    drows = _rows_of(k, dv_local, walk) if half is None else half.rows
    below = _no_starts(k, dv_local)
    # A program reads a row of dv'_local before it writes it, and no other program does either.
    tensors = (q, k, w, dout, decay, ends, dv_local, dexit)
    for number, level in reversed(list(enumerate(walk.levels))):
        if half is None:
            kept = number > 0 or dentry is not None
            end, starts = level.end, below.new_empty((level.end - level.begin if kept else 0, *below.shape[1:]))
        else:
            end, starts = level.open_end, half.starts[number]
        _launch(tensors, below, starts, drows, level.begin, walk, number, end, chunk_size, alone=half is not None)
        below = starts
    if dentry is not None:
        _add_to_entries(below, walk, dentry)
    return drows


def begin_adjoint(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, dout: torch.Tensor, decay: torch.Tensor, ends: torch.Tensor,
    dv_local: torch.Tensor, dentry: torch.Tensor, walk: StatePass, chunk_size: int, keep: bool,
) -> HalfAdjoint | None:  # fmt: skip
    """The reverse pass of a wave below entries with zero gradients at its exits.

    Args:
        dv_local: takes the gradient of v' where that is final.
        dentry: float32 [Y, H, K, V], to which the gradients of the entry states are added.
        keep: keep what is final for `run_adjoint`, which else begins again, and None is returned. Another pass runs
            beside this then.
    """
    drows = _rows_of(k, dv_local, walk) if keep else None
    below, starts = _no_starts(k, dv_local), []
    tensors = (q, k, w, dout, decay, ends, dv_local, None)
    for number, level in reversed(list(enumerate(walk.levels))):
        starts.insert(0, below.new_empty((level.end - level.begin, *below.shape[1:])))
        _launch(tensors, below, starts[0], drows, level.open_end, walk, number, level.end, chunk_size, alone=not keep)
        below = starts[0]
    _add_to_entries(below, walk, dentry)
    if not keep:
        return None
    return HalfAdjoint(drows, starts if walk.exits else [])


def _add_to_entries(starts: torch.Tensor, walk: StatePass, dentry: torch.Tensor) -> None:
    """Add the gradients that the chains of the first level start from, float32 [C, H, K, V], to those of entries."""
    elements = dentry[0].numel()
    grid = (len(dentry), triton.cdiv(elements, SUM_ELEMENTS))
    _sum_kernel[grid](starts, walk.reader_ptr, walk.reader, dentry, ELEMENTS=elements, BLOCK=SUM_ELEMENTS)


def _rows_of(k: torch.Tensor, dv_local: torch.Tensor, walk: StatePass) -> torch.Tensor:
    return dv_local.new_empty((max(1, walk.rows), dv_local.shape[1], k.shape[2], dv_local.shape[2]))


def _no_starts(k: torch.Tensor, dv_local: torch.Tensor) -> torch.Tensor:
    return torch.empty((0, dv_local.shape[1], k.shape[2], dv_local.shape[2]), dtype=torch.float32, device=k.device)


def _launch(
    tensors, below, starts, drows, first_kept: int, walk: StatePass, number: int, end: int, chunk_size: int, alone: bool
) -> None:
    """Walk the chains of a level up to ``end``; from ``first_kept`` on they keep rows, if there are any.

    Args:
        tensors: q, k, w, dout, decay, ends, dv_local, dexit.
        below: gradients of the states that the chains of the level below start from; a level reads no others.
        starts: takes those of this level, unless it is empty.
    """
    q, k, w, *others, dv_local, dexit = tensors
    level, heads, value_dim = walk.levels[number], *dv_local.shape[1:]
    if end == level.begin:
        return
    key_heads, key_dim = k.shape[1:]
    tiles = tiles_fit(k, key_dim)
    if tiles:
        q, k, w = (tile_rows(x, chunk_size, key_dim) for x in (q, k, w))
    sizes = state_sizes(key_dim, value_dim, dv_local.dtype, (end - level.begin) * heads, alone)
    _adjoint_kernel[(end - level.begin, heads, triton.cdiv(value_dim, sizes.columns))](
        q, k, w, *others, dv_local, dexit, below, starts, drows, dv_local,
        walk.chunks, walk.chains, walk.reader_ptr, walk.reader, walk.twig_ptr, walk.twigs,
        level.begin, level.end, first_kept, key_dim**-0.5,
        HK=key_heads, H=heads, K=key_dim, V=value_dim, KP=padded(key_dim), BV=sizes.columns, C=chunk_size,
        KEEP=drows is not None, STARTS=len(starts) > 0, EXITS=dexit is not None and len(dexit) > 0,
        TWIGS=walk.branch_twigs, TILES=tiles, PRECISION=precision(dv_local.dtype),
        CHUNK_COLUMNS=CHUNK_COLUMNS, CHAIN_COLUMNS=CHAIN_COLUMNS,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
