"""The trie of sorted rollouts, told by how much each shares with the one before: sizes of sets of rollouts.

Sorted rollouts stand in a depth-first order of their trie, hence two of them share the smallest common prefix between
their places, and every subtree is a range of places.

Shapes: R rollouts, at sorted places 0 to R - 1.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

import numpy as np


class RowTrie:
    """Lengths of the sorted rollouts, and the prefix that any two of them share."""

    def __init__(self, length: np.ndarray, common: np.ndarray):
        """
        Args:
            length: int64 [R] tokens of the rollout at each place.
            common: int64 [R] tokens that it shares with the one before; 0 at the first place.
        """
        self.length, self.common = length.tolist(), common.tolist()
        self.added = np.concatenate([[0], np.cumsum(length - common)]).tolist()
        self.levels = [self.common]  # levels[h][i]: the smallest of common[i : i + 2**h]
        width = 1
        while 2 * width <= len(length):
            common = np.minimum(common[:-width], common[width:])
            self.levels.append(common.tolist())
            width *= 2

    @property
    def rows(self) -> int:
        return len(self.length)

    def shared(self, low: int, high: int) -> int:
        """Tokens that the rollouts at two places, low < high, begin with alike."""
        height = (high - low).bit_length() - 1
        level = self.levels[height]
        return min(level[low + 1], level[high + 1 - (1 << height)])

    def range_tokens(self, low: int, high: int) -> int:
        """Tree tokens of the rollouts at places low to high - 1."""
        return self.added[high] - self.added[low] + self.common[low]

    def tokens(self, places: Iterable[int]) -> int:
        """Tree tokens of the rollouts at ascending places."""
        total, before = 0, -1
        for place in places:
            total += self.length[place] - (self.shared(before, place) if before >= 0 else 0)
            before = place
        return total

    def subset(self, places: np.ndarray) -> RowTrie:
        """The trie of the rollouts at ascending places."""
        length, common = np.asarray(self.length, np.int64), np.asarray(self.common, np.int64)
        if len(places) == 0:
            return RowTrie(length[:0], common[:0])
        # The smallest common prefix from the place after the one before to this one.
        smallest = np.minimum.reduceat(common[: places[-1] + 1], np.append(0, places[:-1] + 1))
        return RowTrie(length[places], smallest)


class GrowingTrie:
    """The tree tokens of a growing set of places."""

    def __init__(self, trie: RowTrie, places: Iterable[int] = ()):
        self.trie, self.places = trie, sorted(places)
        self.tokens = trie.tokens(self.places)

    def add(self, unit: list[int]) -> int:
        """Add places; returns the tokens they add: their lengths minus what they share with the set."""
        before = self.tokens
        for place in unit:
            at = bisect(self.places, place)
            below = self.trie.shared(self.places[at - 1], place) if at else 0
            above = self.trie.shared(place, self.places[at]) if at < len(self.places) else 0
            self.tokens += self.trie.length[place] - max(below, above)
            self.places.insert(at, place)
        return self.tokens - before

    def undo(self, unit: list[int], added: int) -> None:
        """Take the places of the last `add` out again."""
        for place in unit:
            del self.places[bisect(self.places, place) - 1]
        self.tokens -= added


def fresh_tokens(trie: RowTrie, pack: np.ndarray, packs: int) -> np.ndarray:
    """int64 [packs]: tree tokens of each pack that no earlier pack holds.

    A token is fresh in the first pack among those of the rollouts that go through it. One pass over the branch points
    in which children come before parents.

    Args:
        pack: int [R] pack of each place.
    """
    fresh = [0] * packs
    numbers = pack.tolist()
    # Open branch points of the rightmost path: depth, and the first pack of the rollouts below.
    depths, firsts = [0], [packs]
    for place, first in enumerate(numbers):
        end = trie.length[place]
        below = trie.common[place + 1] if place + 1 < trie.rows else 0
        while True:
            # (end, first) is a finished path that hangs below the deeper of the open branch point and the next fork.
            top = max(depths[-1], below)
            fresh[first] += end - top
            if top > depths[-1]:
                depths.append(top)
                firsts.append(first)
                break
            firsts[-1] = min(firsts[-1], first)
            if depths[-1] <= below:
                break
            end, first = depths.pop(), firsts.pop()
    return np.asarray(fresh, np.int64)
