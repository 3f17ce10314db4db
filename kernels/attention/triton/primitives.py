"""What the forward and the backward kernels share: tile sizes, loads, and the walk over a tile list.

Query heads that use one kv head are packed: row r of a query tile is token ``r // PACK`` and head ``r % PACK`` of the
pack, so that a tile of 128 rows spans only 128 / PACK tokens of the tree and each key tile is loaded once for all of
them. A share of heads above `MOST_PACKED` is worked off in several packs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.triton.tiles import TileList, tile_list
from cp_engine.kernels.shared.triton import padded, tl, triton

MOST_PACKED = 16
DESCRIPTORS = True  # off: every kernel loads through pointers


@dataclass(frozen=True)
class Sizes:
    """Tile sizes and launch options of a kernel."""

    rows: int  # packed query rows of a tile
    keys: int  # key rows of a tile
    warps: int
    stages: int  # depth of the software pipeline
    held: int = 0  # owned tiles that are held in registers (`in_registers`): q; q and dout


# By kernel, then by padded head size; measured on an H200, see docs/log.md. "dkdv" makes dk and dv in one kernel; at
# head size 256 two accumulators do not fit into registers: "dk" and "dv" are made apart, scores computed twice.
SIZES = {
    "forward": {64: Sizes(128, 64, 4, 3), 128: Sizes(64, 64, 4, 3, 1), 256: Sizes(128, 32, 8, 3)},
    "dq": {64: Sizes(128, 64, 4, 3), 128: Sizes(64, 64, 4, 3, 2), 256: Sizes(128, 32, 8, 3)},
    "dkdv": {64: Sizes(64, 64, 4, 3), 128: Sizes(64, 64, 4, 2)},
    "dk": {256: Sizes(32, 128, 8, 3)},
    "dv": {256: Sizes(32, 128, 8, 3)},
}
# Where borders are more than `SHORT` of all pairs, a tile of fewer keys wastes less.
SHORT = 0.2
SHORT_SIZES = {"forward": {128: Sizes(64, 32, 4, 3, 1)}, "dq": {128: Sizes(64, 32, 4, 3, 1)}}
# float32 products are exact (no tf32), without matrix units: small tiles, little to pipeline.
FLOAT32 = Sizes(32, 32, 4, 1)


def kernel_sizes(kernel: str, size: int, dtype: torch.dtype, device: torch.device, short: bool = False) -> Sizes:
    """Tile sizes of a kernel (a key of `SIZES`) that fit into the device's shared memory.

    Args:
        short: for packs of short segments.
    """
    if dtype == torch.float32:
        return FLOAT32
    column = max(64, padded(size))
    chosen = (short and SHORT_SIZES.get(kernel, {}).get(column)) or SIZES[kernel][column]
    if device.type != "cuda":
        return chosen
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    owned, walked = (chosen.keys, chosen.rows) if kernel in ("dkdv", "dk", "dv") else (chosen.rows, chosen.keys)
    # Both axes have two tensors: q and dout, k and v. Forward owns q alone, and dv's products need no owned v. Held
    # tiles count: on cards other than Hopper ones they or what takes their place are in shared memory all the same.
    owned *= 1 if kernel in ("forward", "dv") else 2
    row = padded(size) * dtype.itemsize
    while row * (owned + 2 * chosen.stages * walked) > room and chosen.stages > 1:
        chosen = replace(chosen, stages=chosen.stages - 1)
    if row * (owned + 2 * walked) > room:
        return Sizes(32, 32, 4, 1)
    return chosen


def row_tiles(
    kernel: str, q: torch.Tensor, pack: int, intervals: Intervals, take: Callable[..., TileList]
) -> tuple[Sizes, TileList]:
    """Sizes and tile list of a kernel that owns query rows; ``take`` is `tile_list` or `tiles_on_device`."""
    for short in (False, True):
        sizes = kernel_sizes(kernel, q.shape[2], q.dtype, q.device, short)
        tiles = tile_list(intervals, "rows", sizes.rows // pack, sizes.keys)
        if tiles.border_pairs <= SHORT * (tiles.full_pairs + tiles.border_pairs):
            break
    return sizes, take(intervals, "rows", sizes.rows // pack, sizes.keys)


def makes_apart(size: int, dtype: torch.dtype) -> bool:
    """Whether dk and dv are made by two launches."""
    return dtype != torch.float32 and padded(size) in SIZES["dk"]


def packed_heads(share: int) -> int:
    """Query heads of a pack: the largest divisor of ``share`` up to `MOST_PACKED`."""
    return max(heads for heads in range(1, MOST_PACKED + 1) if share % heads == 0)


def adjoining(x: torch.Tensor) -> torch.Tensor:
    """Rows [N, H, D] whose heads lie side by side, copied only where they do not: a slice of heads stays as it is."""
    row, head, element = x.stride()
    return x if element == 1 and head == x.shape[2] and row >= x.shape[1] * head else x.contiguous()


def sources(tensors: list[torch.Tensor], tile: list[int]) -> tuple[list, bool]:
    """What a kernel loads tiles of these tensors from: descriptors (bulk copies, from Hopper on) or themselves.

    Args:
        tensors: of one shape, only their first axis strided; as many axes as ``tile``.
        tile: extent of a tile along each axis.

    Returns:
        The arguments in the tensors' place, and whether they are descriptors.
    """
    x = tensors[0]
    exact = all(length == triton.next_power_of_2(length) <= 256 for length in tile)
    aligned = all(
        part.data_ptr() % 16 == 0 and stride * part.element_size() % 16 == 0
        for part in tensors
        for stride in part.stride()[:-1]
    )
    able = x.device.type != "cuda" or (torch.cuda.get_device_capability(x.device)[0] >= 9 and x.dtype != torch.float32)
    if not (DESCRIPTORS and able and exact and aligned and x.numel()):
        return tensors, False
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [TensorDescriptor.from_tensor(part, tile) for part in tensors], True


def row_source(q: torch.Tensor, sizes: Sizes, pack: int) -> tuple[torch.Tensor, bool]:
    """What a kernel that owns query rows loads them from, as `sources`: a descriptor only where they are held.

    The compiler keeps tiles of three axes in registers all the same: dq at head size 64 then spills 224 bytes, not 72.
    """
    if not sizes.held:
        return q, False
    (source,), described = sources([q], [sizes.rows // pack, pack, q.shape[2]])
    return source, described


@triton.jit
def in_registers(tile, WANTED: tl.constexpr):
    """``tile``, if WANTED as a product's result: in registers, laid out as a left operand of later products.

    Matrix units then read the right operand alone from shared memory, which walked tiles have to themselves. The
    product adds exact zeros.
    """
    if WANTED:
        nothing = tl.zeros([tile.shape[0], 16], tile.dtype)
        tile = tl.dot(nothing, tl.zeros([16, tile.shape[1]], tile.dtype), tile.to(tl.float32)).to(tile.dtype)
    return tile


@triton.jit
def load_keys(
    source, start, head, rows, cols, limit,
    STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, FULL: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Rows start + rows of one kv head as [len(rows), DP]; zero beyond ``limit`` and beyond D."""
    if DESCRIBED:
        tile = source.load([start, head * D])
    else:
        # Offsets inside a tile fit into 32 bits, its start may not.
        at = source + tl.cast(start, tl.int64) * STRIDE + head * D + rows[:, None] * STRIDE + cols[None, :]
        if FULL and D == DP:
            tile = tl.load(at)
        elif FULL:
            tile = tl.load(at, mask=(cols < D)[None, :], other=0.0)
        else:
            tile = tl.load(at, mask=(start + rows < limit)[:, None] & (cols < D)[None, :], other=0.0)
    return tile


