"""Predicted scaling of a batch over many rank counts, and what limits it: `plan --sweep`.

Strong scaling splits one forest over more ranks. Weak scaling keeps the tokens of a rank: a part of the batch on few
ranks, the whole batch several times over, as other trees, on many.

One GPU's time for the same forest over P times the step is the *efficiency*; what is missing to 1 is told apart by
predicting the step again with exchanges that start at once, then with ones that take no time, then with ranks that
are equally loaded.

Shapes: R rollouts, S segments, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cp_engine.plan_memory import fullest_rank
from cp_engine.plan_report import PlanSettings
from cp_engine.prediction import Predictor, one_gpu_time, place
from cp_engine.rollouts import FlatRollouts
from cp_engine.sharding.attention_plan import EXCHANGES
from cp_engine.sharding.forest import Forest, build_forest
from cp_engine.sharding.layout import imbalance
from cp_engine.sharding.packing import share_groups

WEAK_TOKENS = 16_384  # tree tokens of a rank in weak scaling
WELL = 0.95  # efficiency from which on nothing counts as a limit
LIMITS = {
    "balance": "the slowest rank computes longer than the mean, or ranks wait for states that another one makes",
    "link": "bytes that no compute hides",
    "latency": "exchanges that take time before the first byte",
    "extra work": "work that one GPU does not have: part tiles, maps of states, merges, launches",
}

# Batches for predictions: groups, tokens of the shared trunk, rollouts of a group, mean tokens below the trunk.
SYNTHETIC = {"grpo_5k16": (88, 5_000, 16, 400), "one_trunk_32k": (1, 32_768, 484, 2_000)}


def synthetic_rollouts(name: str) -> FlatRollouts:
    """A batch of about a million tree tokens: groups of rollouts that share one trunk, lengths drawn evenly around
    their mean with a fixed seed."""
    groups, trunk, rollouts, mean = SYNTHETIC[name]
    numbers = np.random.default_rng(0)
    own = numbers.integers(mean // 2, mean + mean // 2 + 1, groups * rollouts)
    length = trunk + own
    row_start = np.concatenate([[0], np.cumsum(length)])
    position = np.arange(row_start[-1]) - np.repeat(row_start[:-1], length)
    row = np.repeat(np.arange(len(length)), length)
    # Groups differ in their first token, rollouts in the first below the trunk; nothing else decides the forest.
    token = np.where(position == 0, row // rollouts, np.where(position == trunk, row % rollouts, 0))
    return FlatRollouts(token, row_start, np.arange(len(length)) // rollouts, position >= trunk, None)


def parse_sweep(text: str) -> list[int]:
    """The rank counts of ``cp=1,2,4``.

    Raises:
        ValueError: for anything else.
    """
    name, equals, values = text.partition("=")
    counts = [part.strip() for part in values.split(",")]
    if name != "cp" or not equals or not all(part.isdecimal() and int(part) for part in counts):
        raise ValueError(f"--sweep expects rank counts of at least 1, as in cp=1,2,4,8; got {text!r}")
    return sorted({int(part) for part in counts})


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One predicted step. ``lost`` are shares of the step, which together with ``efficiency`` add up to 1."""

    scaling: str  # strong or weak
    cp: int
    hosts: int
    tree_tokens: int
    exchange: str
    refused: str | None = None  # why this exchange cannot run here; the figures below are None then
    step_ms: float | None = None
    exposed_ms: float | None = None
    speedup: float | None = None  # over one GPU for the same forest
    efficiency: float | None = None
    lost: dict[str, float] | None = None
    limit: str | None = None  # the largest loss, or "none"
    memory_gib: float | None = None  # of the fullest GPU
    pair_imbalance: float | None = None
    busiest_rows: int | None = None


def sweep(flat: FlatRollouts, counts: list[int], settings: PlanSettings) -> Iterator[ScalingRow]:
    """Predict all rollouts as one pack at each rank count; ``settings.cp`` and the budget are not used."""
    forest = flat.forest(settings.share)
    for scaling in ("strong", "weak"):
        for cp in counts:
            part = forest if scaling == "strong" else weak_forest(flat, forest, settings.share, cp * WEAK_TOKENS)
            yield from _rows(scaling, part, cp, settings)


def _rows(scaling: str, forest: Forest, cp: int, settings: PlanSettings) -> Iterator[ScalingRow]:
    machine, model = settings.machine, settings.model.shape
    placement = place(forest, cp, settings.layout, model, machine, settings.gdn_layout)
    predictor = Predictor(placement, model)
    steps = [predictor.times(each) for each in (machine, machine.with_instant_links(), machine.with_free_links())]
    alone = one_gpu_time(placement.forest, model, machine)
    same = {"scaling": scaling, "cp": cp, "hosts": machine.hosts(cp), "tree_tokens": forest.tokens}
    asked = EXCHANGES if settings.exchange == "auto" else (settings.exchange,)
    for name in asked[:1] if cp == 1 else asked:  # on one rank nothing moves, whatever the exchange
        if name in predictor.refused:
            yield ScalingRow(**same, exchange=name, refused=predictor.refused[name])
            continue
        full, instant, free = (times[name] for times in steps)
        step = full.step
        lost = {
            "balance": free.step - free.mean_compute,
            "link": instant.step - free.step,
            "latency": step - instant.step,
            "extra work": free.mean_compute - alone / cp,
        }
        efficiency = alone / (cp * step)
        worst = max(lost, key=lambda kind: lost[kind])
        yield ScalingRow(
            **same,
            exchange=name if cp > 1 else "any",
            step_ms=step / 1e6,
            exposed_ms=full.exposed / 1e6,
            speedup=alone / step,
            efficiency=efficiency,
            lost={kind: value / step for kind, value in lost.items()},
            limit="none" if efficiency >= WELL else worst,
            memory_gib=fullest_rank(placement, full, settings.model, settings.memory(cp)).peak / 2**30,
            pair_imbalance=imbalance(placement.figures.pairs),
            busiest_rows=placement.figures.busiest_rows,
        )


def weak_forest(flat: FlatRollouts, forest: Forest, share: str, tokens: int) -> Forest:
    """About so many tree tokens: the first rollouts of a batch, or all of it several times, as other trees.

    Args:
        forest: that of the whole batch.
    """
    if tokens >= forest.tokens:
        return repeated(forest, round(tokens / forest.tokens))
    rollout, segment = forest.path_segments()
    first = np.full(forest.segments, forest.rollouts)
    np.minimum.at(first, segment, rollout)
    held = np.cumsum(np.bincount(first, forest.segment_length, forest.rollouts))  # by the first rollouts
    count = 1 + int(np.abs(held - tokens).argmin())
    end = int(flat.row_start[count])
    group = share_groups(share, flat.group)
    return build_forest(
        flat.token[:end],
        flat.row_start[: count + 1],
        None if group is None else group[:count],
        None if flat.share_key is None else flat.share_key[:end],
    )


def repeated(forest: Forest, times: int) -> Forest:
    """So many copies of a forest side by side, which share nothing."""
    copy = np.arange(times)[:, None]
    token, segment = copy * forest.tokens, copy * forest.segments
    return Forest(
        token=np.tile(forest.token, times),
        segment_start=np.append((forest.segment_start[:-1] + token).reshape(-1), times * forest.tokens),
        parent=np.where(forest.parent >= 0, forest.parent + segment, -1).reshape(-1),
        depth=np.tile(forest.depth, times),
        subtree_end=(forest.subtree_end + token).reshape(-1),
        end_segment=(forest.end_segment + segment).reshape(-1),
    )
