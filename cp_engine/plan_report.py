"""The figures of the `plan` command: what a batch becomes on CP ranks, and what that is predicted to take.

Shapes: P ranks. Figures of all ranks are counted at once from the layout; they equal those of the ranks' real plans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from cp_engine.machines import Machine
from cp_engine.memory_setup import MemorySetup
from cp_engine.model_sizes import ModelSizes
from cp_engine.plan_memory import fullest_rank, memory_setup, rank_memory
from cp_engine.prediction import ExchangeTime, Placement, Predictor, flat_time, one_gpu_time, place
from cp_engine.rollouts import FlatRollouts
from cp_engine.sharding.layout import imbalance
from cp_engine.sharding.packing import Pack, pack_rollouts
from cp_engine.sharding.replay import run_prices


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a batch is planned for."""

    cp: int
    model: ModelSizes
    machine: Machine
    share: str = "batch"
    max_pack_tokens: int | None = None
    layout: str = "balanced"
    gdn_layout: str = "auto"
    exchange: str = "auto"
    dp: int = 1
    engine: str = "fsdp2"
    recompute: str = "layers"
    recompute_layers: int | None = None

    def memory(self, cp: int) -> MemorySetup:
        """What memory depends on with so many context-parallel ranks; the engine shards over these times dp."""
        return memory_setup(self.engine, cp * self.dp, self.recompute, self.recompute_layers)


@dataclass(frozen=True, eq=False)
class PlannedPack:
    """One pack with its owners and the predicted time of every exchange that can run."""

    pack: Pack
    placement: Placement
    times: dict[str, ExchangeTime]
    refused: dict[str, str]
    chosen: str
    reason: str

    @property
    def time(self) -> ExchangeTime:
        return self.times[self.chosen]


def plan_packs(flat: FlatRollouts, settings: PlanSettings) -> list[PlannedPack]:
    """Pack a batch, place every pack and choose its exchange.

    Raises:
        ValueError: for a rollout over the budget, or an exchange or a layout asked for by name that cannot be.
    """
    packs = pack_rollouts(
        flat.token,
        flat.row_start,
        flat.group,
        flat.loss_mask,
        share=settings.share,
        share_key=flat.share_key,
        max_pack_tokens=settings.max_pack_tokens,
        dp=settings.dp,
        dp_prices=run_prices(settings.model.shape) if settings.dp > 1 else None,
    )
    return [_planned(pack, settings) for pack in packs]


def _planned(pack: Pack, settings: PlanSettings) -> PlannedPack:
    model = settings.model.shape
    placement = place(pack.forest, settings.cp, settings.layout, model, settings.machine, settings.gdn_layout)
    # The pack with its forest in the order that the layout wants, so that nobody mixes up the two.
    pack = replace(pack, forest=placement.forest)
    predictor = Predictor(placement, model)
    times = predictor.times(settings.machine)
    refused = dict(predictor.refused)
    if settings.exchange in refused:
        raise ValueError(
            f"--exchange {settings.exchange} cannot run: {refused[settings.exchange]}; use another exchange or another "
            "number of ranks (--cp)"
        )
    if settings.exchange == "auto":
        short = _short_of_memory(placement, times, settings)
        if len(short) < len(times):  # else nothing fits, which the report of memory says
            refused |= short
    chosen, reason = _choice(times, refused, settings)
    return PlannedPack(pack, placement, times, refused, chosen, reason)


def _short_of_memory(placement: Placement, times: dict[str, ExchangeTime], settings: PlanSettings) -> dict[str, str]:
    """Why the buffers of an exchange do not fit on the fullest GPU, beside everything else."""
    others = fullest_rank(placement, None, settings.model, settings.memory(settings.cp)).peak
    free = settings.machine.memory_bytes - others
    return {
        name: f"its buffers of {_gib(each.buffer_bytes):.1f} GiB do not fit beside {_gib(others):.1f} GiB of the rest"
        for name, each in times.items()
        if each.buffer_bytes > free
    }


def _choice(times: dict[str, ExchangeTime], refused: dict[str, str], settings: PlanSettings) -> tuple[str, str]:
    """The exchange to use, and why."""
    asked = settings.exchange
    if settings.cp == 1:
        return ("gather" if asked == "auto" else asked), "one rank: nothing moves"
    step = {name: each.step for name, each in times.items() if name not in refused}
    best = min(step, key=lambda name: step[name]) if asked == "auto" else asked  # gather first where equal
    others = [f"{name} {_ms(value):,.3f} ms" for name, value in step.items() if name != best]
    others += [f"{name} cannot run: {why}" for name, why in refused.items()]
    why = "predicted fastest at" if asked == "auto" else "asked for; predicted at"
    return best, "; ".join([f"{best}: {why} {_ms(step[best]):,.3f} ms a step", *others])


def plan_report(flat: FlatRollouts, settings: PlanSettings) -> tuple[dict, list[PlannedPack]]:
    """The figures of `plan --json`, and the packs that they are of.

    The figures of the batch are of one forest over all its rollouts; packs replay shared ancestors, so theirs add up to
    ``replayed_tokens`` more. ``share_key_tokens`` are the tree tokens that only share keys keep apart; ``plan_ms``
    covers packing, layouts and the figures of all ranks, in milliseconds.

    Raises:
        ValueError: as `plan_packs`.
    """
    began = time.perf_counter()
    planned = plan_packs(flat, settings)
    plan_ms = 1000 * (time.perf_counter() - began)
    forest = flat.forest(settings.share)
    keyless = forest if flat.share_key is None else flat.forest(settings.share, use_share_key=False)
    per_group = forest if settings.share == "group" else flat.forest("group")
    report = {
        "rollouts": flat.rollouts,
        "groups": flat.groups,
        "flat_tokens": forest.flat_tokens,
        "tree_tokens": forest.tokens,
        "tree_tokens_per_group": per_group.tokens,
        "share_key_tokens": forest.tokens - keyless.tokens,
        "segments": forest.segments,
        "max_depth": forest.max_depth,
        "flat_pairs": forest.flat_pairs,
        "tree_pairs": forest.tree_pairs,
        "replayed_tokens": sum(each.pack.replayed_tokens for each in planned),
        "plan_ms": round(plan_ms, 3),
        "predicted": _predicted(flat, planned, settings),
        "packs": [_pack_report(each, settings) for each in planned],
    }
    return report, planned


