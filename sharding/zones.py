"""Zoned layouts: a trunk that everything sees is dealt to all ranks, apart from what hangs below it.

One rank that owned the trunk would send it to all others; dealt out, every rank sends a part.
"""

from __future__ import annotations

import numpy as np

from cp_engine.sharding.chord import Pieces, halve, join, layout_of, quotas
from cp_engine.sharding.layer_time import SplitPrices
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.measure import Survey

# Rows of the trunk on each rank under which a zone is not worth trying. At 512 ranks a trunk of 32,768 tokens still is:
# dealt out, its predicted step is an eighth of what one owner's egress makes it.
LEAST_TRUNK_ROWS = 64


def trunk_ends(survey: Survey, world: int, most: int = 2) -> list[int]:
    """Ends of trunks worth a zone, ascending.

    These are the tokens at which the first tree's heavy path loses most of the tokens below it, where all that hangs
    there is at least half of the forest and each rank gets at least `LEAST_TRUNK_ROWS` of the trunk.
    """
    forest = survey.forest
    light = np.flatnonzero(forest.chain_head != 0)
    stop = int(light[0]) if len(light) else forest.segments
    # Tokens below the end of each segment of the path, and how many of them the next segment leaves behind.
    below = forest.subtree_end[:stop] - forest.segment_start[1 : stop + 1]
    aside = below[:-1] - (forest.subtree_end[1:stop] - forest.segment_start[1:stop])
    end = forest.segment_start[1:stop]
    found = np.argsort(-aside, kind="stable")[:most]
    worth = (aside[found] > 0) & (2 * below[found] >= forest.tokens) & (end[found] >= LEAST_TRUNK_ROWS * world)
    return sorted(end[found][worth].tolist())


def zoned_layout(survey: Survey, x: int, world: int, prices: SplitPrices, limit_percent: int) -> Layout:
    """Equal shares of [0, x) by the chord and of [x, T) tolerantly; rank by rank one part of each."""
    tokens = survey.forest.tokens
    share = quotas(tokens, world)
    upper = quotas(x, world)
    pairs = int(survey.pairs_above[-1]) - int(survey.pairs_before(np.array([x]))[0])
    cap = pairs * (1000 + 9 * limit_percent) // (1000 * world)
    zones = []
    for start, end, quota, most in ((0, x, upper, None), (x, tokens, share - upper, cap)):
        parts = halve(survey, Pieces(np.array([start]), np.array([end])), quota, prices, most)
        zones.append(parts)
    return layout_of([join(list(pair)) for pair in zip(*_in_order(zones, upper, share - upper), strict=True)], tokens)


def _in_order(zones, upper, lower):
    """Parts in the order of their first token where their sizes allow it, so that neighbours stay together."""
    ordered = []
    for parts, quota in zip(zones, (upper, lower), strict=True):
        first = np.array([int(p.start[0]) if len(p.start) else 0 for p in parts])
        if quota.min() == quota.max():
            parts = [parts[i] for i in np.argsort(first, kind="stable")]
        ordered.append(parts)
    return ordered
