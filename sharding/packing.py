"""Packs: forests that go through the model at once, under a budget of tree tokens.

The unit of cutting is the rollout: a pack holds whole rollouts, so every (rollout, position) is in exactly one pack and
a shared ancestor is replayed in each pack that needs it.

Shapes: N flat tokens, R rollouts of the batch; r rollouts and n flat tokens of one pack.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest, build_forest, expand_ranges, sorted_rows

SHARES = ("batch", "group")


@dataclass(frozen=True, eq=False)
class Pack:
    """One forest of some of the batch's rollouts. Rollout i of the forest is rollout ``rollouts[i]`` of the batch."""

    rollouts: np.ndarray  # int64 [r] ascending
    forest: Forest
    loss_mask: np.ndarray  # bool [n] trained tokens, one rollout after the other
    replayed_tokens: int  # tree tokens that an earlier pack computes as well

    @property
    def tokens(self) -> int:
        return self.forest.tokens


def share_groups(share: str, group: np.ndarray) -> np.ndarray | None:
    """The groups inside which rollouts share tokens, as `build_forest` takes them.

    Raises:
        ValueError: for an unknown ``share``.
    """
    if share not in SHARES:
        raise ValueError(f"share must be one of {', '.join(SHARES)}, got {share!r}")
    return group if share == "group" else None


def pack_rollouts(
    token: np.ndarray,
    row_start: np.ndarray,
    group: np.ndarray,
    loss_mask: np.ndarray,
    *,
    share: str = "batch",
    share_key: np.ndarray | None = None,
    max_pack_tokens: int | None = None,
    coupled: np.ndarray | None = None,
) -> list[Pack]:
    """Cut a batch into packs of at most ``max_pack_tokens`` tree tokens.

    Rollouts are taken in the sorted order of their tokens, which is a depth-first order of the trie, and fill a pack
    until the tokens that the next one adds to it (its length minus what it shares with the pack) pass the budget.
    Deterministic, near-linear in N.

    Args:
        token: int [N] ids of all rollouts, one after the other.
        row_start: int [R + 1] offsets of the rollouts.
        group: int [R].
        loss_mask: bool [N].
        share: ``batch``, or ``group`` to share tokens only inside a group.
        share_key: int [N]; equal ids share only where it is equal too.
        max_pack_tokens: the budget; None makes one pack.
        coupled: int [R]; rollouts of equal number stay in one pack (a loss couples them). None: every one is free.

    Raises:
        ValueError: for a rollout, or a coupled set of them, that is over the budget alone.
    """
    row_start = np.asarray(row_start, np.int64)
    groups = share_groups(share, np.asarray(group, np.int64))
    rows = len(row_start) - 1
    if max_pack_tokens is None:
        members, replayed = [np.arange(rows)], [0]
    elif max_pack_tokens < 1:
        raise ValueError(f"max_pack_tokens must be at least 1, got {max_pack_tokens}")
    else:
        order, common = sorted_rows(token, row_start, groups, share_key)
        rows_in_order = _SortedRows(np.diff(row_start)[order], common)
        places, replayed = _fill(rows_in_order, _units(order, coupled), max_pack_tokens, order)
        members = [np.sort(order[p]) for p in places]
    packs = []
    for member, again in zip(members, replayed, strict=True):
        length = np.diff(row_start)[member]
        flat = expand_ranges(row_start[member], length)
        forest = build_forest(
            np.asarray(token)[flat],
            np.concatenate([[0], np.cumsum(length)]),
            None if groups is None else groups[member],
            None if share_key is None else np.asarray(share_key)[flat],
        )
        packs.append(Pack(member, forest, np.asarray(loss_mask, bool)[flat], again))
    return packs


def _units(order: np.ndarray, coupled: np.ndarray | None) -> list[list[int]]:
    """Sorted places of the rollouts that stay together, units in the order of their first place."""
    if coupled is None:
        return [[place] for place in range(len(order))]
    units: dict[int, list[int]] = {}
    for place, number in enumerate(np.asarray(coupled)[order].tolist()):
        units.setdefault(number, []).append(place)
    return list(units.values())


class _SortedRows:
    """Lengths of the sorted rollouts, and the prefix that any two of them share."""

    def __init__(self, length: np.ndarray, common: np.ndarray):
        self.length = length.tolist()
        self.levels = [common.tolist()]  # levels[h][i]: the smallest of common[i : i + 2**h]
        width = 1
        while 2 * width <= len(self.length):
            common = np.minimum(common[:-width], common[width:])
            self.levels.append(common.tolist())
            width *= 2

    def shared(self, low: int, high: int) -> int:
        """Tokens that the rollouts at two sorted places, low < high, begin with alike."""
        height = (high - low).bit_length() - 1
        level = self.levels[height]
        return min(level[low + 1], level[high + 1 - (1 << height)])


class _GrowingTrie:
    """The tree tokens of a growing set of sorted places."""

    def __init__(self, rows: _SortedRows):
        self.rows, self.places, self.tokens = rows, [], 0

    def add(self, unit: list[int]) -> int:
        """Add places; returns the tokens they add: their lengths minus what they share with the set."""
        before = self.tokens
        for place in unit:
            at = bisect(self.places, place)
            below = self.rows.shared(self.places[at - 1], place) if at else 0
            above = self.rows.shared(place, self.places[at]) if at < len(self.places) else 0
            self.tokens += self.rows.length[place] - max(below, above)
            self.places.insert(at, place)
        return self.tokens - before

    def undo(self, unit: list[int], added: int) -> None:
        """Take the places of the last `add` out again."""
        for place in unit:
            del self.places[bisect(self.places, place) - 1]
        self.tokens -= added


def _fill(rows: _SortedRows, units: list[list[int]], budget: int, order: np.ndarray):
    """Sorted places of each pack, and the tokens of each that an earlier pack holds as well."""
    pack, everything = _GrowingTrie(rows), _GrowingTrie(rows)
    packs, fresh = [pack], [0]
    for unit in units:
        added = pack.add(unit)
        if pack.tokens > budget:
            pack.undo(unit, added)
            if pack.places:
                pack = _GrowingTrie(rows)
                packs.append(pack)
                fresh.append(0)
                pack.add(unit)
            if pack.tokens > budget or not pack.places:
                raise ValueError(_over_budget(rows, unit, budget, order))
        fresh[-1] += everything.add(unit)
    return [p.places for p in packs], [p.tokens - new for p, new in zip(packs, fresh, strict=True)]


def _over_budget(rows: _SortedRows, unit: list[int], budget: int, order: np.ndarray) -> str:
    names = sorted(int(order[place]) for place in unit)
    what = f"rollout {names[0]} has" if len(names) == 1 else f"coupled rollouts {', '.join(map(str, names))} have"
    tokens = _GrowingTrie(rows).add(unit)
    return f"{what} {tokens} tree tokens, more than max_pack_tokens = {budget}: raise the budget or leave them out"
