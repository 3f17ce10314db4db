"""Verification of one model on one rollout file: log-probs, loss and every parameter gradient."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cp_engine.config import Config, parse_config
from cp_engine.distributed.gradients import sum_gradients
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.losses.settings import LOSS_DEFAULTS
from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from cp_engine.models.presets import PRESETS, state_half_life
from cp_engine.models.routers import router_shape
from cp_engine.models.support import check_supported
from cp_engine.placement import PlacedPack
from cp_engine.rollouts import Rollout
from cp_engine.routes import check_routes
from cp_engine.sharding.plan import ShardPlan
from cp_engine.step import PackLoss, StepData, prepare_step
from cp_engine.verify.compare import gradient_error
from cp_engine.verify.flat import loss_units, run_units, spread_units
from cp_engine.verify.flat_routers import flat_routers
from cp_engine.verify.values import DrawnValues, draw_values, paired, with_placeholders

BOUNDS = {"float64": 1e-10, "float32": 2e-5}
# What is switched on beside each loss, so that every part of it is verified: all KL estimators, the entropy bonus, the
# sampler correction, and clips near 1 so that the drawn ratios (`draw_values`) pass them.
_EXTRAS = {"sampler_cap": 1.5, "entropy_coef": 0.01}
LOSS_PARTS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"kl_coef": 0.05, **_EXTRAS},
    "dr_grpo": {"kl_coef": 0.05, "kl_estimator": "k1", **_EXTRAS},
    "dapo": _EXTRAS,
    "gspo": {"kl_coef": 0.05, "kl_estimator": "k2", **_EXTRAS},
    "cispo": {"kl_coef": 0.05, "clip_high": 0.2, **_EXTRAS},
    "ppo": {"kl_coef": 0.05, "kl_estimator": "k2", "dual_clip": 1.3, **_EXTRAS},
    "dpo": {},
}
CLIPPED_SIDES = {"sft": (), "dpo": (), "cispo": ("clipped_high",)}  # both for the others
ROUTER_AUX_COEF = 0.1
MIN_HALF_LIFE = 64.0  # tokens; with faster decay a wrong recurrent state would be invisible


@dataclass(frozen=True)
class VerifyOptions:
    model: str
    exchange: str = "gather"
    ulysses_ranks: int | None = None  # for ulysses_gather
    gdn_exchange: str = "affine"
    layout: str = "balanced"
    gdn_layout: str = "auto"
    engine: str = "plain"  # or fsdp2
    dtype: str = "float64"
    loss: str = "sft"
    aggregation: str | None = None  # None: the loss's own
    temperature: float = 1.0
    router_aux_coef: float | None = None  # None: 0.1 for a model with expert routers
    seed: int = 0
    share: str = "batch"
    max_pack_tokens: int | None = None
    full_vocab: int | None = None  # keep ids as they are in a vocabulary of this size; None re-indexes presets
    bound: float | None = None  # None: BOUNDS of the dtype

    def config(self, cp: int, vocab_size: int | None) -> Config:
        return parse_config(
            {
                "model": {"path": self.model, "vocab_size": vocab_size, "seed": self.seed},
                "parallel": {
                    "cp": cp,
                    "layout": self.layout,
                    "exchange": self.exchange,
                    "ulysses_ranks": self.ulysses_ranks,
                    "gdn_exchange": self.gdn_exchange,
                    "gdn_layout": self.gdn_layout,
                },
                "engine": {"name": self.engine},
                "packing": {"share": self.share, "max_pack_tokens": self.max_pack_tokens},
                "loss": {
                    "name": self.loss,
                    "aggregation": self.aggregation,
                    "temperature": self.temperature,
                    "router_aux_coef": self.router_aux_coef or 0.0,
                    **LOSS_PARTS.get(self.loss, {}),
                },
                "dtype": self.dtype,
            },
            "verify",
        )


class _Collector:
    """Takes the place of the step meter: keeps each occurrence's log-prob, and counts."""

    def __init__(self, step: StepData):
        self.step = step
        self.log_prob = np.zeros(len(step.flat.token))
        self.seen = np.zeros(len(step.flat.token))
        self.loss = self.edges = self.high = self.low = 0.0

    def add(self, placed: PlacedPack, plan: ShardPlan, result: PackLoss, *seconds: float) -> None:
        index = self.step.occurrence_index(placed.pack, plan)
        self.log_prob[index] = result.log_prob.double().cpu().numpy()
        self.seen[index] += 1
        self.loss += float(result.loss.detach())
        self.edges += plan.loss.edges
        self.high += float(result.occurrence.clipped_high.sum())
        self.low += float(result.occurrence.clipped_low.sum())


