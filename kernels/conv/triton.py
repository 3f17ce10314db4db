"""Convolution, SiLU and L2 norm of a Gated DeltaNet layer in one kernel for each of q, k and v, and their backward.

Backward: `_values_kernel` pulls the gradients of q, k and v back to the convolution's output (dy) and to the weight;
then a row's gradient is the sum of ``dy[reader] * weight[tap]`` over its readers. Rows that are read inside their
fragment only need no list (`_rows_kernel`); those read by several fragments or by other ranks add up a list in a fixed
order (`_listed_kernel`), so nothing is atomic.

Programs that run at the same time have heads, or blocks of channels, of the same rows: what they read lies together.
Kernels read the weight as float32 [W, C].

Shapes: n local rows, m fetched rows, M rows sent to other ranks, W taps, C channels, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_engine.kernels.conv.reference import NORM_EPS
from cp_engine.kernels.conv.tables import Channels, ConvTables, Readers
from cp_engine.kernels.shared.triton import tl, triton

ROWS = 16  # of a tile
WARPS = 4
# A tile of the backward of q, k and v belongs to one warp: its sums over rows then need neither shared memory nor
# barriers, and three warps on each of a multiprocessor's schedulers hide the loads of the others.
VALUE_ROWS, VALUE_WARPS = 8, 1
SPLITS = 256  # programs of a head that share the rows, each with a partial gradient of the weight
CHANNELS = 128  # of a program that sums over readers
ENTRIES = 16  # of a list, read at once


@triton.jit
def _tap(
    x, fetched, taps, tap: tl.constexpr, row, column, live, inside, rows, total,
    C: tl.constexpr, W: tl.constexpr, FETCHED: tl.constexpr,
):  # fmt: skip
    """Input of one tap of a tile, float32, for channels ``column`` of all C; ``total`` is n + m."""
    source = tl.cast(tl.load(taps + row * W + tap, mask=live, other=0), tl.int64)
    start, known = x + source * C, live & (source < rows)
    if FETCHED:
        start = tl.where(source < rows, start, fetched + (source - rows) * C)
        known = live & (source < total)
    at = start[:, None] + column[None, :]
    return tl.load(at, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _convolved(
    x, fetched, weight, taps, row, column, live, inside, rows, total,
    C: tl.constexpr, W: tl.constexpr, FETCHED: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Convolution of a tile, float32."""
    result = tl.zeros([ROWS, DP], dtype=tl.float32)
    for tap in tl.static_range(W):
        value = _tap(x, fetched, taps, tap, row, column, live, inside, rows, total, C, W, FETCHED)
        result += value * tl.load(weight + tap * C + column, mask=inside, other=0.0)[None, :]
    return result


