"""The numbers of a training step, summed over packs and ranks, and the file they are written to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_engine.distributed.mesh import Mesh
from cp_engine.placement import PlacedPack
from cp_engine.sharding.layout import rank_pairs
from cp_engine.sharding.plan import ShardPlan
from cp_engine.step import PackLoss, StepData


class StepMeter:
    """Collects one step; `summary` is collective."""

    def __init__(self, step: StepData, mesh: Mesh):
        self.step, self.mesh = step, mesh
        # loss, entropy, clipped above, clipped below, occurrences
        self.sums = torch.zeros(5, dtype=torch.float64, device=mesh.everyone.device)
        self.router_loss: torch.Tensor | None = None  # of the steps that have one
        self.largest: list[tuple[int, int]] = []  # of each pack: tokens and pairs of the rank that has most
        self.total: list[tuple[int, int]] = []  # of each pack: tokens and pairs
        self.plan_seconds = self.plan_waited = 0.0
        self.exchanges: set[str] = set()

    def add(self, placed: PlacedPack, plan: ShardPlan, result: PackLoss, plan_seconds: float, waited: float) -> None:
        occurrence = result.occurrence
        self.sums += torch.stack(
            [
                result.loss.detach().double(),
                result.entropy.double().sum(),
                occurrence.clipped_high.double().sum(),
                occurrence.clipped_low.double().sum(),
                torch.tensor(float(plan.loss.occurrences), dtype=torch.float64, device=self.sums.device),
            ]
        )
        if result.router_loss is not None:
            so_far = 0.0 if self.router_loss is None else self.router_loss
            self.router_loss = so_far + result.router_loss.double()
        per_rank = (placed.layout.rank_token_count, rank_pairs(placed.pack.forest, placed.layout))
        self.largest.append(tuple(int(count.max()) for count in per_rank))
        self.total.append(tuple(int(count.sum()) for count in per_rank))
        self.exchanges.add(placed.exchange)
        self.plan_seconds += plan_seconds
        self.plan_waited += waited

    def summary(self, step: int, grad_norm: float, seconds: float) -> dict[str, Any]:
        ranks, cp = self.mesh.everyone, self.mesh.cp
        largest, total = (torch.tensor(each, dtype=torch.float64) for each in (self.largest, self.total))
        if ranks.group is not None:
            dist.all_reduce(self.sums, group=ranks.group)
            if self.mesh.dp > 1:  # the ranks of a CP group count the same pack
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ranks.group)
                dist.all_reduce(total, group=ranks.group)
                total /= cp
            if self.router_loss is not None:
                dist.all_reduce(self.router_loss, group=ranks.group)
        loss, entropy, high, low, occurrences = self.sums.tolist()
        router_loss = {} if self.router_loss is None else {"router_loss": float(self.router_loss)}
        # Ranks wait for one another in every round of packs.
        imbalance = largest.sum(0) * ranks.world / total.sum(0)
        return {
            "step": step,
            "loss": loss,
            **router_loss,
            "grad_norm": grad_norm,
            "entropy": entropy / occurrences,
            "clipped_high": high / occurrences,
            "clipped_low": low / occurrences,
            "occurrences": int(occurrences),
            "packs": len(self.step.packs),
            "exchange": "+".join(sorted(self.exchanges)),
            "tree_tokens": self.step.tree_tokens,
            "flat_tokens": self.step.flat_tokens,
            "tree_tokens_per_s": self.step.tree_tokens / seconds,
            "flat_tokens_per_s": self.step.flat_tokens / seconds,
            "token_imbalance": float(imbalance[0]),
            "pair_imbalance": float(imbalance[1]),
            "plan_ms": 1000 * self.plan_seconds,
            "plan_wait_ms": 1000 * self.plan_waited,
            "seconds": seconds,
        }


def strict_json(figures: dict[str, Any]) -> str:
    """One line of JSON; a number that is not finite becomes null, which JSON has and NaN it has not."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
    return json.dumps(finite, allow_nan=False)


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, flushed at once so that a run can be watched.

    Args:
        steps_done: steps of an earlier run that goes on; their lines stay, later ones will be written again.
    """

    def __init__(self, path: Path, steps_done: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if steps_done and path.is_file() else []
        self.path, self.file = path, path.open("w")
        for line in lines[:steps_done]:
            self.file.write(line + "\n")

    def write(self, metrics: dict[str, Any]) -> None:
        self.file.write(strict_json(metrics) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
