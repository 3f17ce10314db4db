"""The radix forest of a batch of rollouts, as flat arrays in depth-first order.

A rollout is a row of token ids. Rows that begin alike share one path of the forest, so every shared token stands in
it once. Everything downstream (packs, layouts, plans) is computed from these arrays.

Shapes: N flat tokens (all rows), R rollouts, T tree tokens, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Forest:
    """A prefix forest in depth-first order, heaviest child first.

    Query q sees key k if and only if ``k <= q < subtree_end(segment of k)``. The child with most tokens below it
    follows its parent directly, so that a heavy path is contiguous and the visible keys of a token are at most
    ``1 + log2(T)`` intervals. `build_forest` orders roots by group, then token ids; roots and other children have a
    free order, which a layout may change.
    """

    token: np.ndarray  # int64 [T] token ids
    segment_start: np.ndarray  # int64 [S + 1] token index of each segment's first token
    parent: np.ndarray  # int64 [S] parent segment, -1 for a root; parents come before children
    depth: np.ndarray  # int64 [S] tokens above the segment's first token
    subtree_end: np.ndarray  # int64 [S] token index after the segment's last descendant
    end_segment: np.ndarray  # int64 [R] segment whose last token is the rollout's last token

    @property
    def tokens(self) -> int:
        return int(self.segment_start[-1])

    @property
    def segments(self) -> int:
        return len(self.parent)

    @property
    def rollouts(self) -> int:
        return len(self.end_segment)

    @cached_property
    def segment_length(self) -> np.ndarray:
        """int64 [S]."""
        return np.diff(self.segment_start)

    @cached_property
    def segment_of(self) -> np.ndarray:
        """int64 [T]: the segment of each token."""
        return np.repeat(np.arange(self.segments), self.segment_length)

    @cached_property
    def position(self) -> np.ndarray:
        """int64 [T]: depth of each token in its rollouts, which is its RoPE position."""
        return np.arange(self.tokens) + np.repeat(self.depth - self.segment_start[:-1], self.segment_length)

    @cached_property
    def token_parent(self) -> np.ndarray:
        """int64 [T]: the token that predicts each token, -1 for a root's first token."""
        before = np.arange(-1, self.tokens - 1)
        first = self.segment_start[:-1]
        before[first] = np.where(self.parent >= 0, self.segment_start[self.parent + 1] - 1, -1)
        return before

    @cached_property
    def rollout_length(self) -> np.ndarray:
        """int64 [R]: tokens of each rollout."""
        return self.depth[self.end_segment] + self.segment_length[self.end_segment]

    @cached_property
    def chain_head(self) -> np.ndarray:
        """int64 [S]: first segment of the heavy path that each segment lies on.

        A segment continues its parent's heavy path exactly when it follows the parent directly.
        """
        index = np.arange(self.segments)
        light = self.parent != index - 1
        light[:1] = True
        return np.maximum.accumulate(np.where(light, index, 0))

    @cached_property
    def segment_rollouts(self) -> np.ndarray:
        """int64 [S]: rollouts that pass through each segment."""
        ends = np.concatenate([[0], np.cumsum(np.bincount(self.end_segment, minlength=self.segments))])
        return ends[np.searchsorted(self.segment_start, self.subtree_end)] - ends[:-1]

    @property
    def flat_tokens(self) -> int:
        return int(self.rollout_length.sum())

    @property
    def flat_pairs(self) -> int:
        """Visible (query, key) pairs when every rollout is computed alone."""
        return int((self.rollout_length * (self.rollout_length + 1) // 2).sum())

    @property
    def tree_pairs(self) -> int:
        """Visible (query, key) pairs of the forest."""
        return int((self.position + 1).sum())

    @property
    def max_depth(self) -> int:
        """Tokens on the longest path."""
        return int(self.rollout_length.max(initial=0))

    def path_segments(self) -> tuple[np.ndarray, np.ndarray]:
        """All (rollout, segment) pairs with the segment on the rollout's path, sorted by rollout, then depth."""
        rollout, current = np.arange(self.rollouts), self.end_segment
        above = []  # all paths at once, one segment up each time
        count = np.zeros(self.rollouts, np.int64)
        while len(current):
            above.append((rollout, current))
            count[rollout] += 1
            current = self.parent[current]
            alive = current >= 0
            rollout, current = rollout[alive], current[alive]
        last = np.cumsum(count) - 1
        segments = np.empty(int(count.sum()), np.int64)
        for step, (rollout, current) in enumerate(above):
            segments[last[rollout] - step] = current
        return np.repeat(np.arange(self.rollouts), count), segments

    def flat_to_tree(self) -> np.ndarray:
        """int64 [N]: tree token of every (rollout, position), rollouts one after the other."""
        _, segment = self.path_segments()
        return expand_ranges(self.segment_start[segment], self.segment_length[segment])


def expand_ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenation of ``arange(start[i], start[i] + length[i])``; int64 [sum(length)]."""
    length = np.asarray(length, np.int64)
    offset = np.cumsum(length) - length
    return np.arange(int(length.sum())) + np.repeat(np.asarray(start, np.int64) - offset, length)


def build_forest(
    token: np.ndarray,
    row_start: np.ndarray,
    group: np.ndarray | None = None,
    share_key: np.ndarray | None = None,
) -> Forest:
    """Build the forest of R rows by sorting them and comparing neighbours (near-linear in N).

    Args:
        token: int [N] ids of all rows, one after the other; ids are in [0, 2**32).
        row_start: int [R + 1] offsets of the rows in ``token``; no row is empty.
        group: int [R]; rows share a path only inside a group (``share: group``). None: one trie over all rows.
        share_key: int [N]; equal ids share only where this key is equal too. None: ids alone decide.

    Raises:
        ValueError: for an empty row.
    """
    token = np.asarray(token, np.int64)
    row_start = np.asarray(row_start, np.int64)
    symbol, order, lcp = _sorted_symbols(token, row_start, group, share_key)
    owner, adds = _attach(order, lcp, row_start)
    return _assemble(token, symbol, row_start, order, lcp, owner, adds)


def sorted_rows(
    token: np.ndarray,
    row_start: np.ndarray,
    group: np.ndarray | None = None,
    share_key: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows in a depth-first order of their trie; arguments and errors as in `build_forest`.

    Returns:
        Row at each sorted place, int64 [R], and the tokens it shares with the row before it, int64 [R]. Two rows
        share the smallest of these numbers between their places.
    """
    row_start = np.asarray(row_start, np.int64)
    _, order, lcp = _sorted_symbols(np.asarray(token, np.int64), row_start, group, share_key)
    return order, lcp


def _sorted_symbols(token, row_start, group, share_key) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What decides sharing at each token [N], and `_sorted_rows` of it."""
    rows = len(row_start) - 1
    if (np.diff(row_start) <= 0).any():
        raise ValueError(f"rollout {int(np.argmax(np.diff(row_start) <= 0))} has no tokens")
    symbol = token if share_key is None else _joint_symbols(token, np.asarray(share_key))
    group = np.zeros(rows, np.int64) if group is None else np.asarray(group, np.int64)
    return symbol, *_sorted_rows(symbol, row_start, group)


def _joint_symbols(token: np.ndarray, share_key: np.ndarray) -> np.ndarray:
    """One id for each distinct (token, share key), in the order of the pairs."""
    _, key = np.unique(share_key, return_inverse=True)
    _, symbol = np.unique(token * (int(key.max(initial=0)) + 1) + key, return_inverse=True)
    return symbol.astype(np.int64)


def _sorted_rows(symbol: np.ndarray, row_start: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows sorted by (group, symbols, row number), and the length of the prefix each shares with the one before."""
    rows = len(group)
    # Big-endian bytes compare like the ids they hold, so one bytes comparison orders two rows.
    data = symbol.astype(">u4").tobytes()
    start = (4 * row_start).tolist()
    head = group.astype(">u8").tobytes()
    keys = [head[8 * i : 8 * i + 8] + data[start[i] : start[i + 1]] for i in range(rows)]
    order = sorted(range(rows), key=keys.__getitem__)
    lcp = np.zeros(rows, np.int64)
    bounds = row_start.tolist()
    for i in range(1, rows):
        before, row = order[i - 1], order[i]
        if group[before] != group[row]:
            continue
        length = min(bounds[before + 1] - bounds[before], bounds[row + 1] - bounds[row])
        a, b = bounds[before], bounds[row]
        differs = symbol[a : a + length] != symbol[b : b + length]
        first = int(differs.argmax())
        lcp[i] = first if differs[first] else length
    return np.asarray(order, np.int64), lcp


def _attach(order: np.ndarray, lcp: np.ndarray, row_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sorted row the sorted row that owns its new tokens' parent, and whether it has new tokens.

    Sorted row i adds the tokens at depths [lcp[i], length). Those at depth lcp[i] - 1 and above belong to the nearest
    earlier row whose own lcp is smaller: a classic previous-smaller-value stack.
    """
    length = np.diff(row_start)[order]
    owner = np.full(len(order), -1, np.int64)
    stack: list[int] = []
    shared = lcp.tolist()
    adds = (lcp < length).tolist()
    for i, common in enumerate(shared):
        if not adds[i]:
            continue
        while stack and shared[stack[-1]] >= common:
            stack.pop()
        if common > 0:
            owner[i] = stack[-1]
        stack.append(i)
    return owner, np.asarray(adds, bool)


def _assemble(token, symbol, row_start, order, lcp, owner, adds) -> Forest:
    """Cut the sorted rows into segments and renumber them heaviest child first."""
    row = np.flatnonzero(adds)
    length = np.diff(row_start)[order]
    span = int(length.max(initial=0)) + 1  # (row, depth) pairs as one sortable number
    branch = row[owner[row] >= 0]
    ends = np.unique(np.concatenate([row * span + length[row], owner[branch] * span + lcp[branch]]))
    seg_row, seg_end = ends // span, ends % span
    first = np.ones(len(ends), bool)
    first[1:] = seg_row[1:] != seg_row[:-1]
    seg_begin = np.where(first, lcp[seg_row], np.roll(seg_end, 1))
    parent = np.arange(len(ends)) - 1
    heads = np.flatnonzero(first)
    head_row = seg_row[heads]
    parent[heads] = np.where(owner[head_row] >= 0, np.searchsorted(ends, owner[head_row] * span + lcp[head_row]), -1)
    source = row_start[order[seg_row]] + seg_begin
    rank, count = _heaviest_first(parent, seg_end - seg_begin, symbol[source])

    # rank: new index of each old segment; old: old index of each new one.
    old = np.argsort(rank)
    new_parent = np.where(parent[old] >= 0, rank[parent[old]], -1)
    seg_length = (seg_end - seg_begin)[old]
    segment_start = np.concatenate([[0], np.cumsum(seg_length)])
    last = np.searchsorted(ends, np.arange(len(order)) * span + length)
    # A row without new tokens repeats the row before it, hence ends where that one ends.
    carrier = np.maximum.accumulate(np.where(adds, np.arange(len(order)), 0))
    end_segment = np.empty(len(order), np.int64)
    end_segment[order] = rank[last[carrier]]
    return Forest(
        token=token[expand_ranges(source[old], seg_length)],
        segment_start=segment_start,
        parent=new_parent,
        depth=seg_begin[old],
        subtree_end=segment_start[np.arange(len(old)) + count[old]],
        end_segment=end_segment,
    )


def _heaviest_first(parent: np.ndarray, length: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """New preorder index of each segment, and the segments in its subtree.

    Siblings go by tokens below them, most first, ties by first token id; roots keep their order.
    """
    segments = len(parent)
    up = parent.tolist()
    weight, count = length.tolist(), [1] * segments
    for s in range(segments - 1, -1, -1):
        if up[s] >= 0:
            weight[up[s]] += weight[s]
            count[up[s]] += count[s]
    weight_array = np.where(parent < 0, 0, np.asarray(weight, np.int64))
    first = np.where(parent < 0, np.arange(segments), first)
    siblings = np.lexsort((first, -weight_array, parent))
    counts = np.asarray(count, np.int64)
    # Segments of the earlier siblings: a running sum inside each family.
    total = np.cumsum(counts[siblings]) - counts[siblings]
    family = parent[siblings]
    opens = np.ones(segments, bool)
    opens[1:] = family[1:] != family[:-1]
    base = total[opens][np.cumsum(opens) - 1] if segments else total
    before = np.empty(segments, np.int64)
    before[siblings] = total - base
    rank = before.tolist()
    for s in range(segments):
        if up[s] >= 0:
            rank[s] += rank[up[s]] + 1
    return np.asarray(rank, np.int64), counts
