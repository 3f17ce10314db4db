"""The training engine: rollouts in, one exact optimizer step out."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cp_engine.config import Config, LossConfig
from cp_engine.distributed.agree import require_equal_digests
from cp_engine.distributed.gradients import clip_gradients, sum_gradients
from cp_engine.distributed.ranks import Ranks, join_ranks
from cp_engine.metrics import StepMeter
from cp_engine.models.load import load_model, prepare_for_trees, save_model
from cp_engine.models.shape import conv_width, model_shape
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.pack import DevicePack, device_pack
from cp_engine.placement import PlacedPack, place_pack, plan_rank
from cp_engine.rollouts import Rollout, check_rollouts
from cp_engine.sharding.exchange.rows import accumulation_dtype
from cp_engine.sharding.packing import Pack
from cp_engine.step import StepData, pack_loss, prepare_step


class Engine:
    """Trains one model on the CP ranks of the process group.

    Every rank constructs it with the same config and passes the same rollouts to `train_step`.

    Raises:
        ValueError: when ``parallel.cp`` is not the number of rank processes, ranks were given different settings
            (raised on every rank), or the model is not supported.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None):
        self.config = config
        self.ranks = ranks or join_ranks(config.parallel.timeout_s)
        if config.parallel.cp != self.ranks.world:
            raise ValueError(
                f"parallel.cp is {config.parallel.cp} but {self.ranks.world} rank processes run: start "
                f"{config.parallel.cp} (torchrun --nproc-per-node {config.parallel.cp} or --cp {config.parallel.cp})"
            )
        # Ranks with another loss or learning rate would go on together and train something else.
        settings = config.model_dump_json(exclude={"data", "output_dir"}).encode()
        require_equal_digests(hashlib.blake2b(settings, digest_size=16).hexdigest(), "configuration", self.ranks)
        self.dtype = getattr(torch, config.dtype)
        hf_model = load_model(
            config.model.path,
            self.dtype,
            vocab_size=config.model.vocab_size,
            seed=config.model.seed,
            device=self.ranks.device,
        )
        self.conv_width = conv_width(hf_model.config)
        self.shape = model_shape(hf_model.config, self.dtype.itemsize)
        prepare_for_trees(hf_model)
        self.model = TreeCausalLM(hf_model).train()
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            (p for p in self.model.parameters() if p.requires_grad),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.steps_done = 0

    @property
    def vocab_size(self) -> int:
        """Ids in rollouts must be smaller."""
        return self.model.causal_lm.config.get_text_config().vocab_size

    def train_step(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """One forward, backward and optimizer step over all rollouts; returns the step's metrics.

        Raises:
            ValueError: for rollouts that the loss cannot use, a rollout over the pack budget, or ranks that were
                given different rollouts (raised on every rank).
            RuntimeError: when a gradient is not finite; the weights are unchanged.
        """
        started = time.perf_counter()
        check_rollouts(rollouts, self.vocab_size, self.config.packing.max_pack_tokens)
        step = prepare_step(rollouts, self.config.packing, self.config.loss, self.shape)
        require_equal_digests(step.digest(), "step", self.ranks)
        self.optimizer.zero_grad(set_to_none=True)
        meter = StepMeter(step, self.ranks)
        self.accumulate_gradients(step, meter)
        norm = clip_gradients(self.model, self.config.optimizer.max_grad_norm)
        if not math.isfinite(norm):  # the same on every rank, since gradients are summed
            raise RuntimeError(
                f"the gradient norm of step {self.steps_done + 1} is {norm}; the weights are those from before it"
            )
        self.optimizer.step()
        self.steps_done += 1
        return meter.summary(self.steps_done, norm, time.perf_counter() - started)

    def accumulate_gradients(self, step: StepData, meter: StepMeter | None = None) -> None:
        """Forward and backward over the packs of a step; afterwards every rank holds the step's whole gradients."""
        accumulate = accumulation_dtype(self.dtype)
        for pack in step.packs:
            planning = time.perf_counter()
            placed, on_device = self._place(pack)
            plan_seconds = time.perf_counter() - planning
            result = pack_loss(self.model, on_device, step, pack, self.config.loss, accumulate)
            result.loss.backward()
            if meter is not None:
                meter.add(placed, on_device.plan, result, plan_seconds)
        sum_gradients(self.model, self.ranks)

    @torch.no_grad()
    def logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Log-probs of the rollouts' trained tokens under the present weights, for `old_logprobs` or `ref_logprobs`.

        Logits are divided by ``loss.temperature`` and prefixes shared as in `train_step`, so that the ratio of
        unchanged weights is 1. Nothing is trained. Every rank calls it with the same rollouts.

        Returns:
            float64 [L] for each rollout, in nats; NaN where ``loss_mask`` is 0 and at position 0, which no loss reads.
            Equal on every rank.

        Raises:
            ValueError: as `train_step`, except that rewards, advantages and log-probs are not needed.
        """
        check_rollouts(rollouts, self.vocab_size, self.config.packing.max_pack_tokens)
        temperature = self.config.loss.temperature
        step = prepare_step(rollouts, self.config.packing, LossConfig(name="sft"), self.shape)
        require_equal_digests(step.digest(), "batch", self.ranks)
        found = torch.zeros(len(step.flat.token), dtype=torch.float64, device=self.ranks.device)
        for pack in step.packs:
            _, on_device = self._place(pack)
            edge_logprob, _ = self.model(on_device, temperature=temperature)
            index = torch.as_tensor(step.occurrence_index(pack, on_device.plan), device=found.device)
            found[index] = edge_logprob[on_device.occurrence_edge].double()
        if self.ranks.group is not None:  # each occurrence lies on one rank
            dist.all_reduce(found, group=self.ranks.group)
        values = np.where(step.counted, found.cpu().numpy(), np.nan)
        return np.split(values, step.flat.row_start[1:-1])

    def _place(self, pack: Pack) -> tuple[PlacedPack, DevicePack]:
        """Plan a pack, compare the plan between ranks, and put this rank's part on its device."""
        placed = place_pack(pack, self.config.parallel, self.shape)
        plan = plan_rank(placed, self.ranks.rank, self.config.parallel.gdn_exchange, self.conv_width)
        require_equal_digests(plan.digest, "pack plan", self.ranks)
        return placed, device_pack(plan, self.ranks.group, self.ranks.device)

    def save(self, path: str | Path) -> None:
        """Write the weights as a Hugging Face folder that plain `transformers` loads. Every rank calls it."""
        if self.ranks.is_first:
            source = self.config.model.path if Path(self.config.model.path).is_dir() else None
            save_model(self.model.causal_lm, path, source=source)
        if self.ranks.group is not None:
            dist.barrier(group=self.ranks.group)
