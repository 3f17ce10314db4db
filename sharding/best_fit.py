"""Which rollouts go into which pack: best fit on the tokens that a rollout adds to a pack.

Three packings are made, and the best one is kept:

- by subtrees. What fits a pack together with the path above it stays whole; below a branch point that does not fit, the
  parts are packed by best fit, largest first, each counted without the path that they share. Parts that share most meet
  first, so little is replayed.
- by rollouts, longest first, each into the pack to which it adds least. Long rollouts that share little fill packs
  better than their subtrees do.
- by filling pack after pack in depth-first order.

In each, the emptiest pack is then dissolved into the gaps of the others while that succeeds.

Shapes: R rollouts at sorted places 0 to R - 1 (`row_trie`). A *unit* is a list of places that stay together.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from cp_engine.sharding.row_trie import GrowingTrie, RowTrie

Unit = list[int]
Part = tuple[int, int, list[tuple[int, int]]]  # minus its tree tokens, its first place, its ranges of places


def pack_places(trie: RowTrie, units: list[Unit], budget: int) -> list[list[int]]:
    """Ascending places of each pack, packs by first place: fewest packs, then fewest tokens, of the three packings.

    Near-linear in R and in the segments of the packs together.

    Args:
        units: all places, ascending inside a unit, units by first place; none has more than ``budget`` tree tokens.
    """
    starts = (_by_subtrees(trie, units, budget), _by_rollouts(trie, units, budget), _fill(trie, units, budget))
    found = [_dissolve(trie, units, packs, budget) for packs in starts]
    best = min(found, key=lambda packs: (len(packs), sum(pack.tokens for pack in packs)))
    return sorted(pack.places for pack in best)


def _fill(trie: RowTrie, units: list[Unit], budget: int) -> list[GrowingTrie]:
    """Units in depth-first order, each into the last pack while it fits."""
    packs: list[GrowingTrie] = []
    for unit in units:
        if packs:
            added = packs[-1].add(unit)
            if packs[-1].tokens <= budget:
                continue
            packs[-1].undo(unit, added)
        packs.append(GrowingTrie(trie, unit))
    return packs


def _by_rollouts(trie: RowTrie, units: list[Unit], budget: int) -> list[GrowingTrie]:
    """Units by best fit, longest first."""
    return _place_all(_Gaps(trie, [], budget), units)


def _place_all(gaps: _Gaps, units: list[Unit]) -> list[GrowingTrie]:
    for unit in sorted(units, key=lambda unit: (-gaps.trie.tokens(unit), unit[0])):
        if gaps.place(unit) is None:
            gaps.open(unit)
    return gaps.packs


def _by_subtrees(trie: RowTrie, units: list[Unit], budget: int) -> list[GrowingTrie]:
    """Whole subtrees by best fit; then the units that subtrees over the budget would tear apart."""
    crossing = _crossing(trie, units, budget)
    torn = {place for unit in crossing for place in unit}
    kept = np.asarray([place for place in range(trie.rows) if place not in torn], np.int64)
    bins = [
        GrowingTrie(trie, kept[np.concatenate([np.arange(low, high) for low, high in ranges])].tolist())
        for _, _, ranges in _fit_subtrees(trie.subset(kept) if crossing else trie, budget)
    ]
    return _place_all(_Gaps(trie, bins, budget), crossing)


def _crossing(trie: RowTrie, units: list[Unit], budget: int) -> list[Unit]:
    """Units with rollouts in several of the largest subtrees that fit a pack."""
    several = [unit for unit in units if len(unit) > 1]
    if not several:
        return []
    subtree = np.zeros(trie.rows, np.int64)
    for low, _ in _whole_subtrees(trie, budget):
        subtree[low] = 1
    subtree = np.cumsum(subtree).tolist()
    return [unit for unit in several if subtree[unit[0]] != subtree[unit[-1]]]


def _whole_subtrees(trie: RowTrie, budget: int) -> list[tuple[int, int]]:
    """Ranges of places of the largest subtrees that fit a pack, in order."""
    found: list[tuple[int, int]] = []

    def join(depth: int, parts: list[Part]) -> list[Part]:
        found.extend(span for _, _, ranges in parts for span in ranges)
        return []

    _fold(trie, budget, join)
    return sorted(found)


def _fit_subtrees(trie: RowTrie, budget: int) -> list[Part]:
    """Bins of the whole trie."""
    return _fold(trie, budget, lambda depth, parts: _fit_parts(depth, parts, budget))


def _fold(trie: RowTrie, budget: int, join) -> list[Part]:
    """Walk the branch points, children first: the parts that fit a pack whole, and `join` of those that do not.

    Args:
        join: (tokens of the path, parts below it) -> the parts handed to the branch point above.
    """
    if not trie.rows:
        return []
    open_depth, open_low, open_parts = [0], [0], [[]]
    for place in range(trie.rows):
        below = trie.common[place + 1] if place + 1 < trie.rows else 0
        low, parts = place, [(-trie.length[place], place, [(place, place + 1)])]
        while open_depth[-1] >= below:
            open_parts[-1] += parts
            if open_depth[-1] == below:
                break
            depth, low, parts = open_depth.pop(), open_low.pop(), open_parts.pop()
            tokens = trie.range_tokens(low, place + 1)
            parts = [(-tokens, low, [(low, place + 1)])] if tokens <= budget else join(depth, parts)
        else:
            open_depth.append(below)
            open_low.append(low)
            open_parts.append(parts)
    tokens = trie.range_tokens(0, trie.rows)
    return [(-tokens, 0, [(0, trie.rows)])] if tokens <= budget else join(0, open_parts[0])


def _fit_parts(depth: int, parts: list[Part], budget: int) -> list[Part]:
    """Best fit, largest first, of parts that share exactly the first ``depth`` tokens.

    Parts that share more come from one branch point below, where they did not fit together.
    """
    bins: list[Part] = []
    room: list[tuple[int, int]] = []  # ascending (tokens left, bin)
    for part in sorted(parts):
        adds = -part[0] - depth
        at = bisect_left(room, (adds, -1))
        if at == len(room):
            room_left, index = budget + part[0], len(bins)
            bins.append(part)
        else:
            room_left, index = room.pop(at)
            room_left -= adds
            minus, first, ranges = bins[index]
            ranges += part[2]
            bins[index] = (minus - adds, min(first, part[1]), ranges)
        insort(room, (room_left, index))
    return bins


class _Gaps:
    """Packs with room, to which units are added one at a time."""

    def __init__(self, trie: RowTrie, packs: list[GrowingTrie], budget: int):
        self.trie, self.packs, self.budget = trie, packs, budget
        self.pack_of = [-1] * trie.rows
        for index, pack in enumerate(packs):
            for place in pack.places:
                self.pack_of[place] = index
        self.placed = [place for place in range(trie.rows) if self.pack_of[place] >= 0]
        self.room = sorted((budget - pack.tokens, index) for index, pack in enumerate(packs))
        self.common = min(trie.common[1:], default=0)  # what all rollouts share

    def open(self, unit: Unit) -> None:
        """A new pack of one unit."""
        self.packs.append(GrowingTrie(self.trie))
        insort(self.room, (self.budget, len(self.packs) - 1))
        self._add(unit, len(self.packs) - 1)

    def place(self, unit: Unit) -> int | None:
        """Add a unit where it adds least, ties where least room is left; returns the pack, or None if none has room.

        The packs looked at are those of the unit's neighbours, which share most with it, the fullest one that has room
        for it without them, and the emptiest.
        """
        found = None
        for index in self._candidates(unit):
            pack = self.packs[index]
            added = pack.add(unit)
            key = (added, self.budget - pack.tokens, index)
            pack.undo(unit, added)
            if key[1] >= 0 and (found is None or key < found):
                found = key
        if found is None:
            return None
        self._add(unit, found[2])
        return found[2]

    def take_emptiest(self) -> tuple[int, list[int]]:
        """Empty the emptiest pack for good; returns its index and its places."""
        _, index = self.room.pop()
        places = self.packs[index].places
        self.packs[index] = GrowingTrie(self.trie)
        for place in places:
            self.pack_of[place] = -1
            del self.placed[bisect_left(self.placed, place)]
        return index, places

    def _candidates(self, unit: Unit) -> list[int]:
        if not self.room:
            return []
        tightest = bisect_left(self.room, (self.trie.tokens(unit) - self.common, -1))
        near = {self.room[-1][1], self.room[min(tightest, len(self.room) - 1)][1]}
        for place in unit:
            at = bisect_left(self.placed, place)
            near.update(self.pack_of[p] for p in self.placed[max(0, at - 1) : at + 1])
        return sorted(near)

    def _add(self, unit: Unit, index: int) -> None:
        pack = self.packs[index]
        del self.room[bisect_left(self.room, (self.budget - pack.tokens, index))]
        pack.add(unit)
        insort(self.room, (self.budget - pack.tokens, index))
        for place in unit:
            self.pack_of[place] = index
            insort(self.placed, place)


def _dissolve(trie: RowTrie, units: list[Unit], packs: list[GrowingTrie], budget: int) -> list[GrowingTrie]:
    """Spread the units of the emptiest pack over the others, again and again while all of them find room."""
    least = max(1, -(-trie.added[-1] // budget))
    unit_at = {unit[0]: unit for unit in units}
    gaps, alive = _Gaps(trie, list(packs), budget), len(packs)
    while alive > least:
        victim, places = gaps.take_emptiest()
        before: dict[int, list[int]] = {victim: places}  # to go back to
        for unit in (unit_at[place] for place in places if place in unit_at):
            index = gaps.place(unit)
            if index is None:
                break
            before.setdefault(index, [])
            before[index] += unit
        else:
            alive -= 1
            continue
        for index, moved in before.items():
            kept = places if index == victim else sorted(set(gaps.packs[index].places) - set(moved))
            gaps.packs[index] = GrowingTrie(trie, kept)
        break
    return [pack for pack in gaps.packs if pack.places]
