"""Chunks and chains of a rank's fragments, for kernels in which one program walks one chain.

Chunks restart at every fragment (short ones packed together, see `packing`, count as one) and are numbered in the order
of the rows, as fla numbers those of its sequences. A
chain is a heavy path of fragments, so its chunks are adjacent. Chains of one level do not depend on each other: a
level is one launch, and there are at most log2(leaves) + 1.

Float32 states live in slots: slot 0 is the zero state, slots 1..Y are the entries, the others belong to branch points
(ends of fragments that another chain or another rank starts from). The stages around the state pass read states from
*rows* in the dtype of the inputs: rows 0..Y-1 are the entries, the others the states that leave a chunk. Siblings read
their parent's row; the last chunk of a leaf has none.

A chain of one chunk whose state nobody reads is no chain but a *twig*: its v' follows from its parent's row alone, and
its share of the parent's state gradient is formed by the parent's chain when it comes to the branch point. So it needs
no slot, and a branch point of nothing but twigs keeps no float32 state.

The pass over everything runs in *waves* of whole trees, so that rows and slots of all trees do not live at once. Trees
of each *turn* have waves of their own, 0 without an entry and else one more than the round in which the entry's state
arrives; and so have trees above an exit: nobody need wait for what only others need. Inside a level the chains that
lead to an exit come first: where states are handed on they are walked and sent before the others, and where maps are
folded only they have to wait in backward.

Shapes: F fragments, N chunks, C chains of a pass, W its twigs, S slots, B slots and branch points without, R rows,
Y entries, X exits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from cp_engine.kernels.gdn.triton.packing import Fragments, packed_fragments

# First token; tokens; slot that its last state goes to (S or more: a branch point without one) or -1; exit that it ends
# at or -1; chunks of its chain from the last branch point above it up to itself; row of the state that enters it or -1
# for zero; row of the state that leaves it or -1 where nobody reads that.
CHUNK_COLUMNS = 7
CHAIN_COLUMNS = 4  # first chunk, chunks, slot that it starts from, 1 below an entry else 0


# Of a wave: rows, and slots at twice as much. With 32 heads of 128 x 128 a row in 16 bits is 1 MiB. Trees larger than
# this are a wave of their own.
WAVE = 4096
# Twigs of a branch point are walked one after the other: of more than these each is a chain.
MOST_TWIGS = 4


class Level(NamedTuple):
    """Chains [begin, end) of one launch; those before ``open_end`` lead to an exit."""

    begin: int
    open_end: int
    end: int


@dataclass(frozen=True, eq=False)
class StatePass:
    """Chains that one pass walks, level by level, of a level the longest first among those that lead to an exit, and
    then among the others. A chain's parent is one level up."""

    chunks: torch.Tensor  # int32 [N, CHUNK_COLUMNS] of all passes over everything, or of this one
    members: torch.Tensor  # int32 [M] chunks of this pass
    chains: torch.Tensor  # int32 [C, CHAIN_COLUMNS]
    levels: tuple[Level, ...]  # parents first
    slots: int
    rows: int
    turn: int  # of its trees
    exit: torch.Tensor  # int64 [x] the exits that it ends at
    exit_slot: torch.Tensor  # int64 [x] and their slots
    reader_ptr: torch.Tensor  # int32 [B + 1]
    reader: torch.Tensor  # int32 [C] chains that start from each slot
    twig_ptr: torch.Tensor  # int32 [B + 1]
    twigs: torch.Tensor  # int32 [W] chunks that are twigs of each branch point
    branch_twigs: bool  # some twig stands at a branch point, not below an entry or a root of its own

    @property
    def exits(self) -> bool:
        """Some chunk ends at an exit."""
        return len(self.exit) > 0

    @property
    def below(self) -> bool:
        """Its trees stand below entries."""
        return self.turn > 0


