"""Chunks of a forest's fragments, ordered so that every step of the state pass is a slice.

Chunks restart at every fragment. They are kept in groups of one padded width (a short fragment does not pay for a full
chunk) and of trees of one *turn*, 0 without an entry and else one more than the round in which the entry's state
arrives; inside a group they stand level by level. A step is (part of) one level of one group: its chunks depend only on
earlier steps of their turn.

States live in slots: slot 0 is the zero state, slots 1..Y are the entries, the others are written by chunks.

Shapes: n rows, F fragments, Y entries, X exits, N chunks of a group, C padded chunk width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# Widths below this save too little to be worth further steps.
MIN_WIDTH = 8
# Chunks of one step, so that the states that a wide level reads do not all stand in memory twice.
MAX_STEP = 512


@dataclass(frozen=True, eq=False)
class ChunkGroup:
    width: int
    turn: int  # of the trees that these chunks belong to
    rows: torch.Tensor  # int64 [N, C] local rows, n where padding
    reads: torch.Tensor  # int64 [N] slot of the state that the chunk starts from
    writes: torch.Tensor  # int64 [N] slot of the state that the chunk ends with, -1 where nobody needs it


@dataclass(frozen=True)
class Step:
    """Chunks [begin, end) of a group. Those before ``exit_end`` lead to an exit, those before ``state_end`` write a
    state, into the slots from ``slot`` on."""

    group: int
    begin: int
    exit_end: int
    state_end: int
    end: int
    slot: int


@dataclass(frozen=True, eq=False)
class ChunkTables:
    rows: int  # n, padding row included
    entries: int
    slots: int
    groups: tuple[ChunkGroup, ...]
    steps: tuple[Step, ...]  # parents first
    exit_slot: torch.Tensor  # int64 [X]
    exits_of: tuple[torch.Tensor, ...]  # int64, the exits of each turn
    through_slot: torch.Tensor  # int64 [XA] slots of the exits that are affine in an entry


def chunk_tables(
    fragment_row: np.ndarray,
    fragment_parent: np.ndarray,
    fragment_entry: np.ndarray,
    exit_fragment: np.ndarray,
    exit_entry: np.ndarray,
    entry_level: np.ndarray,
    rows: int,
    chunk_size: int = 64,
    device: torch.device | str = "cpu",
) -> ChunkTables:
    """Cut fragments into chunks; the arguments are those of the rank's plan, ``rows`` counts the padding row.

    Raises:
        ValueError: if ``chunk_size`` is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    fragments = len(fragment_parent)
    length = np.diff(fragment_row)
    count = -(-length // chunk_size)
    last_chunk = np.cumsum(count) - 1
    fragment = np.repeat(np.arange(fragments), count)
    index = np.arange(len(fragment)) - (last_chunk - count + 1)[fragment]
    start = np.asarray(fragment_row)[fragment] + index * chunk_size
    tokens = np.minimum(length[fragment] - index * chunk_size, chunk_size)
    entries, turns = len(entry_level), np.append(1 + entry_level, 0)  # last cell: no entry
    base_level, turn_of, to_exit = _walk_fragments(count, fragment_parent, turns[fragment_entry], exit_fragment)
    read_below = np.zeros(fragments, bool)
    read_below[fragment_parent[fragment_parent >= 0]] = True
    read_below[exit_fragment] = True
    writes_state = (index + 1 < count[fragment]) | read_below[fragment]

    kind = np.where(to_exit[fragment], 0, np.where(writes_state, 1, 2))
    width = _padded_width(tokens, chunk_size)
    level = base_level[fragment] + index
    turn = turn_of[fragment]
    order = np.lexsort((np.arange(len(fragment)), kind, level, turn, width))
    place, steps, slots = _steps(width[order], turn[order], level[order], kind[order], 1 + entries)
    writes = np.full(len(fragment) + 1, -1, np.int64)  # last cell: the chunk before a root or an entry
    writes[order] = place
    parent = fragment_parent[fragment]
    previous = np.where(index > 0, np.arange(len(fragment)) - 1, np.where(parent >= 0, last_chunk[parent], -1))
    reads = np.where(previous >= 0, writes[previous], 1 + fragment_entry[fragment])
    groups = _groups(order, width, turn, start, tokens, reads, writes, rows, device)
    exit_slot = torch.as_tensor(writes[last_chunk[exit_fragment]], device=device)
    through = torch.as_tensor(np.flatnonzero(exit_entry >= 0), device=device)
    exit_turn = turn_of[exit_fragment]
    exits_of = [np.flatnonzero(exit_turn == number) for number in range(int(turns.max()) + 1)]
    exits_of = tuple(torch.as_tensor(each, device=device) for each in exits_of)
    return ChunkTables(rows, entries, slots, groups, steps, exit_slot, exits_of, exit_slot[through])


def _walk_fragments(count, parent, own_turn, exit_fragment) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per fragment: level of its first chunk, turn of its tree, whether an exit stands at or below."""
    level, turn = [0] * len(parent), own_turn.tolist()
    up, chunks = parent.tolist(), count.tolist()
    for f, p in enumerate(up):
        level[f] = 0 if p < 0 else level[p] + chunks[p]
        if p >= 0:
            turn[f] = turn[p]
    to_exit = np.zeros(len(parent), bool)
    to_exit[exit_fragment] = True
    for f in range(len(parent) - 1, -1, -1):
        if up[f] >= 0 and to_exit[f]:
            to_exit[up[f]] = True
    return np.asarray(level, np.int64), np.asarray(turn, np.int64), to_exit


def _padded_width(tokens: np.ndarray, chunk_size: int) -> np.ndarray:
    widths = [chunk_size]
    while widths[-1] % 2 == 0 and widths[-1] // 2 >= MIN_WIDTH:
        widths.append(widths[-1] // 2)
    widths = np.asarray(widths[::-1], np.int64)
    return widths[np.searchsorted(widths, tokens)]


def _steps(width, turn, level, kind, first_slot) -> tuple[np.ndarray, tuple[Step, ...], int]:
    """Steps of sorted chunks, the slot that each chunk writes (-1 for none), and the number of slots."""
    total = len(width)
    new_group = np.ones(total, bool)
    new_group[1:] = (width[1:] != width[:-1]) | (turn[1:] != turn[:-1])
    new_step = new_group.copy()
    new_step[1:] |= level[1:] != level[:-1]
    index = np.arange(total)
    new_step |= (index - np.maximum.accumulate(np.where(new_step, index, 0))) % MAX_STEP == 0
    group = np.cumsum(new_group) - 1
    group_begin = np.flatnonzero(new_group)
    begin = np.flatnonzero(new_step)
    end = np.append(begin[1:], total)
    places = np.full(total, -1, np.int64)
    steps, slot = [], first_slot
    for s in np.argsort(level[begin], kind="stable").tolist():
        lo, hi = int(begin[s]), int(end[s])
        exit_end, state_end = lo + np.searchsorted(kind[lo:hi], [1, 2])
        places[lo:state_end] = slot + np.arange(state_end - lo)
        offset = int(group_begin[group[lo]])
        bounds = [int(x) - offset for x in (lo, exit_end, state_end, hi)]
        steps.append(Step(int(group[lo]), *bounds, slot))
        slot += int(state_end) - lo
    return places, tuple(steps), slot


def _groups(order, width, turn, start, tokens, reads, writes, rows, device) -> tuple[ChunkGroup, ...]:
    groups = []
    cuts = np.flatnonzero((np.diff(width[order]) != 0) | (np.diff(turn[order]) != 0)) + 1
    for member in np.split(order, cuts):
        if len(member) == 0:
            continue
        column = np.arange(int(width[member[0]]))
        row = np.where(column < tokens[member, None], start[member, None] + column, rows)
        tables = [torch.as_tensor(x, device=device) for x in (row, reads[member], writes[member])]
        groups.append(ChunkGroup(len(column), int(turn[member[0]]), *tables))
    return tuple(groups)
