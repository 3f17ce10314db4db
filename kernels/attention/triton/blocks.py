"""Blocks of pairs whose p and ds are kept in memory between kernels, and the waves of launches that they are kept for.

A block is a tile of query tokens times a tile of key rows, so that the kernel that owns rows and the one that owns keys
mean the same pairs by it. Row tiles are aligned; key tiles begin anew where a trunk begins and may be short
(`pieces.tile_starts`). Blocks are numbered by row tile; those of one tile that every row of it sees whole come first.
A wave is a range of row tiles whose blocks fit into the workspace.

Shapes: T row tiles, B blocks, M blocks that need a mask, W words of a row, O tokens of a row tile, V waves,
E key tiles of all waves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.pieces import Pieces, cut, row_pieces, tile_starts, transposed
from cp_engine.kernels.attention.ranges import expand, union
from cp_engine.kernels.attention.triton.tiles import full_ranges, mask_words

ROW_ENTRY = 5  # columns of `Blocks.row_entries`
KEY_ENTRY = 4  # columns of `Blocks.key_entries`


@dataclass(frozen=True)
class Wave:
    """What one launch of each kernel works on."""

    first_slot: int  # number of its first block
    row_entries: tuple[int, int]  # first of `Blocks.row_entries`, and how many
    key_entries: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Blocks:
    row_entries: torch.Tensor  # int32 [T, ROW_ENTRY] row tile, first block, blocks without mask, blocks, first mask
    places: torch.Tensor  # int32 [B + 1] first key row of each block; the last one is never used
    words: torch.Tensor  # int8 to int64 [M, W, O] as `tiles.TileList.words`
    key_entries: torch.Tensor  # int32 [E, KEY_ENTRY] first key row, key rows, first item, items
    items: torch.Tensor  # int32 [B + 1, 2] by key tile: block's number in its wave, first token of its row tile
    waves: tuple[Wave, ...]
    most: int  # blocks of the largest wave

    @property
    def blocks(self) -> int:
        return len(self.places) - 1


def build_blocks(intervals: Intervals, tokens: int, keys: int, most: int, multiple: int) -> Blocks:
    """Blocks of ``tokens`` query tokens times ``keys`` key rows.

    Args:
        most: blocks that a wave may have; a row tile that has more makes a wave of its own.
        multiple: a wave has a multiple of so many row tiles where its blocks allow it (what the device runs at once).
    """
    pieces = row_pieces(intervals)
    key_starts = tile_starts(intervals.key_end, keys, transposed(pieces))
    width = np.diff(np.append(key_starts, intervals.key_end))
    row_starts = tile_starts(intervals.rows, tokens)
    pieces, tile = cut(pieces, row_starts)
    tiles = len(row_starts)
    full, border = _blocks(pieces, tile, np.diff(np.append(row_starts, intervals.rows)), key_starts, width, keys)
    pitch, across = intervals.key_end + keys, max(len(key_starts), 1)
    seen = union(tile * pitch + pieces.lo, tile * pitch + pieces.last_hi)
    at = border // across * pitch + key_starts[border % across]
    words = mask_words(pieces, tile, row_starts, pitch, at, seen, tokens, keys, width[border % across])
    full_ptr, border_ptr = (np.searchsorted(made, np.arange(tiles + 1) * across) for made in (full, border))
    whole, masked = np.diff(full_ptr), np.diff(border_ptr)
    owner, key_tile = np.divmod(np.concatenate([full, border]), across)
    order = np.argsort(owner, kind="stable")
    owner, key_tile = owner[order], key_tile[order]

    slot = np.append(0, np.cumsum(whole + masked))
    cuts = _wave_cuts(slot, most, multiple)
    wave = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    row_entries = np.stack([np.arange(tiles), slot[:-1], whole, whole + masked, border_ptr[:-1]], 1)
    row_entries = row_entries[np.lexsort([-(whole + masked), wave])]
    number = np.arange(len(owner)) - slot[cuts[:-1]][wave[owner]]
    key_entries, items, key_ptr = _by_key_tile(
        wave[owner], len(cuts) - 1, key_tile, np.stack([number, owner * tokens], 1)
    )
    key_entries = np.stack([key_starts[key_entries[:, 0]], width[key_entries[:, 0]], *key_entries[:, 1:].T], 1)
    waves = tuple(
        Wave(int(slot[cuts[w]]), *((int(at[w]), int(at[w + 1] - at[w])) for at in (cuts, key_ptr)))
        for w in range(len(cuts) - 1)
    )

    def put(x, dtype=np.int32):
        return torch.as_tensor(np.ascontiguousarray(x, dtype))

    return Blocks(
        row_entries=put(row_entries),
        places=put(np.append(key_starts[key_tile], 0)),
        words=put(words, words.dtype),
        key_entries=put(key_entries),
        items=put(np.append(items, [[0, 0]], 0)),
        waves=waves,
        most=int(np.diff(slot[cuts]).max(initial=0)),
    )


def _blocks(
    pieces: Pieces, tile: np.ndarray, height: np.ndarray, key_starts: np.ndarray, width: np.ndarray, keys: int
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks, as ``row tile * key tiles + key tile``: those of ``keys`` keys that every row sees, and all others."""
    key_ends, across = key_starts + width, max(len(key_starts), 1)
    pitch = int(width.sum()) + keys

    def numbers(lo: np.ndarray, hi: np.ndarray, inside: bool) -> tuple[np.ndarray, np.ndarray]:
        """From and to which block ranges of the common axis go, only blocks ``inside`` them or all that they touch."""
        owner, lo, hi = lo // pitch, lo % pitch, hi - lo // pitch * pitch
        if inside:
            first, end = np.searchsorted(key_starts, lo), np.searchsorted(key_ends, hi, side="right")
        else:
            first, end = np.searchsorted(key_ends, lo, side="right"), np.searchsorted(key_starts, hi)
        return owner * across + first, owner * across + np.maximum(end, first)

    lo, length = full_ranges(pieces, tile, pitch, height, 1)
    first, end = numbers(lo, lo + length, True)
    full = expand(first, end - first)
    full = full[width[full % across] == keys]
    first, end = union(*numbers(*union(tile * pitch + pieces.lo, tile * pitch + pieces.last_hi), False))
    return full, np.setdiff1d(expand(first, end - first), full, assume_unique=True)


def _wave_cuts(slot: np.ndarray, most: int, multiple: int) -> np.ndarray:
    """Row tiles at which waves begin, and the end; ``slot``: blocks before each row tile."""
    cuts = [0]
    while cuts[-1] < len(slot) - 1:
        begin = cuts[-1]
        tiles = max(int(np.searchsorted(slot, slot[begin] + most, side="right")) - 1 - begin, 1)
        if begin + tiles < len(slot) - 1 and tiles > multiple:
            tiles -= tiles % multiple
        cuts.append(begin + tiles)
    return np.array(cuts)


def _by_key_tile(wave: np.ndarray, waves: int, key_tile: np.ndarray, items: np.ndarray):
    """Entries by wave, heaviest first; items by entry, row tiles ascending; the first entry of each wave."""
    order = np.lexsort([key_tile, wave])
    wave, key_tile = wave[order], key_tile[order]
    opens = np.append(True, (wave[1:] != wave[:-1]) | (key_tile[1:] != key_tile[:-1]))[: len(wave)]
    first = np.flatnonzero(opens)
    count = np.diff(np.append(first, len(wave)))
    entries = np.stack([key_tile[first], first, count], 1)
    sort = np.lexsort([-count, wave[first]])
    return entries[sort], items[order], np.searchsorted(wave[first], np.arange(waves + 1))
