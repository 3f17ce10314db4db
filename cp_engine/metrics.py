"""The numbers of a training step, summed over packs and ranks. `docs/metrics.md` has them all with their units."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cp_engine.config import Config
from cp_engine.distributed.mesh import Mesh
from cp_engine.exchange_bytes import ExchangedSizes, attention_bytes, gdn_bytes, head_bytes
from cp_engine.flops import Work, training_flops
from cp_engine.machines import peak_flops
from cp_engine.models.hf_gdn import gdn_heads
from cp_engine.models.hf_relay import gdn_runs
from cp_engine.models.shape import attention_window
from cp_engine.placement import PlacedPack
from cp_engine.sharding.cost import ModelShape
from cp_engine.sharding.exchange.waits import ExchangeWaits
from cp_engine.sharding.layout import rank_pairs
from cp_engine.sharding.plan import ShardPlan
from cp_engine.step import PackLoss, StepData

# Of the step, by each rank.
COUNTS = ("occurrences", "predictors", "window_pairs", "attention_bytes", "gdn_bytes", "head_bytes")
MEANS = ("entropy", "kl_ref", "kl_old", "clipped_high", "clipped_low")  # over the occurrences of the step


@dataclass(frozen=True, kw_only=True)
class Metered:
    """What the meter has to know of a run's model and card."""

    sizes: ExchangedSizes
    vocab_size: int
    window: int | None  # of layers with a sliding window; None for a model without such layers
    frozen: bool  # the model's own weights are not trained
    peak_flops: float | None  # of a rank's card; None where it is not known

    @property
    def shape(self) -> ModelShape:
        return self.sizes.shape

    def flops(self, work: Work, backward: bool) -> int:
        return training_flops(work, self.shape, self.vocab_size, self.frozen, backward)