@triton.jit(do_not_specialize=["rows", "used", "total"])
def _qkv_kernel(
    x, fetched, weight, taps, late, out, rows, used, total,
    FIRST: tl.constexpr, C: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr,
    FETCHED: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of all rows without fetched ones, or of the ``late`` rows, which read fetched ones."""
    head, tile = tl.program_id(0) % H, tl.program_id(0) // H
    row, inner = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    live, written, inside = row < used, row < rows, inner < D
    if FETCHED:
        row = tl.cast(tl.load(late + row, mask=live, other=0), tl.int64)
        written = live
    column = FIRST + head * D + inner
    y = _convolved(x, fetched, weight, taps, row, column, live, inside, rows, total, C, W, FETCHED, ROWS, DP)
    y = y / (1.0 + tl.exp(-y))
    if NORM:
        y *= (1.0 / tl.sqrt(tl.sum(y * y, 1) + EPS))[:, None]
    at = out + row[:, None] * (H * D) + head * D + inner[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=written[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows", "used", "total"])
def _values_kernel(
    x, fetched, weight, taps, dout, dy, dweight, rows, used, total,
    FIRST: tl.constexpr, C: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, FETCHED: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    inner, tap_number = tl.arange(0, DP), tl.arange(0, WP)
    inside, column = inner < D, FIRST + head * D + inner
    sums = tl.zeros([WP, DP], dtype=tl.float32)
    for tile in range(split, tl.cdiv(used, ROWS), SPLITS):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        live = row < used
        y = _convolved(x, fetched, weight, taps, row, column, live, inside, rows, total, C, W, FETCHED, ROWS, DP)
        sigmoid = 1.0 / (1.0 + tl.exp(-y))
        grad = tl.load(
            dout + row[:, None] * (H * D) + head * D + inner[None, :], mask=live[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        if NORM:
            value = y * sigmoid
            inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) + EPS)
            value *= inverse[:, None]
            grad = inverse[:, None] * (grad - value * tl.sum(grad * value, 1)[:, None])
        grad *= sigmoid * (1.0 + y * (1.0 - sigmoid))
        tl.store(
            dy + row[:, None] * C + column[None, :], grad.to(dy.dtype.element_ty), mask=live[:, None] & inside[None, :]
        )
        for tap in tl.static_range(W):
            value = _tap(x, fetched, taps, tap, row, column, live, inside, rows, total, C, W, FETCHED)
            part = tl.sum(grad * value, 0)
            sums += tl.where(tap_number == tap, 1.0, 0.0)[:, None] * part[None, :]
    at = dweight + tl.cast(split, tl.int64) * (W * C) + tap_number[:, None] * C + column[None, :]
    tl.store(at, sums, mask=(tap_number < W)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    dy, weight, following, dx, rows,
    C: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < C
    count = tl.load(following + row, mask=row < rows, other=-1)
    total = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    for step in tl.static_range(W):
        read = (count > step)[:, None] & inside[None, :]
        value = tl.load(dy + (row + step)[:, None] * C + column[None, :], mask=read, other=0.0).to(tl.float32)
        total += value * tl.load(weight + (W - 1 - step) * C + column, mask=inside, other=0.0)[None, :]
    at = dx + row[:, None] * C + column[None, :]
    tl.store(at, total.to(dx.dtype.element_ty), mask=(count >= 0)[:, None] & inside[None, :])


@triton.jit
def _listed_kernel(
    dy, weight, home, pointers, entries, places, out,
    C: tl.constexpr, W: tl.constexpr, HOME: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """One listed row: ``places`` says which row of ``out`` it is."""
    number = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < C
    total = tl.zeros([CHANNELS], dtype=tl.float32)
    begin, end = tl.load(pointers + number), tl.load(pointers + number + 1)
    for first in range(begin, end, ENTRIES):
        place = first + tl.arange(0, ENTRIES)
        entry = tl.cast(tl.load(entries + place, mask=place < end, other=-1), tl.int64)
        read = ((place < end) & (entry >= 0))[:, None] & inside[None, :]
        reader, tap = entry // W, entry % W
        value = tl.load(dy + reader[:, None] * C + column[None, :], mask=read, other=0.0).to(tl.float32)
        value *= tl.load(weight + tap[:, None] * C + column[None, :], mask=read, other=0.0)
        if HOME:
            came = ((place < end) & (entry < 0))[:, None] & inside[None, :]
            value += tl.load(home + (-1 - entry)[:, None] * C + column[None, :], mask=came, other=0.0)
        total += tl.sum(value, 0)
    row = tl.cast(tl.load(places + number), tl.int64)
    tl.store(out + row * C + column, total.to(out.dtype.element_ty), mask=inside)


def _parts(channels: Channels) -> tuple[tuple[int, int, int, bool], ...]:
    """First channel, heads, head size and norm of q, k and v."""
    keys, _, _ = channels.splits
    of_keys = (channels.key_heads, channels.key_dim, True)
    return (0, *of_keys), (keys, *of_keys), (2 * keys, channels.value_heads, channels.value_dim, False)


def _by_tap(weight: torch.Tensor) -> torch.Tensor:
    """[C, W] -> float32 [W, C]."""
    return weight.t().contiguous().float()


def qkv(
    x: torch.Tensor,
    fetched: Callable[[], torch.Tensor],
    weight: torch.Tensor,
    tables: ConvTables,
    channels: Channels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.conv.api.qkv`."""
    x, weight = x.contiguous(), _by_tap(weight)
    outs = tuple(x.new_empty((len(x), heads, size)) for _, heads, size, _ in _parts(channels))
    _launch_qkv(x, x, weight, tables, channels, outs, tables.used, False)
    if tables.fetched:
        # The rows that read fetched ones, which are few, once more.
        _launch_qkv(x, fetched().contiguous(), weight, tables, channels, outs, len(tables.late), True)
    return outs


def _launch_qkv(x, fetched, weight, tables: ConvTables, channels: Channels, outs, used: int, late: bool) -> None:
    rows = used if late else len(x)
    for out, (first, heads, size, norm) in zip(outs, _parts(channels), strict=True):
        _qkv_kernel[(triton.cdiv(rows, ROWS) * heads,)](
            x, fetched, weight, tables.short_taps, tables.late, out, len(x), used, len(x) + tables.fetched,
            FIRST=first, C=x.shape[1], H=heads, D=size, DP=triton.next_power_of_2(size), W=tables.width,
            FETCHED=late, NORM=norm, EPS=NORM_EPS, ROWS=ROWS, num_warps=WARPS,
        )  # fmt: skip


def qkv_backward(
    x: torch.Tensor,
    fetched: torch.Tensor,
    weight: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: ConvTables,
    channels: Channels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.conv.api.qkv_backward`; the rows are dy, in the dtype of x."""
    x, fetched, by_tap = x.contiguous(), fetched.contiguous(), _by_tap(weight)
    count, width, total = x.shape[1], tables.width, len(x) + len(fetched)
    dy = torch.empty_like(x)
    splits = max(1, min(SPLITS, triton.cdiv(tables.used, VALUE_ROWS)))
    dweight = torch.empty((splits, width, count), dtype=torch.float32, device=x.device)
    for grad, (first, heads, size, norm) in zip(grads, _parts(channels), strict=True):
        _values_kernel[(heads, splits)](
            x, fetched, by_tap, tables.short_taps, grad.contiguous(), dy, dweight, len(x), tables.used, total,
            FIRST=first, C=count, H=heads, D=size, DP=triton.next_power_of_2(size), W=width,
            WP=triton.next_power_of_2(width), FETCHED=len(fetched) > 0, NORM=norm, EPS=NORM_EPS,
            ROWS=VALUE_ROWS, SPLITS=splits, num_warps=VALUE_WARPS,
        )  # fmt: skip
    dfetched = torch.empty((len(fetched), count), dtype=torch.float32, device=x.device)
    readers = tables.readers
    _sum_listed(dy, by_tap, None, readers.fetched_ptr, readers.fetched_list, readers.fetched, dfetched)
    dweight = dweight.sum(0).t().contiguous().to(weight.dtype)
    return dy, dfetched, dweight


def rows_backward(
    dy: torch.Tensor, home: Callable[[], torch.Tensor], dtype: torch.dtype, weight: torch.Tensor, tables: ConvTables
) -> torch.Tensor:
    """See `cp_engine.kernels.conv.api.rows_backward`."""
    assert dy.dtype == dtype
    dx, weight, (rows, count) = torch.empty_like(dy), _by_tap(weight), dy.shape
    readers: Readers = tables.readers
    blocks = triton.cdiv(count, CHANNELS)
    _rows_kernel[(triton.cdiv(rows, ROWS) * blocks,)](
        dy, weight, readers.following, dx, rows,
        C=count, W=tables.width, ROWS=ROWS, CHANNELS=CHANNELS, BLOCKS=blocks, num_warps=WARPS,
    )  # fmt: skip
    _sum_listed(dy, weight, home(), readers.row_ptr, readers.row_list, readers.rows, dx)
    return dx


def _sum_listed(dy, weight, home, pointers, entries, places, out) -> None:
    if len(places):
        width, count = weight.shape
        _listed_kernel[(len(places), triton.cdiv(count, CHANNELS))](
            dy, weight, home, pointers, entries, places, out,
            C=count, W=width, HOME=home is not None and len(home) > 0, CHANNELS=CHANNELS, ENTRIES=ENTRIES,
            num_warps=WARPS,
        )  # fmt: skip