@dataclass(frozen=True, eq=False)
class FlatRun:
    """The oracle's result, equal on every rank: what any tree run of the same weights and loss must reproduce."""

    step: StepData  # with the drawn values
    vocab_size: int | None
    log_prob: np.ndarray  # float64 [N]
    loss: float
    gradient: dict[str, torch.Tensor]
    state_half_life: float | None
    router_aux_coef: float
    router_loss: float | None  # part of the loss; None for a model without routers
    router_margin: float | None  # smallest distance in logits between an expert that is chosen and one that is not


def verify(rollouts: list[Rollout], options: VerifyOptions, ranks: Ranks) -> dict[str, Any]:
    """Compare the tree engine with flat rows; equal result on every rank.

    Returns:
        the figures, with ``ok`` telling whether all errors are within the bound.
    """
    return verify_tree(run_flat(rollouts, options, ranks), options, ranks)


def run_flat(rollouts: list[Rollout], options: VerifyOptions, ranks: Ranks) -> FlatRun:
    """Run every rollout alone through the unmodified model, rows spread over the ranks."""
    vocab_size = None
    if options.model in PRESETS:
        vocab_size = options.full_vocab
        if vocab_size is None:
            rollouts, vocab_size = reindex(rollouts)
    config = options.config(ranks.world, vocab_size)
    if options.loss == "dpo":
        rollouts = paired(rollouts, options.seed)
        if not rollouts:
            raise ValueError("verifying dpo takes at least two rollouts with trained tokens")
    step = prepare_step([with_placeholders(r) for r in rollouts], config.packing, config.loss)
    clip_low, clip_high = (
        config.loss.clip_low or 0.2,
        config.loss.clip_high or 0.2,
    )  # where nothing is clipped, any will do
    drawn = draw_values(len(step.flat.token), clip_low, clip_high, options.seed)
    with _precision(options):
        dtype = getattr(torch, options.dtype)
        model = load_model(options.model, dtype, vocab_size=vocab_size, seed=options.seed, device=ranks.device).train()
        check_supported(model.config)  # before minutes of flat rows
        make_cpu_runnable(model)
        units = spread_units(loss_units(step, config.loss), np.diff(step.flat.row_start), ranks.world)[ranks.rank]
        shape, routers, coefficient = router_shape(model), None, options.router_aux_coef
        check_routes(rollouts, shape)
        if shape is not None and step.flat.routes is None:
            coefficient = ROUTER_AUX_COEF if coefficient is None else coefficient
            rows = [row for unit in units for row in unit]
            routers = flat_routers(model, step, rows, coefficient, shape, ranks)
        log_prob, loss = run_units(model, step, units, config.loss, drawn, ranks.device, routers)
        sum_gradients(model.parameters(), ranks)
    log_prob, loss = _sum(log_prob, ranks), float(_sum(np.array([loss]), ranks)[0])
    return FlatRun(
        step=_with_values(step, drawn, log_prob),
        vocab_size=vocab_size,
        log_prob=log_prob,
        loss=loss if routers is None else loss + routers.loss,
        gradient={name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        state_half_life=state_half_life(model),
        router_aux_coef=coefficient or 0.0,
        router_loss=None if routers is None else routers.loss,
        router_margin=None if routers is None else routers.margin,
    )


def verify_tree(flat: FlatRun, options: VerifyOptions, ranks: Ranks) -> dict[str, Any]:
    """Run the tree engine on the same step and compare."""
    started = time.perf_counter()
    options = replace(options, router_aux_coef=flat.router_aux_coef)
    with _precision(options):
        engine = Engine(options.config(ranks.world, flat.vocab_size), ranks)
        collector = _Collector(flat.step)
        engine.accumulate_gradients(flat.step, collector)
    figures = _figures(flat, collector, ranks)
    worst = gradient_error(engine.model.causal_lm, flat.gradient)
    figures |= {"max_grad_err": worst.error, "worst_tensor": worst.tensor, "state_half_life": flat.state_half_life}
    figures |= {"router_loss": flat.router_loss, "router_margin": flat.router_margin}
    return _verdict(figures, options, ranks, time.perf_counter() - started)


def _precision(options: VerifyOptions):
    return keep_float64() if options.dtype == "float64" else contextlib.nullcontext()


def reindex(rollouts: list[Rollout]) -> tuple[list[Rollout], int]:
    """Renumber the ids in use from 0; returns the rollouts and the size of the vocabulary."""
    used, joined = np.unique(np.concatenate([r.input_ids for r in rollouts]), return_inverse=True)
    parts = np.split(joined.astype(np.int64), np.cumsum([len(r.input_ids) for r in rollouts])[:-1])
    return [replace(r, input_ids=ids) for r, ids in zip(rollouts, parts, strict=True)], max(2, len(used))


def _with_values(step: StepData, drawn: DrawnValues, own: np.ndarray) -> StepData:
    return replace(
        step,
        advantage=drawn.advantage,
        old_logprob=own + drawn.old_offset,
        ref_logprob=own + drawn.ref_offset,
        sampler_logprob=own + drawn.sampler_offset,
    )


def _sum(values: np.ndarray, ranks: Ranks) -> np.ndarray:
    """Sum of a float64 array over the ranks."""
    if ranks.group is None:
        return values
    total = torch.as_tensor(values, dtype=torch.float64, device=ranks.device).clone()
    dist.all_reduce(total, group=ranks.group)
    return total.cpu().numpy()


def _figures(flat: FlatRun, collector: _Collector, ranks: Ranks) -> dict[str, Any]:
    step = flat.step
    seen, tree_logprob = _sum(collector.seen, ranks), _sum(collector.log_prob, ranks)
    assert (seen == step.counted).all(), "an occurrence was dropped or counted twice"
    sums = np.array([collector.loss, collector.edges, collector.high, collector.low])
    tree_loss, edges, high, low = _sum(sums, ranks).tolist()
    occurrences = int(step.counted.sum())
    return {
        "rollouts": len(step.flat.row_start) - 1,
        "packs": len(step.packs),
        "edges": int(edges),
        "occurrences": occurrences,
        "tree_tokens": step.tree_tokens,
        "flat_tokens": step.flat_tokens,
        "loss": tree_loss,
        "max_logprob_err": float(np.abs(tree_logprob - flat.log_prob).max()),
        # A loss of advantages of both signs may be near zero: it is measured against at least 1e-3.
        "loss_err": abs(tree_loss - flat.loss) / max(abs(flat.loss), 1e-3),
        "clipped_high": high / occurrences,
        "clipped_low": low / occurrences,
    }


def _verdict(figures: dict[str, Any], options: VerifyOptions, ranks: Ranks, seconds: float) -> dict[str, Any]:
    bound = BOUNDS[options.dtype] if options.bound is None else options.bound
    reasons = [
        f"{name} {figures[name]:.3g} > {bound:g}"
        for name in ("max_logprob_err", "loss_err", "max_grad_err")
        if not figures[name] <= bound
    ]
    sides = CLIPPED_SIDES.get(options.loss, ("clipped_high", "clipped_low"))
    unseen = [side.replace("clipped_", "") for side in sides if not figures[side]]
    if unseen:
        reasons.append(
            f"no occurrence is clipped on the {' or '.join(unseen)} side, so clipping was not compared: verify more "
            "rollouts, or the loss sft"
        )
    half_life = figures["state_half_life"]
    if half_life is not None and half_life < MIN_HALF_LIFE and options.model in PRESETS:
        reasons.append(f"recurrent states fade in {half_life:.0f} tokens, which would hide a wrong state")
    return {
        "ok": not reasons,
        "reasons": reasons,
        **figures,
        "bound": bound,
        "cp": ranks.world,
        "model": options.model,
        "exchange": options.exchange,
        "ulysses_ranks": options.ulysses_ranks,
        "gdn_exchange": options.gdn_exchange,
        "layout": options.layout,
        "gdn_layout": options.gdn_layout,
        "engine": options.engine,
        "dtype": options.dtype,
        "loss_name": options.loss,
        "aggregation": options.aggregation or LOSS_DEFAULTS[options.loss]["aggregation"],
        "tree_seconds": seconds,
    }
