"""Short fragments of a tree packed into shared chunks.

A chunk costs a full tile however few tokens it holds. Where the rest of a fragment and everything below it, or several
such subtrees next to each other below one state, fit one chunk, they become one fragment here: the mask of a token's
ancestors keeps siblings apart. Only whole subtrees are packed, so nothing starts from the state that leaves such a
chunk. Chunks thus restart at fewer places; which tokens share a row or a state does not change.

Shapes: F fragments, n tokens, C chains, X exits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

# Share of the chunks from which on it pays that packed chunks are solved by three kernels and not by one.
LEAST_SPARED = 0.1


@dataclass(frozen=True, eq=False)
class Fragments:
    """The fragments that chunks are cut from. Their fields are those of a rank's plan."""

    row: np.ndarray  # int64 [F + 1]
    parent: np.ndarray  # int64 [F]
    entry: np.ndarray  # int64 [F]
    chain: np.ndarray  # int64 [F] chain of each
    level: np.ndarray  # int64 [C]
    exit: np.ndarray  # int64 [X] fragment of each exit
    ancestors: np.ndarray  # int64 [n] bit j of a token: whether token j of its chunk is the token or above it


def packed_fragments(
    row: np.ndarray,
    parent: np.ndarray,
    entry: np.ndarray,
    chain: np.ndarray,
    level: np.ndarray,
    exit_fragment: np.ndarray,
    chunk_size: int,
) -> Fragments:
    """Pack what fits; a forest in which that spares little stays as it is."""
    row = np.asarray(row, np.int64)
    place = np.arange(int(row[-1])) - np.repeat(row[:-1], np.diff(row))
    straight = _bits_below(place % chunk_size + 1)
    plain = Fragments(row, np.asarray(parent), np.asarray(entry), chain, np.asarray(level), exit_fragment, straight)
    pieces = _pieces(plain, chunk_size)
    small = _fits(pieces, chunk_size)
    group = _groups(pieces, small, chunk_size)
    if not len(group) or len(group) - (group[-1] + 1) < LEAST_SPARED * len(group):
        return plain
    return _regrouped(plain, pieces, group, small)


def _bits_below(count: np.ndarray) -> np.ndarray:
    """int64 with the lowest ``count`` (1 to 64) bits set."""
    return (np.uint64(0xFFFFFFFFFFFFFFFF) >> (64 - count).astype(np.uint64)).view(np.int64)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Fragments cut at whole chunks, in the order of the rows."""

    fragment: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    parent: np.ndarray  # piece, -1 for a zero state or an entry
    entry: np.ndarray
    leads_out: np.ndarray  # an exit stands at its end


def _pieces(of: Fragments, chunk_size: int) -> _Pieces:
    length = np.diff(of.row)
    count = -(-length // chunk_size)
    last = np.cumsum(count) - 1
    fragment = np.repeat(np.arange(len(length)), count)
    place = np.arange(len(fragment)) - (last - count + 1)[fragment]
    above = np.where(of.parent >= 0, last[of.parent], -1)[fragment]
    leads_out = np.zeros(len(fragment), bool)
    leads_out[last[of.exit]] = True
    return _Pieces(
        fragment,
        of.row[fragment] + place * chunk_size,
        np.minimum(length[fragment] - place * chunk_size, chunk_size),
        np.where(place > 0, np.arange(len(fragment)) - 1, above),
        np.where(place > 0, -1, of.entry[fragment]),
        leads_out,
    )


def _fits(pieces: _Pieces, chunk_size: int) -> np.ndarray:
    """Tokens of each piece and everything below it, or 0 where that does not fit a chunk or leads to an exit."""
    weight, parent = pieces.tokens.tolist(), pieces.parent.tolist()
    for piece in np.flatnonzero(pieces.leads_out).tolist():
        weight[piece] = chunk_size + 1
    for piece in range(len(weight) - 1, -1, -1):
        if parent[piece] >= 0:
            weight[parent[piece]] += weight[piece]
    return np.array([w if w <= chunk_size else 0 for w in weight], np.int64)


def _groups(pieces: _Pieces, small: np.ndarray, chunk_size: int) -> np.ndarray:
    """Number of the chunk of each piece: subtrees that fit, one after the other below the same state, share one."""
    group, number, room, state, end = np.empty(len(small), np.int64), -1, 0, None, -1
    parent, entry, start = pieces.parent.tolist(), pieces.entry.tolist(), pieces.start.tolist()
    for piece, weight in enumerate(small.tolist()):
        if weight and parent[piece] >= 0 and small[parent[piece]]:
            group[piece] = number  # inside the subtree of a piece before it
            continue
        below = (parent[piece], entry[piece])
        if not (weight and weight <= room and below == state and start[piece] == end):
            number, room, state = number + 1, chunk_size if weight else 0, below
        room, end = room - weight, start[piece] + weight
        group[piece] = number
    return group


def _regrouped(of: Fragments, pieces: _Pieces, group: np.ndarray, small: np.ndarray) -> Fragments:
    """Fragments of whole chunks: a run of unpacked pieces of one fragment, or a packed chunk."""
    first = np.flatnonzero(np.diff(group, prepend=-1))  # first piece of each chunk
    # A chunk that is not packed goes on from the piece before it where both are of one fragment.
    goes_on = (small[first] == 0) & (pieces.parent[first] == first - 1) & (first > 0)
    goes_on &= pieces.fragment[first] == pieces.fragment[first - 1]
    number = np.cumsum(~goes_on) - 1
    of_piece = number[group]
    heads = first[~goes_on]
    above = pieces.parent[heads]
    parent = np.where(above >= 0, of_piece[above], -1)
    last_piece = np.append(np.flatnonzero(np.diff(pieces.fragment)), len(pieces.fragment) - 1)
    chain, level = _chains(parent)
    return replace(
        of,
        row=np.append(pieces.start[heads], of.row[-1]),
        parent=parent,
        entry=pieces.entry[heads],
        chain=chain,
        level=level,
        exit=of_piece[last_piece[of.exit]],
        ancestors=_ancestors(pieces, small, pieces.start[first][group]),
    )


def _chains(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chain of each fragment and level of each chain: a fragment goes on in the next one if that is its child."""
    opens = parent != np.arange(len(parent)) - 1
    opens[:1] = True
    chain, level = np.cumsum(opens) - 1, []
    for head in parent[opens].tolist():
        level.append(0 if head < 0 else level[chain[head]] + 1)
    return chain, np.asarray(level, np.int64)


def _ancestors(pieces: _Pieces, small: np.ndarray, chunk_start: np.ndarray) -> np.ndarray:
    """Mask of each token: the tokens of its piece up to itself, and in a packed chunk all that the piece above saw."""
    seen, whole = [0] * len(small), [0] * len(small)  # what is above the piece, and what its last token sees
    parent, tokens = pieces.parent.tolist(), pieces.tokens.tolist()
    offset = pieces.start - chunk_start
    at = offset.tolist()
    for piece in np.flatnonzero(small).tolist():
        above = parent[piece]
        seen[piece] = whole[above] if above >= 0 and small[above] else 0
        whole[piece] = seen[piece] | ((1 << tokens[piece]) - 1) << at[piece]
    piece = np.repeat(np.arange(len(small)), pieces.tokens)
    place = np.arange(len(piece)) - pieces.start[piece]
    shift = np.where(small > 0, offset, 0)[piece].astype(np.uint64)
    own = _bits_below(place + 1).view(np.uint64) << shift
    return (own | np.array(seen, np.uint64)[piece]).view(np.int64)