@dataclass(frozen=True, eq=False)
class ChainTables:
    rows: int  # n, padding row included
    tokens: int  # rows that lie in fragments
    chunk_size: int
    fragment_row: torch.Tensor  # int64 [F + 1] what fla calls cu_seqlens
    chunk_fragment: torch.Tensor  # int64 [N, 2] fragment and place in it, what fla calls chunk_indices
    ancestors: torch.Tensor  # int64 [n] bit j of a token: whether token j of its chunk is the token or above it
    chunk_rows: torch.Tensor  # int32 [N, CHUNK_COLUMNS] of which only the first two columns are for all passes
    packed: bool  # some chunk holds several fragments
    chunks: int
    entries: int
    exits: int
    waves: tuple[StatePass, ...]  # together everything
    summary: StatePass  # only what leads to an exit
    through_slot: torch.Tensor  # int64 [XA] in the slots of ``summary``, of the exits that are affine in an entry


@dataclass(frozen=True, eq=False)
class _Fragments:
    """Per fragment: parent or -1, entry or -1, chain, first and last chunk, turn, at or above an exit."""

    parent: np.ndarray
    entry: np.ndarray
    chain: np.ndarray
    first_chunk: np.ndarray
    last_chunk: np.ndarray
    turn: np.ndarray
    to_exit: np.ndarray


def chain_tables(
    fragment_row: np.ndarray,
    fragment_parent: np.ndarray,
    fragment_entry: np.ndarray,
    chain_fragment: np.ndarray,
    chain_level: np.ndarray,
    exit_fragment: np.ndarray,
    exit_entry: np.ndarray,
    entry_level: np.ndarray,
    rows: int,
    chunk_size: int = 64,
    device: torch.device | str = "cpu",
) -> ChainTables:
    """Tables of one rank's plan (the arguments are its fields); ``rows`` counts the padding row.

    Raises:
        ValueError: for a chunk size that the kernels do not have.
    """
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size of the Triton backend must be 16, 32 or 64, got {chunk_size}")
    chain = np.repeat(np.arange(len(chain_level)), np.diff(chain_fragment))
    of = packed_fragments(fragment_row, fragment_parent, fragment_entry, chain, chain_level, exit_fragment, chunk_size)
    packed = len(of.parent) != len(fragment_parent) or not np.array_equal(of.row, fragment_row)
    return _chain_tables(of, exit_entry, entry_level, rows, chunk_size, packed, device)


def _chain_tables(
    of: Fragments, exit_entry: np.ndarray, entry_level: np.ndarray, rows: int, chunk_size: int, packed: bool, device
) -> ChainTables:
    fragment_row, exit_fragment, chain_level, entries = of.row, of.exit, of.level, len(entry_level)
    count = -(-np.diff(fragment_row) // chunk_size)
    last_chunk = np.cumsum(count) - 1
    turn, to_exit = _walk(of.parent, of.entry, entry_level, exit_fragment)
    fragments = _Fragments(of.parent, of.entry, of.chain, last_chunk - count + 1, last_chunk, turn, to_exit)
    fragment = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(fragment)) - fragments.first_chunk[fragment]
    start = np.asarray(fragment_row)[fragment] + place * chunk_size
    chunks = np.full((len(fragment), CHUNK_COLUMNS), -1, np.int64)
    chunks[:, 0] = start
    chunks[:, 1] = np.minimum(np.asarray(fragment_row)[fragment + 1] - start, chunk_size)
    chunks[last_chunk[exit_fragment], 3] = np.arange(len(exit_fragment))

    wave = _waves(fragments, chunks)
    waves = [
        _state_pass(fragments, chain_level, chunks, wave == number, entries, MOST_TWIGS) for number in np.unique(wave)
    ]
    summary = _state_pass(fragments, chain_level, chunks, to_exit, entries, 0)
    # One table serves all waves: each chunk is a member of one of them.
    table = chunks.copy()
    for part in waves:
        table[part.members] = part.chunks[part.members]
    on_device = torch.as_tensor(table.astype(np.int32), device=device)
    waves = [replace(part, chunks=on_device) for part in waves]
    through = np.flatnonzero(exit_entry >= 0)
    return ChainTables(
        rows=rows,
        tokens=int(fragment_row[-1]),
        chunk_size=chunk_size,
        fragment_row=torch.as_tensor(np.asarray(fragment_row, np.int64), device=device),
        chunk_fragment=torch.as_tensor(np.stack([fragment, place], 1), device=device),
        ancestors=torch.as_tensor(of.ancestors, device=device),
        chunk_rows=torch.as_tensor(chunks.astype(np.int32), device=device),
        packed=packed,
        chunks=len(fragment),
        entries=entries,
        exits=len(exit_fragment),
        waves=tuple(_on_device(part, device) for part in waves),
        summary=_on_device(summary, device),
        through_slot=torch.as_tensor(summary.exit_slot[through], device=device),
    )