def metered(hf_config, config: Config, shape: ModelShape, device: torch.device) -> Metered:
    """The model of a text config on a device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    sizes = ExchangedSizes(
        shape=shape,
        gdn_heads=gdn_heads(hf_config),
        gdn_runs=len(list(gdn_runs(hf_config))),
        dtype=getattr(torch, config.dtype),
    )
    return Metered(
        sizes=sizes,
        vocab_size=hf_config.vocab_size,
        window=attention_window(hf_config),
        frozen=config.lora is not None,
        peak_flops=peak_flops(name, config.dtype),
    )


class StepMeter:
    """Collects one step, without waiting for the device; `summary` is collective and waits once.

    Sums of what each rank has are taken over all ranks. What every rank of a CP group knows of its packs (tokens,
    pairs) is summed over the groups only.
    """

    def __init__(self, step: StepData, mesh: Mesh, model: Metered):
        self.step, self.mesh, self.model = step, mesh, model
        self.device_sums: dict[str, torch.Tensor] = {}  # float64 scalars of this rank
        self.host_sums = dict.fromkeys(COUNTS, 0)
        self.largest: list[tuple[int, int]] = []  # of each pack: tokens and pairs of the rank that has most
        self.total: list[tuple[int, int]] = []  # of each pack: tokens and pairs
        self.plan_seconds = self.plan_waited = 0.0
        self.exchanges: set[str] = set()
        self.exchange_waits = ExchangeWaits()
        self.on_gpu = mesh.everyone.device.type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(mesh.everyone.device)

    def add(self, placed: PlacedPack, plan: ShardPlan, result: PackLoss, plan_seconds: float, waited: float) -> None:
        occurrence = result.occurrence
        of_occurrences = {
            "entropy": result.entropy,
            "clipped_high": occurrence.clipped_high,
            "clipped_low": occurrence.clipped_low,
            **occurrence.watched,
        }
        sums = {"loss": result.loss.detach(), **result.terms}
        sums |= {name: values.double().sum() for name, values in of_occurrences.items()}
        for name, value in sums.items():
            value = value.double()
            self.device_sums[name] = self.device_sums[name] + value if name in self.device_sums else value
        self.host_sums["occurrences"] += plan.loss.occurrences
        self.host_sums["predictors"] += plan.loss.predictors
        self.host_sums["window_pairs"] += 0 if plan.window_attention is None else plan.window_attention.pairs
        self.host_sums["attention_bytes"] += attention_bytes(plan, self.model.sizes)
        self.host_sums["gdn_bytes"] += gdn_bytes(plan, self.model.sizes)
        self.host_sums["head_bytes"] += head_bytes(plan, self.model.sizes)
        per_rank = (placed.layout.rank_token_count, rank_pairs(placed.pack.forest, placed.layout))
        self.largest.append(tuple(int(count.max()) for count in per_rank))
        self.total.append(tuple(int(count.sum()) for count in per_rank))
        self.exchanges.add(placed.exchange)
        self.plan_seconds += plan_seconds
        self.plan_waited += waited

    def summary(self, step: int, grad_norm: float, lr: float, skipped: bool, started: float) -> dict[str, Any]:
        """The figures of `docs/metrics.md`, equal on all ranks.

        Args:
            started: `time.perf_counter` at the step's beginning.
        """
        device_sums = torch.stack(list(self.device_sums.values()))
        device_sums = self._over_ranks(device_sums).tolist()  # waits for the device
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated(self.mesh.everyone.device) if self.on_gpu else 0
        host_sums = self._over_ranks(torch.tensor(list(self.host_sums.values()), dtype=torch.float64)).tolist()
        slowest = [seconds, self.plan_seconds, self.plan_waited, self.exchange_waits.seconds(), peak]
        slowest = self._over_ranks(torch.tensor(slowest, dtype=torch.float64), dist.ReduceOp.MAX)
        seconds, planning, waited, exchange_waited, peak = slowest.tolist()
        sums = dict(zip([*self.device_sums, *self.host_sums], [*device_sums, *host_sums], strict=True))
        occurrences = sums.pop("occurrences")
        parts = {name: sums[name] for name in sums if name.endswith("loss")}
        means = {name: sums[name] / occurrences for name in MEANS if name in sums}
        largest, total = self._packs_of_all_groups()
        # Ranks wait for one another in every round of packs.
        imbalance = largest.sum(0) * self.mesh.everyone.world / total.sum(0)
        pairs = int(total.sum(0)[1])
        return {
            "step": step,
            **parts,
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped": skipped,
            **means,
            "occurrences": int(occurrences),
            "packs": len(self.step.packs),
            "exchange": "+".join(sorted(self.exchanges)),
            **self._speed(seconds, pairs, int(sums["window_pairs"]), int(occurrences), int(sums["predictors"])),
            "token_imbalance": float(imbalance[0]),
            "pair_imbalance": float(imbalance[1]),
            "attention_bytes": int(sums["attention_bytes"]),
            "gdn_bytes": int(sums["gdn_bytes"]),
            "head_bytes": int(sums["head_bytes"]),
            "exchange_wait_ms": 1000 * exchange_waited,
            "plan_ms": 1000 * planning,
            "plan_wait_ms": 1000 * waited,
            "peak_gib": peak / 2**30 if self.on_gpu else None,
            "seconds": seconds,
        }

    def _speed(
        self, seconds: float, pairs: int, window_pairs: int, occurrences: int, predictors: int
    ) -> dict[str, Any]:
        tree, flat = self.step.tree_tokens, self.step.flat_tokens
        lengths = np.diff(self.step.flat.row_start)
        backward = self.step.trains
        work = Work(tokens=tree, pairs=pairs, predictors=predictors, window_pairs=window_pairs)
        executed = self.model.flops(work, backward)
        flat_pairs = int((lengths * (lengths + 1) // 2).sum())
        hidden = np.maximum(lengths - (self.model.window or lengths.max()), 0)  # keys that a row's last token misses
        # Alone, every occurrence has a predictor of its own.
        as_flat = self.model.flops(
            Work(
                tokens=flat,
                pairs=flat_pairs,
                predictors=occurrences,
                window_pairs=flat_pairs - int((hidden * (hidden + 1) // 2).sum()),
            ),
            backward,
        )
        peak = None if self.model.peak_flops is None else self.model.peak_flops * self.mesh.everyone.world * seconds
        return {
            "tree_tokens": tree,
            "flat_tokens": flat,
            "tree_tokens_per_s": tree / seconds,
            "flat_tokens_per_s": flat / seconds,
            "tflop": executed / 1e12,
            "flat_tflop": as_flat / 1e12,
            "mfu": None if peak is None else executed / peak,
            "mfu_flat": None if peak is None else as_flat / peak,
        }

    def _packs_of_all_groups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and pairs of each round of packs: of the rank that has most, and of all ranks. float64 [rounds, 2]."""
        largest, total = (torch.tensor(each, dtype=torch.float64) for each in (self.largest, self.total))
        if self.mesh.dp == 1:
            return largest, total  # the ranks of a CP group count the same pack
        return self._over_ranks(largest, dist.ReduceOp.MAX), self._over_ranks(total) / self.mesh.cp

    def _over_ranks(self, values: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
        if self.mesh.everyone.group is not None:
            dist.all_reduce(values, op=op, group=self.mesh.everyone.group)
        return values