def _predicted(flat: FlatRollouts, planned: list[PlannedPack], settings: PlanSettings) -> dict:
    """Times of all packs of the step, and the fullest GPU's memory."""
    machine, model, cp = settings.machine, settings.model, settings.cp
    step = sum(each.time.step for each in planned)
    exposed = sum(each.time.exposed for each in planned)
    alone = sum(one_gpu_time(each.pack.forest, model.shape, machine) for each in planned)
    flat_alone = flat_time(np.diff(flat.row_start), model.shape, machine)
    held = [fullest_rank(each.placement, each.time, model, settings.memory(cp)) for each in planned]
    fullest = max(held, key=lambda memory: memory.peak)
    return {
        "model": model.name,
        "device": machine.name,
        "device_measured": machine.measured,
        "nodes": machine.hosts(cp),
        "gpus_per_node": machine.gpus_per_node,
        "layout": settings.layout,
        "step_ms": _ms(step),
        "compute_ms": _ms(step - exposed),
        "exposed_ms": _ms(exposed),
        "one_gpu_ms": _ms(alone),
        "speedup_over_one_gpu": alone / step,
        "efficiency": alone / (step * cp),
        "flat_ms": _ms(flat_alone / cp),
        "speedup_over_flat": flat_alone / (step * cp),
        "engine": settings.engine,
        "recompute": settings.recompute,
        "recompute_layers": settings.recompute_layers,
        "memory_gib": {**{name: _gib(part) for name, part in fullest.parts().items()}, "total": _gib(fullest.peak)},
        "forward_peak_gib": _gib(fullest.forward_peak),
        "backward_peak_gib": _gib(fullest.backward_peak),
        "device_memory_gib": _gib(machine.memory_bytes),
    }


def _pack_report(planned: PlannedPack, settings: PlanSettings) -> dict:
    memory = rank_memory(planned.placement, planned.time, settings.model, settings.memory(settings.cp))
    pack, figures = planned.pack, planned.placement.figures
    columns = {
        "tokens": figures.tokens,
        "pairs": figures.pairs,
        "pieces": figures.pieces,
        "fragments": rank_fragments(planned.placement),
        "rows_in": figures.rows_in,
        "rows_out": figures.rows_out,
    }
    return {
        "tree_tokens": pack.tokens,
        "replayed_tokens": pack.replayed_tokens,
        "token_imbalance": imbalance(figures.tokens),
        "pair_imbalance": imbalance(figures.pairs),
        "layout_method": planned.placement.method,
        "gdn_layout": None if planned.time.gdn is None else _gdn_layout(planned.placement),
        "exchange": planned.chosen,
        "exchange_reason": planned.reason,
        "predicted": {
            "step_ms": _ms(planned.time.step),
            "exposed_ms": _ms(planned.time.exposed),
            "layers": _layers(planned.time),
            "by_exchange": {name: _ms(each.step) for name, each in planned.times.items()},
            "refused": planned.refused,
            "rank_peak_gib": [_gib(each.peak) for each in memory],
        },
        "ranks": [
            dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)
        ],
    }


def _gdn_layout(placement: Placement) -> dict:
    """The layout of recurrent layers where it is another one: rows of hidden states that each rank receives and sends
    at the borders of a run."""
    own = placement.gdn
    if own is None:
        return {"own": False, "reason": placement.gdn_reason}
    others = own.moved - np.diag(own.moved.diagonal())
    return {
        "own": True,
        "reason": placement.gdn_reason,
        "method": own.method,
        "tokens": own.tokens.tolist(),
        "rows_in": others.sum(1).tolist(),
        "rows_out": others.sum(0).tolist(),
    }


def _layers(time_of: ExchangeTime) -> dict:
    """Milliseconds of one layer of each type on its slowest rank, and of the moves around one run of GDN layers."""
    found = {}
    kinds = {"attention": time_of.attention, "window": time_of.window, "gdn": time_of.gdn, "relay": time_of.relay}
    for name, parts in kinds.items():
        if parts is not None:
            slow = [(part, int(part.total.argmax())) for part in parts]
            found[name] = {
                "forward_ms": _ms(int(parts[0].total.max())),
                "backward_ms": _ms(int(parts[1].total.max())),
                "compute_ms": _ms(sum(int(part.compute[rank]) for part, rank in slow)),
                "exposed_ms": _ms(sum(int(part.exposed[rank]) for part, rank in slow)),
            }
    return found


def rank_fragments(placement: Placement) -> np.ndarray:
    """int64 [P]: contiguous parts of one segment on one rank, in recurrent layers if they have their own layout."""
    layout = placement.layout if placement.gdn is None else placement.gdn.layout
    start = np.union1d(placement.forest.segment_start, layout.piece_start)[:-1]
    piece = np.searchsorted(layout.piece_start, start, side="right") - 1
    return np.bincount(layout.piece_rank[piece], minlength=layout.world)


def _ms(nanoseconds: float) -> float:
    return nanoseconds / 1e6


def _gib(nbytes: int) -> float:
    return nbytes / 2**30