def _walk(parent, entry, entry_level, exit_fragment) -> tuple[np.ndarray, np.ndarray]:
    """Per fragment: the turn of its tree, and whether an exit stands at or below it."""
    turns = np.append(1 + np.asarray(entry_level, np.int64), 0)  # last cell: no entry
    turn, up = turns[np.asarray(entry, np.int64)].tolist(), np.asarray(parent).tolist()
    to_exit = np.zeros(len(up), bool)
    to_exit[exit_fragment] = True
    for f, p in enumerate(up):
        if p >= 0:
            turn[f] = turn[p]
    for f in range(len(up) - 1, -1, -1):
        if up[f] >= 0 and to_exit[f]:
            to_exit[up[f]] = True
    return np.asarray(turn, np.int64), to_exit


def _waves(of: _Fragments, chunks: np.ndarray) -> np.ndarray:
    """Number of the wave that each fragment belongs to: whole trees, in their order, up to `WAVE` together."""
    top = np.arange(len(of.chain))
    for f in np.flatnonzero(of.parent >= 0).tolist():
        top[f] = top[of.parent[f]]
    inner = np.zeros(len(of.chain), bool)
    inner[of.parent[of.parent >= 0]] = True
    inner |= chunks[of.last_chunk, 3] >= 0
    weight = np.bincount(top, of.last_chunk - of.first_chunk + 3 * inner, minlength=len(top)).astype(np.int64)
    tops = np.flatnonzero(top == np.arange(len(top)))
    kind = 2 * of.turn[tops] + of.to_exit[tops]
    wave, filled, number, open_kind = np.zeros(len(top), np.int64), 0, -1, -1
    for place in np.argsort(kind, kind="stable").tolist():
        tree = tops[place]
        if kind[place] != open_kind or (filled and filled + weight[tree] > WAVE):
            filled, number, open_kind = 0, number + 1, kind[place]
        filled += int(weight[tree])
        wave[tree] = number
    return wave[top]