@triton.jit
def packed_at(base, start, head, row, cols, PACK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr):
    """Addresses [len(row), DP] of the packed rows from token ``start`` on; ``head``: the pack's first."""
    inside = (row // PACK) * STRIDE + (row % PACK) * D
    return base + tl.cast(start, tl.int64) * STRIDE + head * D + inside[:, None] + cols[None, :]


@triton.jit
def load_packed(
    source, start, head, row, cols, limit, PACK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TOKENS: tl.constexpr, FULL: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Packed query rows from token ``start`` on as [len(row), DP]; zero where there is none."""
    if DESCRIBED:
        tile = tl.reshape(source.load([start, head, 0]), [TOKENS * PACK, DP])
    else:
        at = packed_at(source, start, head, row, cols, PACK, STRIDE, D)
        if FULL and D == DP:
            tile = tl.load(at)
        elif FULL:
            tile = tl.load(at, mask=(cols < D)[None, :], other=0.0)
        else:
            live = (row // PACK < TOKENS) & (start + row // PACK < limit)
            tile = tl.load(at, mask=live[:, None] & (cols < D)[None, :], other=0.0)
    return tile


@triton.jit
def next_tile(range_lo, range_tiles, index, place, left, STEP: tl.constexpr, PARTS: tl.constexpr):
    """The next full tile: (range, its first walked row, tiles left in the range); a listed tile is PARTS of these."""
    left -= 1
    ended = left == 0
    index += tl.cast(ended, tl.int32)
    place = tl.where(ended, tl.load(range_lo + index, mask=ended, other=0), place + STEP)
    left = tl.where(ended, tl.load(range_tiles + index, mask=ended, other=0) * PARTS, left)
    return index, place, left


@triton.jit
def load_bits(words, border, owned, walked, OWNED: tl.constexpr, WALKED: tl.constexpr):
    """Which walked row each owned row sees in a border tile, bool [len(owned), len(walked)]."""
    PER_ROW: tl.constexpr = (WALKED + 63) // 64
    at = words + tl.cast(border, tl.int64) * (PER_ROW * OWNED) + owned
    live = owned < OWNED
    word = tl.load(at, mask=live, other=0)
    if WALKED <= 32:
        word = tl.cast(word, tl.int32)
    bits = word[:, None] >> (walked % 64)[None, :]
    if PER_ROW == 2:
        more = tl.load(at + OWNED, mask=live, other=0)[:, None] >> (walked % 64)[None, :]
        bits = tl.where((walked < 64)[None, :], bits, more)
    return (bits & 1) != 0
