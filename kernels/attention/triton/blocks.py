"""Blocks of pairs whose p and ds are kept in memory between kernels, and the waves of launches that they are kept for.

A block is a tile of query tokens times a tile of key rows, both aligned, so that the kernel that owns rows and the one
that owns keys mean the same pairs by it. Blocks are numbered by row tile; those of one tile that every row of it sees
whole come first. A wave is a range of row tiles whose blocks fit into the workspace.

Shapes: T row tiles, B blocks, M blocks that need a mask, W words of a row, O tokens of a row tile, V waves,
E key tiles of all waves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.pieces import Pieces, cut, row_pieces
from cp_engine.kernels.attention.ranges import expand, union
from cp_engine.kernels.attention.triton.tiles import full_ranges, mask_words

ROW_ENTRY = 5  # columns of `Blocks.row_entries`
KEY_ENTRY = 3  # columns of `Blocks.key_entries`


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
    key_entries: torch.Tensor  # int32 [E, KEY_ENTRY] key tile, first item, items
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
    pieces, tile = cut(row_pieces(intervals), tokens)
    tiles = -(-intervals.rows // tokens)
    pitch = keys * (-(-intervals.key_end // keys) + 1)
    seen = union(tile * pitch + pieces.lo, tile * pitch + pieces.last_hi)
    height = np.minimum(tokens, intervals.rows - tokens * np.arange(tiles))
    full = _full_blocks(pieces, tile, pitch, height, keys)
    first, end = union(seen[0] // keys, -(-seen[1] // keys))
    border = np.setdiff1d(expand(first, end - first), full, assume_unique=True)
    words = mask_words(pieces, tile, pitch, border * keys, seen, tokens, keys)
    of_tile = np.arange(tiles + 1) * (pitch // keys)
    full_ptr, border_ptr = np.searchsorted(full, of_tile), np.searchsorted(border, of_tile)
    whole, masked = np.diff(full_ptr), np.diff(border_ptr)
    place = np.concatenate([full, border]) % (pitch // keys) * keys
    owner = np.concatenate([full, border]) // (pitch // keys)
    order = np.argsort(owner, kind="stable")
    place, owner = place[order], owner[order]

    slot = np.append(0, np.cumsum(whole + masked))
    cuts = _wave_cuts(slot, most, multiple)
    wave = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    row_entries = np.stack([np.arange(tiles), slot[:-1], whole, whole + masked, border_ptr[:-1]], 1)
    row_entries = row_entries[np.lexsort([-(whole + masked), wave])]
    number = np.arange(len(place)) - slot[cuts[:-1]][wave[owner]]
    key_entries, items, key_ptr = _by_key_tile(
        wave[owner], len(cuts) - 1, place // keys, np.stack([number, owner * tokens], 1)
    )
    waves = tuple(
        Wave(int(slot[cuts[w]]), *((int(at[w]), int(at[w + 1] - at[w])) for at in (cuts, key_ptr)))
        for w in range(len(cuts) - 1)
    )

    def put(x, dtype=np.int32):
        return torch.as_tensor(np.ascontiguousarray(x, dtype))

    return Blocks(
        row_entries=put(row_entries),
        places=put(np.append(place, 0)),
        words=put(words, words.dtype),
        key_entries=put(key_entries),
        items=put(np.append(items, [[0, 0]], 0)),
        waves=waves,
        most=int(np.diff(slot[cuts]).max(initial=0)),
    )


def _full_blocks(pieces: Pieces, tile: np.ndarray, pitch: int, height: np.ndarray, keys: int) -> np.ndarray:
    """Blocks, counted along the common axis of all row tiles, that every row of their tile sees whole."""
    lo, length = full_ranges(pieces, tile, pitch, height, 1)
    first, end = -(-lo // keys), (lo + length) // keys
    return expand(first, np.maximum(end - first, 0))


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
