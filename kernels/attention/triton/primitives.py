"""What the forward and the backward kernels share: tile sizes, loads, and the walk over a tile list.

Query heads that use one kv head are packed: row r of a query tile is token ``r // PACK`` and head ``r % PACK`` of the
pack, so that a tile of 128 rows spans only 128 / PACK tokens of the tree and each key tile is loaded once for all of
them. A share of heads above `MOST_PACKED` is worked off in several packs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cp_engine.kernels.attention.triton.compiler import tl, triton

MOST_PACKED = 16
LOG2_E = 1.4426950408889634  # kernels cannot read it: they repeat it


@dataclass(frozen=True)
class Sizes:
    """Tile sizes and launch options of a kernel."""

    rows: int  # packed query rows of a tile
    keys: int  # key rows of a tile
    warps: int
    stages: int  # depth of the software pipeline


# Measured on an H200; see docs/log.md. By kernel, then by padded head size.
SIZES = {
    "forward": {64: Sizes(128, 64, 4, 3), 128: Sizes(128, 64, 8, 3), 256: Sizes(128, 64, 8, 2)},
    "dq": {64: Sizes(128, 64, 8, 3), 128: Sizes(128, 64, 8, 3), 256: Sizes(64, 64, 8, 2)},
    "dkdv": {64: Sizes(64, 128, 8, 3), 128: Sizes(64, 128, 8, 2), 256: Sizes(64, 64, 8, 2)},
}
# float32 products are exact (no tf32), without matrix units: small tiles, little to pipeline.
FLOAT32 = Sizes(32, 32, 4, 1)


def sizes_of(kernel: str, size: int, dtype: torch.dtype, device: torch.device) -> Sizes:
    """Tile sizes of a kernel ("forward", "dq", "dkdv") that fit into the device's shared memory."""
    if dtype == torch.float32:
        return FLOAT32
    chosen = SIZES[kernel][max(64, padded(size))]
    if device.type != "cuda":
        return chosen
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    owned, walked = (chosen.keys, chosen.rows) if kernel == "dkdv" else (chosen.rows, chosen.keys)
    tiles = 2 * padded(size) * dtype.itemsize  # bytes of a row in a pair of tiles: k and v, or q and dout
    while tiles * (owned + chosen.stages * walked) > room and chosen.stages > 1:
        chosen = replace(chosen, stages=chosen.stages - 1)
    if tiles * (owned + walked) > room:
        return Sizes(32, 32, 4, 1)
    return chosen


def padded(size: int) -> int:
    """The head size inside a kernel: a power of two that matrix units accept."""
    return max(16, triton.next_power_of_2(size))


def packed_heads(share: int) -> int:
    """Query heads of a pack: the largest divisor of ``share`` up to `MOST_PACKED`."""
    return max(heads for heads in range(1, MOST_PACKED + 1) if share % heads == 0)


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def load_keys(
    base, start, rows, cols, limit, STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, FULL: tl.constexpr
):
    """Rows start + rows of one kv head as [len(rows), DP]; zero beyond ``limit`` and beyond D."""
    # Offsets inside a tile fit into 32 bits, its start may not.
    at = base + tl.cast(start, tl.int64) * STRIDE + rows[:, None] * STRIDE + cols[None, :]
    if FULL and D == DP:
        return tl.load(at)
    if FULL:
        return tl.load(at, mask=(cols < D)[None, :], other=0.0)
    return tl.load(at, mask=(start + rows < limit)[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def packed_at(base, start, row, cols, PACK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr):
    """Addresses [len(row), DP] of a pack's rows; ``base`` is token 0 of the pack's first head."""
    inside = (row // PACK) * STRIDE + (row % PACK) * D
    return base + tl.cast(start, tl.int64) * STRIDE + inside[:, None] + cols[None, :]


@triton.jit
def load_packed(
    base, start, row, cols, limit, PACK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TOKENS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Packed query rows from token ``start`` on as [len(row), DP]; zero where there is none."""
    at = packed_at(base, start, row, cols, PACK, STRIDE, D)
    if FULL and D == DP:
        return tl.load(at)
    if FULL:
        return tl.load(at, mask=(cols < D)[None, :], other=0.0)
    token = row // PACK
    live = (token < TOKENS) & (start + token < limit)
    return tl.load(at, mask=live[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def next_tile(range_lo, range_tiles, index, place, left, STEP: tl.constexpr):
    """The next full tile: (range, its first walked row, tiles left in the range)."""
    left -= 1
    ended = left == 0
    index += tl.cast(ended, tl.int32)
    place = tl.where(ended, tl.load(range_lo + index, mask=ended, other=0), place + STEP)
    left = tl.where(ended, tl.load(range_tiles + index, mask=ended, other=0), left)
    return index, place, left


@triton.jit
def load_bits(words, border, owned, walked, OWNED: tl.constexpr, WALKED: tl.constexpr):
    """Which walked row each owned row sees in a border tile, bool [len(owned), len(walked)]."""
    PER_ROW: tl.constexpr = (WALKED + 63) // 64
    at = words + tl.cast(border, tl.int64) * (PER_ROW * OWNED) + owned
    live = owned < OWNED
    bits = tl.load(at, mask=live, other=0)[:, None] >> (walked % 64)[None, :]
    if PER_ROW == 2:
        more = tl.load(at + OWNED, mask=live, other=0)[:, None] >> (walked % 64)[None, :]
        bits = tl.where((walked < 64)[None, :], bits, more)
    return (bits & 1) != 0
