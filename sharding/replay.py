"""Share or replay: which runs of tokens are cheaper to compute once, and which once for each continuation.

A shared run of a few tokens costs a fragment of its own: a partial recurrent chunk, one more border of visible keys.
Where that is dearer than its tokens, the run is *replayed*: each continuation of its branch point gets a copy, and what
is above stays shared. The copies are kept apart by a split key, a share key of `build_forest`, so the losses and
gradients do not change.

Choose the shared branch points. Each of them, and each leaf, then carries one run, from the end of the nearest shared
branch point above it to its own end; `RunPrices.run` prices it. With f(u, a) the least cost of u and what is below it
when a is the nearest shared one above,

    f(u, a) = min( run(a, u) + sum over children c of f(c, u),  sum over children c of f(c, a) ),

which is exact. A branch point where a rollout ends stays shared: its run has to end there anyway, and runs that start
lower are never dearer.

Shapes: S segments, R rollouts, N flat tokens, W candidates for the nearest shared branch point above a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.cost import H200, Costs, ModelShape
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layer_time import recurrent_token_time, split_prices, token_time
from cp_engine.sharding.measure import CHUNK, TILE


@dataclass(frozen=True, kw_only=True)
class RunPrices:
    """Integer picoseconds of a step, all layers forward and backward."""

    token: int  # one token: projections, MLP, norms
    pair: int  # one visible (query, key) pair
    chunk: int  # one recurrent chunk; they restart at every run
    fragment: int  # one run more, whatever its length

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"run prices must be at least 0, got {name} = {value}")

    def run(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Cost of runs of the tokens at depths start to end - 1; int64, never less for an earlier start."""
        length = end - start
        pairs = length * (start + end + 1) // 2
        return self.token * length + self.pair * pairs + self.chunk * -(-length // CHUNK) + self.fragment


def run_prices(shape: ModelShape, costs: Costs = H200) -> RunPrices:
    """Prices of a model's runs on one GPU.

    The price of a fragment is predicted: its border cuts one more attention tile in each softmax-attention layer.
    """
    prices = split_prices(0, 1, shape, costs)
    million = np.int64(10**6)
    attention = sum(token_time(million, shape.attention_products, shape, costs))
    recurrent = sum(recurrent_token_time(million, shape, costs))
    query_tile = (costs.query_tile_forward + costs.query_tile_backward) * shape.query_heads
    tile = prices.tile * shape.attention_layers
    return RunPrices(
        token=int(attention * shape.attention_layers + recurrent * shape.gdn_layers) // 1000
        + query_tile * shape.attention_layers // TILE,
        pair=tile // TILE**2,
        chunk=prices.chunk * max(1, shape.attention_layers),
        fragment=tile,
    )


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which runs of a forest are replayed, and the predicted cost in picoseconds."""

    replayed: np.ndarray  # bool [S]
    cost: int
    all_shared: int  # the cost if nothing were replayed
    all_flat: int  # the cost of every rollout as a row of its own


def share_or_replay(forest: Forest, prices: RunPrices) -> Sharing:
    """The cheapest choice; ties share. ``cost`` is never above ``all_shared`` or ``all_flat``.

    Exact. Takes O(S · W), where W is at most the most branch points on a path and, because more than
    ``(fragment + chunk) / token`` nested runs are never all replayed, at most one more than this ratio.
    """
    end = forest.depth + forest.segment_length
    levels = _levels(forest.parent)
    replayable = np.zeros(forest.segments, bool)
    replayable[forest.parent[forest.parent >= 0]] = True
    replayable[forest.end_segment] = False
    widest = len(levels) if prices.token == 0 else 1 + -(-(prices.fragment + prices.chunk) // prices.token)
    starts, widths = _starts(forest, levels, replayable, widest)
    choice, cost = _choose(forest, levels, replayable, prices, starts, widths, widest)
    length = forest.rollout_length
    return Sharing(
        replayed=_follow(forest, levels, choice),
        cost=cost,
        all_shared=int(prices.run(forest.depth, end).sum()),
        all_flat=int(prices.run(np.zeros_like(length), length).sum()),
    )


def _levels(parent: np.ndarray) -> list[np.ndarray]:
    """Segments by the number of segments above them, ascending inside a level."""
    level: list[int] = []
    for up in parent.tolist():
        level.append(0 if up < 0 else level[up] + 1)
    order = np.argsort(level, kind="stable")
    return np.split(order, np.cumsum(np.bincount(level))[:-1]) if len(level) else []


def _starts(forest: Forest, levels: list[np.ndarray], replayable: np.ndarray, widest: int):
    """Per level, the depths at which each segment's run may start, nearest first, and how many of them are real.

    Returns lists of int64 [segments, W] and int64 [segments]. A run goes up through replayable segments only.
    """
    row = np.empty(forest.segments, np.int64)
    starts, widths = [], []
    for above, nodes in zip([None, *levels[:-1]], levels, strict=True):
        row[nodes] = np.arange(len(nodes))
        start, width = forest.depth[nodes][:, None], np.ones(len(nodes), np.int64)
        if above is not None:
            up = row[forest.parent[nodes]]
            width = np.where(replayable[forest.parent[nodes]], np.minimum(widths[-1][up] + 1, widest), 1)
            most = int(width.max())
            start = np.concatenate([start, starts[-1][up, : most - 1]], 1)
        starts.append(start)
        widths.append(width)
    return starts, widths


def _choose(forest, levels, replayable, prices: RunPrices, starts, widths, widest: int):
    """Per level whether to replay each segment for each start, bool [segments, W]; and the least cost of the forest."""
    end = forest.depth + forest.segment_length
    choice: list[np.ndarray] = [np.empty(0)] * len(levels)
    below = np.zeros((0, 1), np.int64)  # least cost of the level below
    for level in range(len(levels) - 1, -1, -1):
        nodes, start = levels[level], starts[level]
        share = prices.run(start, end[nodes][:, None])
        replay = np.zeros_like(share)
        allowed = np.zeros(share.shape, bool)
        if len(below):
            children = levels[level + 1]
            up = forest.parent[children]
            opens = np.flatnonzero(np.diff(up, prepend=-2))
            family = np.searchsorted(nodes, up[opens])
            total = np.add.reduceat(below, opens, axis=0)
            share[family] += total[:, :1]
            columns = min(share.shape[1], total.shape[1] - 1)
            replay[family, :columns] = total[:, 1 : columns + 1]
            real = np.minimum(widths[level], widest - 1)
            allowed = (np.arange(share.shape[1]) < real[:, None]) & replayable[nodes][:, None]
        choice[level] = allowed & (replay < share)
        below = np.where(choice[level], replay, share)
    return choice, int(below[:, 0].sum())


def _follow(forest: Forest, levels: list[np.ndarray], choice: list[np.ndarray]) -> np.ndarray:
    """bool [S]: the choice of each segment, given those above it."""
    replayed = np.zeros(forest.segments, bool)
    start = np.zeros(forest.segments, np.int64)  # which of its starts each segment's run has
    for nodes, replay in zip(levels, choice, strict=True):
        up = forest.parent[nodes]
        start[nodes] = np.where((up >= 0) & replayed[up], start[up] + 1, 0)
        replayed[nodes] = replay[np.arange(len(nodes)), start[nodes]]
    return replayed


def split_key(forest: Forest, replayed: np.ndarray) -> np.ndarray:
    """The share key that splits the replayed runs: int64 [N], rollouts one after the other.

    Each token's key is the segment at whose end its run ends: the first one from its own down the rollout's path that
    is not replayed. Tokens that did not share before have different keys, so the key may also stand for the token.
    """
    rollout, segment = forest.path_segments()
    # The last segment of a rollout is never replayed, so the nearest kept one below stays on the rollout's path.
    kept = np.where(replayed[segment], len(segment), np.arange(len(segment)))
    carrier = segment[np.minimum.accumulate(kept[::-1])[::-1]]
    return np.repeat(carrier, forest.segment_length[segment])
