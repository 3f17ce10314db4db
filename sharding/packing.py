"""Packs: forests that go through the model at once, under a budget of tree tokens.

The unit of cutting is the rollout: a pack holds whole rollouts, so every (rollout, position) is in exactly one pack and
a shared ancestor is replayed in each pack that needs it.

Shapes: N flat tokens, R rollouts of the batch; r rollouts and n flat tokens of one pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_engine.sharding.best_fit import pack_places
from cp_engine.sharding.forest import Forest, build_forest, expand_ranges, sorted_rows
from cp_engine.sharding.replay import RunPrices, share_or_replay, split_key
from cp_engine.sharding.rounds import pack_rounds
from cp_engine.sharding.row_trie import RowTrie, fresh_tokens

SHARES = ("batch", "group")


@dataclass(frozen=True, eq=False)
class Pack:
    """One forest of some of the batch's rollouts. Rollout i of the forest is rollout ``rollouts[i]`` of the batch.

    The tokens that are neither replayed nor unshared sum over all packs to those of one forest over the batch.
    """

    rollouts: np.ndarray  # int64 [r] ascending
    forest: Forest
    loss_mask: np.ndarray  # bool [n] trained tokens, one rollout after the other
    replayed_tokens: int  # tree tokens that an earlier pack computes as well
    unshared_tokens: int = 0  # copies of tree tokens that are cheaper to compute again than to share

    @property
    def tokens(self) -> int:
        return self.forest.tokens


def empty_pack() -> Pack:
    """A pack without rollouts: it joins every collective and adds exactly zero."""
    nothing = np.empty(0, np.int64)
    return Pack(nothing, build_forest(nothing, np.zeros(1, np.int64)), np.empty(0, bool), 0)


def share_groups(share: str, group: np.ndarray) -> np.ndarray | None:
    """The groups inside which rollouts share tokens, as `build_forest` takes them.

    Raises:
        ValueError: for an unknown ``share``.
    """
    if share not in SHARES:
        raise ValueError(f"share must be one of {', '.join(SHARES)}, got {share!r}")
    return group if share == "group" else None


@dataclass(frozen=True, eq=False)
class _Batch:
    """What decides which tokens of a batch are one."""

    token: np.ndarray  # int64 [N]
    row_start: np.ndarray  # int64 [R + 1]
    group: np.ndarray | None  # int64 [R]
    share_key: np.ndarray | None  # int64 [N]
    split: np.ndarray | None = None  # int64 [N] `split_key`, which alone decides where it is given

    def sorted_trie(self) -> tuple[np.ndarray, RowTrie]:
        """The rollout at each sorted place, int64 [R], and their trie."""
        if self.split is None:
            order, common = sorted_rows(self.token, self.row_start, self.group, self.share_key)
        else:
            order, common = sorted_rows(self.split, self.row_start)
        return order, RowTrie(np.diff(self.row_start)[order], common)

    def forest(self) -> Forest:
        if self.split is None:
            return build_forest(self.token, self.row_start, self.group, self.share_key)
        forest = build_forest(self.split, self.row_start)
        token = np.empty(forest.tokens, np.int64)
        token[forest.flat_to_tree()] = self.token
        return replace(forest, token=token)

    def select(self, rollouts: np.ndarray) -> tuple[_Batch, np.ndarray]:
        """The batch of some rollouts, and the flat tokens it takes, int64 [n]."""
        length = np.diff(self.row_start)[rollouts]
        flat = expand_ranges(self.row_start[rollouts], length)
        part = _Batch(
            self.token[flat],
            np.concatenate([[0], np.cumsum(length)]),
            None if self.group is None else self.group[rollouts],
            None if self.share_key is None else self.share_key[flat],
            None if self.split is None else self.split[flat],
        )
        return part, flat


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
    run_prices: RunPrices | None = None,
    dp: int = 1,
    dp_prices: RunPrices | None = None,
) -> list[Pack]:
    """Cut a batch into packs of at most ``max_pack_tokens`` tree tokens, few of them and with little replayed; of
    several data-parallel groups every one gets packs in as few rounds, as even as can be.

    Deterministic, near-linear in N. The order in which the rollouts are given decides nothing but which of several
    equal rollouts goes where. Groups are ordered by their tokens, not by their numbers.

    Args:
        token: int [N] ids of all rollouts, one after the other.
        row_start: int [R + 1] offsets of the rollouts.
        group: int [R].
        loss_mask: bool [N].
        share: ``batch``, or ``group`` to share tokens only inside a group.
        share_key: int [N]; equal ids share only where it is equal too.
        max_pack_tokens: the budget; None makes one pack for each group.
        coupled: int [R]; rollouts of equal number stay in one pack (a loss couples them). None: every one is free.
        run_prices: shared runs that are dearer than copies at these prices are given up (`share_or_replay`), except in
            coupled rollouts that fit the budget only with them. None: everything is shared.
        dp: data-parallel groups; for several, ``dp_prices`` are what packs are compared by (`pack_rounds`).

    Raises:
        ValueError: for a rollout, or a coupled set of them, that is over the budget alone.
    """
    if max_pack_tokens is not None and max_pack_tokens < 1:
        raise ValueError(f"max_pack_tokens must be at least 1, got {max_pack_tokens}")
    token, row_start = np.asarray(token, np.int64), np.asarray(row_start, np.int64)
    groups = share_groups(share, np.asarray(group, np.int64))
    batch = _Batch(token, row_start, groups, None if share_key is None else np.asarray(share_key))
    if groups is not None:
        batch = replace(batch, group=_canonical_groups(batch))
    order, trie = batch.sorted_trie()
    budget = trie.added[-1] if max_pack_tokens is None else max_pack_tokens
    units = _units(order, coupled)
    _check_budget(trie, units, budget, order)
    split = batch
    if run_prices is not None:
        split = _split(batch, run_prices, [order[unit] for unit in units if len(unit) > 1], max_pack_tokens)
    split_order, split_trie = (order, trie) if split is batch else split.sorted_trie()
    places = _places(split_trie, _units(split_order, coupled), max_pack_tokens, dp, dp_prices)
    members = [np.sort(split_order[np.asarray(p, np.int64)]) for p in places]
    pack_of = np.empty(len(order), np.int64)
    for index, member in enumerate(members):
        pack_of[member] = index
    new = fresh_tokens(trie, pack_of[order], len(members))
    fresh = new if split is batch else fresh_tokens(split_trie, pack_of[split_order], len(members))
    mask = np.asarray(loss_mask, bool)
    return [_pack(split, mask, *each) for each in zip(members, fresh.tolist(), new.tolist(), strict=True)]


def _places(
    trie: RowTrie, units: list[list[int]], budget: int | None, dp: int, prices: RunPrices | None
) -> list[list[int]]:
    """Sorted places of the rollouts of each pack; one pack at least."""
    if budget is None and dp == 1:
        return [list(range(trie.rows))]
    if budget is None:
        budget = max(1, trie.added[-1])
    if dp == 1:
        return pack_places(trie, units, budget) or [[]]
    assert prices is not None, "packs for several groups are compared by prices"
    return pack_rounds(trie, units, budget, dp, prices) or [[]]


def _pack(batch: _Batch, loss_mask: np.ndarray, rollouts: np.ndarray, fresh: int, new: int) -> Pack:
    """The pack of some rollouts.

    Args:
        fresh: its tree tokens that no earlier pack holds.
        new: the same, were every run shared.
    """
    part, flat = batch.select(rollouts)
    forest = part.forest()
    return Pack(rollouts, forest, loss_mask[flat], forest.tokens - fresh, fresh - new)


def _canonical_groups(batch: _Batch) -> np.ndarray:
    """Groups numbered in the order of their sorted rollouts: int64 [R]."""
    order, _ = sorted_rows(batch.token, batch.row_start, batch.group, batch.share_key)
    columns = [batch.token] if batch.share_key is None else [batch.token, batch.share_key]
    # Big-endian bytes compare like the ids they hold.
    content = np.stack(columns, 1).astype(">i8")
    rows: dict[int, list[bytes]] = {}
    for row, group in zip(order.tolist(), batch.group[order].tolist(), strict=True):
        rows.setdefault(group, []).append(content[batch.row_start[row] : batch.row_start[row + 1]].tobytes())
    rank = {group: place for place, group in enumerate(sorted(rows, key=rows.__getitem__))}
    return np.array([rank[group] for group in batch.group.tolist()], np.int64)


def _units(order: np.ndarray, coupled: np.ndarray | None) -> list[list[int]]:
    """Sorted places of the rollouts that stay together, units in the order of their first place."""
    if coupled is None:
        return [[place] for place in range(len(order))]
    units: dict[int, list[int]] = {}
    for place, number in enumerate(np.asarray(coupled)[order].tolist()):
        units.setdefault(number, []).append(place)
    return list(units.values())


def _check_budget(trie: RowTrie, units: list[list[int]], budget: int, order: np.ndarray) -> None:
    for unit in units:
        tokens = trie.tokens(unit)
        if tokens > budget:
            names = sorted(int(order[place]) for place in unit)
            single = len(names) == 1
            what = f"rollout {names[0]} has" if single else f"coupled rollouts {', '.join(map(str, names))} have"
            raise ValueError(
                f"{what} {tokens} tree tokens, more than max_pack_tokens = {budget}: raise the budget or leave them out"
            )


def _split(batch: _Batch, prices: RunPrices, coupled: list[np.ndarray], budget: int | None) -> _Batch:
    """The batch with its dear shared runs split.

    Args:
        coupled: int64 [members] rollouts of each set that stays together.
    """
    forest = batch.forest()
    replayed = share_or_replay(forest, prices).replayed
    if not replayed.any():
        return batch
    key = split_key(forest, replayed)
    split = replace(batch, split=key)
    if budget is not None:
        shared = split_key(forest, np.zeros_like(replayed))
        for rollouts in coupled:
            part, flat = split.select(rollouts)
            if part.sorted_trie()[1].added[-1] > budget:
                key[flat] = shared[flat]
    return split


def deal_packs(packs: Sequence[Pack], dp: int) -> list[list[Pack]]:
    """Deal packs to data-parallel ranks, equally many each; empty packs make up for missing ones.

    Packs are sorted by predicted work (tokens and visible pairs count alike) and dealt in rounds of ``dp`` neighbours,
    because ranks that shard parameters wait for each other in every pack: no other dealing has a smaller sum over
    rounds of the longest pack. Within a round the largest pack goes to the rank with the least work so far.

    Raises:
        ValueError: for ``dp`` below 1.
    """
    if dp < 1:
        raise ValueError(f"dp must be at least 1, got {dp}")
    tokens, pairs = [pack.tokens for pack in packs], [pack.forest.tree_pairs for pack in packs]
    all_tokens, all_pairs = max(1, sum(tokens)), max(1, sum(pairs))
    work = [t * all_pairs + p * all_tokens for t, p in zip(tokens, pairs, strict=True)]
    order = sorted(range(len(packs)), key=lambda index: (-work[index], index))
    dealt: list[list[Pack]] = [[] for _ in range(dp)]
    load = [0] * dp
    for first in range(0, len(order), dp):
        ranks = sorted(range(dp), key=lambda rank: (load[rank], rank))
        for place, rank in enumerate(ranks):
            if first + place < len(order):
                index = order[first + place]
                dealt[rank].append(packs[index])
                load[rank] += work[index]
            else:
                dealt[rank].append(empty_pack())
    return dealt
