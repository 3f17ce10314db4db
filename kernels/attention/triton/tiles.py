"""Tile lists: which tiles of the other axis each owned tile has to visit, and the mask of those on the border.

A kernel owns tiles of one axis (query rows for out and dq, key rows for dk and dv) and walks over tiles of the other,
the walked axis. Owned tiles of query rows are aligned; those of keys begin anew where a trunk begins and may be short
(`pieces.tile_starts`). Walked tiles start anywhere. So a list covers what is visible with few tiles. A walked tile that
every owned row sees is full and needs no mask; the others carry one bit a pair.

Visibility comes in pieces of the owned rows (`cp_engine.kernels.attention.pieces`). Everything is made in numpy for all
owned tiles at once: ``coordinate + tile * pitch`` is one axis on which the tiles of different owners cannot meet.

Shapes: T owned tiles, R ranges of full tiles, B border tiles, O owned rows of a tile, W words of a row (`WORD` walked
rows each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.pieces import Pieces, cut, row_pieces, tile_starts, transposed
from cp_engine.kernels.attention.ranges import expand, union

WORD = 64
ENTRY = 6  # columns of `TileList.entries`
HEAVY = 512  # a program is heavy if it has more than one part in so many of a head's work


@dataclass(frozen=True, eq=False)
class TileList:
    """For one axis, one owned and one walked tile length."""

    # int32 [T, ENTRY] as launched: first owned row, owned rows, first range, full tiles, first border, border end
    entries: torch.Tensor
    range_lo: torch.Tensor  # int32 [R + 1] first walked row of a range of full tiles; the last one is never used
    range_tiles: torch.Tensor  # int32 [R + 1]
    border_lo: torch.Tensor  # int32 [B + 1] first walked row of a border tile; the last one is never used
    words: torch.Tensor  # int8 to int64 [B, W, O] bit j of word w: the row sees walked row border_lo + w * WORD + j
    full_pairs: int  # pairs computed in full tiles
    border_pairs: int  # pairs computed in border tiles, hidden ones included

    @property
    def tiles(self) -> int:
        return self.entries.shape[0]


def tile_list(intervals: Intervals, axis: str, owned: int, walked: int) -> TileList:
    """The tile list of ``intervals`` on the host, made at the first call with these arguments.

    Args:
        axis: "rows": query rows are owned; "keys": key rows up to ``key_end`` are.
        owned, walked: rows of an owned and of a walked tile.
    """
    return intervals.prepared(*_named(axis, owned, walked))


def tiles_on_device(intervals: Intervals, axis: str, owned: int, walked: int) -> TileList:
    """`tile_list` on the device of the calls."""
    return intervals.on_device(*_named(axis, owned, walked))


def _named(axis: str, owned: int, walked: int):
    return f"triton {axis} {owned} {walked}", lambda made: build_tile_list(made, axis, owned, walked)


def build_tile_list(intervals: Intervals, axis: str, owned: int, walked: int) -> TileList:
    """See `tile_list`."""
    pieces, rows, reach = row_pieces(intervals), intervals.rows, intervals.key_end
    if axis == "keys":
        pieces, rows, reach = transposed(pieces), reach, rows
    starts = tile_starts(rows, owned, pieces if axis == "keys" else None)
    tiles, height = len(starts), np.diff(np.append(starts, rows))
    pieces, tile = cut(pieces, starts)
    pitch = reach + 2 * walked
    seen = union(tile * pitch + pieces.lo, tile * pitch + pieces.last_hi)
    full_lo, full_tiles = full_ranges(pieces, tile, pitch, height, walked)
    rest = _difference(seen, (full_lo, full_lo + full_tiles * walked))
    border = _cover(rest, pitch, walked)
    words = mask_words(pieces, tile, starts, pitch, border, rest, owned, walked)
    range_ptr = np.searchsorted(full_lo, np.arange(tiles + 1) * pitch)
    border_ptr = np.searchsorted(border, np.arange(tiles + 1) * pitch)
    total = np.append(0, np.cumsum(full_tiles))
    full = total[range_ptr[1:]] - total[range_ptr[:-1]]
    entries = np.stack([starts, height, range_ptr[:-1], full, border_ptr[:-1], border_ptr[1:]], 1)
    order = launch_order(full + np.diff(border_ptr))

    def put(x, dtype=np.int32):
        return torch.as_tensor(np.ascontiguousarray(x, dtype))

    return TileList(
        entries=put(entries[order]),
        range_lo=put(np.append(full_lo % pitch, 0)),
        range_tiles=put(np.append(full_tiles, 0)),
        border_lo=put(np.append(border % pitch, 0)),
        words=put(words, words.dtype),
        full_pairs=int(full.sum()) * owned * walked,
        border_pairs=len(border) * owned * walked,
    )


def launch_order(work: np.ndarray) -> np.ndarray:
    """In which order programs are launched; ``work``: walked tiles of each.

    Heavy ones begin first, or the last of them would end alone. All others, and heavy ones of about the same work,
    follow each other as their rows do: neighbours walk over the same rows, which the cache then still holds.
    """
    heavy = work * HEAVY > work.sum()
    half_octaves = np.ceil(2 * np.log2(np.maximum(work, 1)))
    return np.argsort(np.where(heavy, -half_octaves, 0), kind="stable")


def full_ranges(pieces: Pieces, tile: np.ndarray, pitch: int, height: np.ndarray, walked: int):
    """Ranges that every row of their owned tile sees, as (lo, whole tiles in it), ascending."""
    core_lo = pieces.last_lo
    keep = pieces.hi > core_lo
    at = np.concatenate([core_lo[keep], pieces.hi[keep]]) + np.tile(tile[keep] * pitch, 2)
    weight = np.concatenate([pieces.length[keep], -pieces.length[keep]])
    order = np.argsort(at, kind="stable")
    at, seen = at[order], np.cumsum(weight[order])
    last = np.append(at[1:] != at[:-1], True) if len(at) else np.zeros(0, bool)
    at, seen = at[last], seen[last]
    full = np.flatnonzero(seen == height[at // pitch])
    lo, hi = union(at[full], at[np.minimum(full + 1, max(len(at) - 1, 0))])
    tiles = (hi - lo) // walked
    return lo[tiles > 0], tiles[tiles > 0]


def _cover(rest: tuple[np.ndarray, np.ndarray], pitch: int, walked: int) -> np.ndarray:
    """Starts of tiles that cover the ranges, none overlapping another, from the left in every owned tile."""
    lo, hi = rest
    owner = lo // pitch
    rank = np.arange(len(lo)) - np.searchsorted(owner, owner)  # a range's number among those of its owned tile
    start, count = np.zeros_like(lo), np.zeros_like(lo)
    covered = np.zeros(int(owner[-1]) + 1 if len(lo) else 0, np.int64)
    by_rank = np.argsort(rank, kind="stable")
    for index in np.split(by_rank, np.cumsum(np.bincount(rank))[:-1]) if len(lo) else ():
        start[index] = np.maximum(lo[index], covered[owner[index]])
        count[index] = np.maximum(-((start[index] - hi[index]) // walked), 0)
        covered[owner[index]] = start[index] + count[index] * walked
    return np.repeat(start, count) + walked * expand(np.zeros_like(count), count)


def mask_words(
    pieces: Pieces,
    tile: np.ndarray,
    starts: np.ndarray,
    pitch: int,
    border: np.ndarray,
    rest: tuple[np.ndarray, np.ndarray],
    owned: int,
    walked: int,
    own: np.ndarray | None = None,
) -> np.ndarray:
    """Int8 to int64 [B, W, O]: what each owned row sees in each border tile.

    Args:
        pieces, tile, starts: as `cut` makes and takes them.
        pitch: what a tile is further along the common axis than the one before it.
        border: ascending starts of the border tiles, on the common axis.
        rest: ranges that border tiles are for, on the common axis: one may reach into a full one.
        own: how many walked rows of each border tile count, where the next one begins before its end.
    """
    per_row = -(-walked // WORD)
    bits = next(bits for bits in (8, 16, 32, 64) if min(walked, WORD) <= bits)
    words = np.zeros((len(border), per_row, owned), f"uint{bits}")
    base = tile * pitch
    which, at = _meetings(base + pieces.lo, base + pieces.last_hi, border, walked)
    place = base[which] - border[at]
    met = pieces.take(which)
    first_slot = at * (per_row * owned) + met.first - starts[tile[which]]
    slot, lo, hi = replace(met, first=first_slot, lo=met.lo + place, hi=met.hi + place).by_row()
    part, at_part = _meetings(*rest, border, walked)
    part_lo, part_hi = rest[0][part] - border[at_part], rest[1][part] - border[at_part]
    for word in range(per_row):
        below = _below(min(WORD, walked - word * WORD)).astype(words.dtype)
        # A row's intervals do not overlap, so adding their bits joins them.
        np.add.at(words.reshape(-1), slot + word * owned, _bits(below, lo - word * WORD, hi - word * WORD))
        wanted = np.zeros(len(border), words.dtype)
        np.add.at(wanted, at_part, _bits(below, part_lo - word * WORD, part_hi - word * WORD))
        if own is not None:
            wanted &= _bits(below, np.zeros_like(own), own - word * WORD)
        words[:, word] &= wanted[:, None]
    return words.view(f"int{bits}")


def _below(most: int) -> np.ndarray:
    """uint64 [most + 1]: words whose first 0 .. ``most`` bits are set."""
    return np.array([(1 << end) - 1 for end in range(most + 1)], np.uint64)


def _bits(below: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Words with the bits lo .. hi - 1, as far as ``below`` has them."""
    return below.take(hi, mode="clip") & ~below.take(lo, mode="clip")


def _meetings(lo: np.ndarray, hi: np.ndarray, border: np.ndarray, walked: int):
    """All (range, border tile) that share a row. Border tiles ascend and do not overlap."""
    first = np.searchsorted(border, lo - walked, side="right")
    count = np.maximum(np.searchsorted(border, hi, side="left") - first, 0)
    return np.repeat(np.arange(len(lo)), count), expand(first, count)


def _difference(whole, part) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of ``whole`` without those of ``part``, which lie inside them. Both ascend and do not overlap."""
    at = np.concatenate([whole[0], part[1], whole[1], part[0]])
    weight = np.repeat([1, -1], len(whole[0]) + len(part[0]))
    order = np.argsort(at, kind="stable")
    at, inside = at[order], np.cumsum(weight[order])
    last = np.append(at[1:] != at[:-1], True) if len(at) else np.zeros(0, bool)
    at, inside = at[last], inside[last]
    open_ = np.flatnonzero(inside > 0)
    return at[open_], at[np.minimum(open_ + 1, max(len(at) - 1, 0))]
