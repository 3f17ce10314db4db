"""Layouts that attention is measured under on several GPUs, and what the cost model predicts for them.

Shapes: T tokens, P ranks.
"""

from __future__ import annotations

import numpy as np

from benchmarks.attention_workloads import Workload
from cp_engine.machines import MACHINES
from cp_engine.prediction import Placement, Predictor
from cp_engine.sharding.cost import ModelShape
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.measure import CHUNK, Survey, measure
from cp_engine.sharding.search import balanced_layout

LAYOUTS = ("planner", "spread", "contiguous")
SPREAD_TOKENS = 1024  # a segment from this size on is a trunk that `spread` cuts over all ranks


def attention_alone(workload: Workload) -> ModelShape:
    """A layer of a workload's heads without projections, MLP and norms: its time is that of its attention."""
    return ModelShape(
        hidden=0,
        mlp_width=0,
        attention_layers=1,
        query_heads=workload.query_heads,
        kv_heads=workload.kv_heads,
        head_dim=workload.size,
    )


def place(layout: str, forest: Forest, world: int, workload: Workload) -> Placement:
    """A forest, its trees perhaps in another order, and who owns it.

    Raises:
        ValueError: for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if layout == "planner":
        placed = balanced_layout(forest, world, model=attention_alone(workload))
        return Placement(placed.forest, Survey(placed.forest), placed.layout, placed.method, placed.figures)
    chosen = spread_layout(forest, world) if layout == "spread" else contiguous_layout(forest, world)
    survey = Survey(forest)
    return Placement(forest, survey, chosen, layout, measure(survey, chosen, recurrent=False))


def spread_layout(forest: Forest, world: int, trunk: int = SPREAD_TOKENS) -> Layout:
    """Every trunk cut over all ranks, and so are the short segments between them.

    A trunk is a segment of at least ``trunk`` tokens. Of it, and of each run of shorter segments of tree t, rank r
    owns part (r - t) mod P from the front and that part from the back of 2P equal parts: about equal tokens and pairs,
    where parts have several chunks. The ranks of the first parts differ from tree to tree, so that no rank waits with
    all its trees for another. Cuts lie where chunks of GDN layers end, which are the same on one GPU then; what that
    moves is made up for later.
    """
    is_trunk = forest.segment_length >= trunk
    opens = np.ones(forest.segments, bool)
    opens[1:] = is_trunk[1:] | is_trunk[:-1] | (forest.parent[1:] < 0)
    first = np.flatnonzero(opens)
    bounds = np.append(forest.segment_start[first], forest.tokens).tolist()
    trees = (np.cumsum(forest.parent < 0)[first] - 1).tolist()
    to_and_fro = [*range(world), *reversed(range(world))]
    cuts, ranks, surplus = [0], [], [0] * world  # tokens that a rank owns beyond its share so far
    for begin, end, tree in zip(bounds[:-1], bounds[1:], trees, strict=True):
        ideal = [begin + (end - begin) * part // len(to_and_fro) for part in range(len(to_and_fro) + 1)]
        for part, turn in enumerate(to_and_fro):
            rank, share = (turn + tree) % world, ideal[part + 1] - ideal[part]
            wanted = min(max(cuts[-1], cuts[-1] + share - surplus[rank]), end)
            cut = end if part == len(to_and_fro) - 1 else nearest_cut(forest, wanted, trunk)
            surplus[rank] += cut - cuts[-1] - share
            cuts.append(cut)
            ranks.append(rank)
    return layout_from_cuts(np.array(cuts), np.array(ranks), world)


def nearest_cut(forest: Forest, token: int, trunk: int) -> int:
    """Where a cut near a token is: in a trunk at the end of a chunk, between other segments."""
    if token == forest.tokens:
        return token
    segment = int(np.searchsorted(forest.segment_start, token, "right")) - 1
    start, end = forest.segment_start[segment : segment + 2].tolist()
    step = CHUNK if end - start >= trunk else end - start
    return min(start + (token - start + step // 2) // step * step, end)


def predicted_ms(placement: Placement, workload: Workload) -> dict[str, float]:
    """Predicted forward and backward of one attention layer of the slowest rank, by exchange, on an H200 host."""
    times = Predictor(placement, attention_alone(workload)).times(MACHINES["h200"])
    return {name: round(time.step / 1e6, 3) for name, time in times.items()}
