"""Packs for several data-parallel groups: fewest rounds first, then the least time of the slowest groups.

Packs are dealt in rounds of one for each group (`deal_packs`). Under a fixed budget the last round is often short of
packs, and a step of few packs leaves groups idle. A smaller budget makes as many rounds of smaller packs, which replay
a little more; the smallest one that needs no further round makes the most even packs.

Shapes: R rollouts at sorted places 0 to R - 1 (`row_trie`).
"""

from __future__ import annotations

import math

import numpy as np

from cp_engine.sharding.best_fit import Unit, pack_places
from cp_engine.sharding.replay import RunPrices
from cp_engine.sharding.row_trie import RowTrie

_STEPS = 6  # halvings of the range of budgets, by ratio
_EVEN = 1.03  # times the mean of all groups and rounds: the search ends there


def pack_rounds(trie: RowTrie, units: list[Unit], budget: int, groups: int, prices: RunPrices) -> list[list[int]]:
    """`pack_places` under the budget, of all that are not above it, with which the step takes least: packs for as few
    rounds as the budget allows, in the cheapest of them.

    Args:
        groups: data-parallel groups.
        prices: of a pack's runs.
    """
    found = pack_places(trie, units, budget)
    most = -(-len(found) // groups) * groups
    best, cost = found, slowest_groups(trie, found, groups, prices)
    # No budget below these makes so few packs.
    low = max(-(-trie.added[-1] // max(1, most)), max((trie.tokens(unit) for unit in units), default=0)) - 1
    high = max((trie.tokens(places) for places in found), default=0)
    for _ in range(_STEPS if groups > 1 else 0):
        if high - low < 2 or cost * groups <= _EVEN * sum(pack_costs(trie, best, prices)):
            break
        middle = max(low + 1, math.isqrt(low * high))
        packs = pack_places(trie, units, middle)
        if len(packs) > most:
            low = middle
            continue
        high = max(trie.tokens(places) for places in packs)
        now = slowest_groups(trie, packs, groups, prices)
        if now < cost:
            best, cost = packs, now
    return best


def slowest_groups(trie: RowTrie, packs: list[list[int]], groups: int, prices: RunPrices) -> int:
    """What a step of packs takes, in the prices' unit: of each round the dearest pack, dealt as `deal_packs` does."""
    return sum(sorted(pack_costs(trie, packs, prices), reverse=True)[::groups])


def pack_costs(trie: RowTrie, packs: list[list[int]], prices: RunPrices) -> list[int]:
    """Each pack's cost: that of what each rollout adds to those at the places before it."""
    return [_pack_cost(trie, places, prices) for places in packs]


def _pack_cost(trie: RowTrie, places: list[int], prices: RunPrices) -> int:
    if not places:
        return 0
    pairs = zip(places, places[1:], strict=False)
    start = np.array([0, *(trie.shared(before, place) for before, place in pairs)], np.int64)
    end = np.array([trie.length[place] for place in places], np.int64)
    return int(prices.run(start, end)[end > start].sum())