def _state_pass(
    of: _Fragments, level: np.ndarray, chunks: np.ndarray, kept: np.ndarray, entries: int, most_twigs: int
) -> StatePass:
    """The pass over the ``kept`` fragments: whole trees, or of each tree a part that holds every kept one's parent.

    Numpy arrays stand for tensors: see `_on_device`.
    """
    opens = np.ones(len(of.chain), bool)
    opens[1:] = of.chain[1:] != of.chain[:-1]
    branches = np.zeros(len(of.chain), bool)
    branches[of.parent[opens & kept & (of.parent >= 0)]] = True
    branches |= (chunks[of.last_chunk, 3] >= 0) & kept
    number = np.unique(of.chain[kept])
    head = np.searchsorted(of.chain, number)
    last = head + np.bincount(of.chain[kept], minlength=len(level))[number] - 1
    length = of.last_chunk[last] - of.first_chunk[head] + 1
    # Of an entry the gradient is asked for, which chains form.
    unread = (length == 1) & ~branches[last] & (of.entry[head] < 0)
    twig = _twigs(of.parent[head], unread, most_twigs)

    # Branch points with a slot first.
    points = np.flatnonzero(branches)
    stored = np.isin(points, of.parent[head[~twig]]) | (chunks[of.last_chunk[points], 3] >= 0)
    points = np.concatenate([points[stored], points[~stored]])
    table = chunks.copy()
    ends = of.last_chunk[points]
    table[ends, 2] = 1 + entries + np.arange(len(ends))
    begins = np.zeros(len(table) + 1, bool)
    begins[of.first_chunk[opens]] = True
    begins[ends + 1] = True
    index = np.arange(len(table))
    table[:, 4] = 1 + index - np.maximum.accumulate(np.where(begins[:-1], index, 0))
    members, rows = _rows(of, table, kept, branches, entries)

    parent = of.parent[head]
    starts_from = np.where(parent >= 0, table[of.last_chunk[parent], 2], 1 + of.entry[head])
    assert (starts_from >= 0).all()
    leads_out = of.to_exit[head]
    order = np.lexsort((-length, ~leads_out, level[number]))
    order = order[~twig[order]]
    chains = np.stack([of.first_chunk[head], length, starts_from, of.turn[head] > 0], 1)[order]
    bounds = np.append(np.unique(level[number][order], return_index=True)[1], len(order)).tolist()
    spans = zip(bounds[:-1], bounds[1:], strict=True)
    levels = tuple(Level(begin, begin + int(leads_out[order[begin:end]].sum()), end) for begin, end in spans)
    reader, reader_ptr = _by_slot(chains[:, 2], 1 + entries + len(ends))
    places, twig_ptr = _by_slot(starts_from[twig], 1 + entries + len(ends))
    twigs = of.first_chunk[head[twig]][places]
    exits = members[table[members, 3] >= 0]
    exits = exits[np.argsort(table[exits, 3])]
    turn, slots = int(of.turn[kept].max(initial=0)), 1 + entries + int(stored.sum())
    return StatePass(
        table, members, chains, levels, slots, rows, turn, table[exits, 3], table[exits, 2],
        reader_ptr, reader, twig_ptr, twigs, branch_twigs=bool((starts_from[twig] > entries).any()),
    )  # fmt: skip


def _twigs(parent: np.ndarray, unread: np.ndarray, most: int) -> np.ndarray:
    """Which of the chains are twigs: those ``unread`` that have at most ``most - 1`` such siblings.

    Args:
        parent: of each chain's first fragment, or -1: a root's chain has no branch point to walk it.
    """
    if not most:
        return np.zeros_like(unread)
    siblings = np.bincount(parent[unread & (parent >= 0)], minlength=1 + int(parent.max(initial=0)))
    return unread & ((parent < 0) | (siblings[parent] <= most))


def _by_slot(slot: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of ``slot`` in the order of their values, and where those of each value begin, [count + 1]."""
    order = np.argsort(slot, kind="stable")
    return order, np.searchsorted(slot[order], np.arange(count + 1))


def _rows(of: _Fragments, table: np.ndarray, kept: np.ndarray, branches: np.ndarray, entries: int):
    """Fill in the rows that enter and leave each chunk; returns the chunks of the ``kept`` fragments and R."""
    count = of.last_chunk - of.first_chunk + 1
    member = np.repeat(kept, count)
    # The last chunk of a fragment leaves a row where a chain goes on or starts, or an exit stands.
    leaves = member.copy()
    goes_on = np.zeros(len(of.chain), bool)
    goes_on[of.parent[kept & (of.parent >= 0)]] = True
    leaves[of.last_chunk[~(goes_on | branches)]] = False
    table[leaves, 6] = entries + np.arange(int(leaves.sum()))
    enters = np.append(-1, table[:, 6])[:-1]
    enters[of.first_chunk] = np.where(of.parent >= 0, table[of.last_chunk[of.parent], 6], of.entry)
    table[:, 5] = np.where(member, enters, -1)
    return np.flatnonzero(member), entries + int(leaves.sum())


def _on_device(walk: StatePass, device) -> StatePass:
    arrays = {name: value for name, value in vars(walk).items() if isinstance(value, np.ndarray)}
    indices = ("exit", "exit_slot")  # of whole tensors
    made = {name: x.astype(np.int64 if name in indices else np.int32) for name, x in arrays.items()}
    return replace(walk, **{name: torch.as_tensor(x, device=device) for name, x in made.items()})
