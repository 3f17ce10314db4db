"""The training engine: rollouts in, one exact optimizer step out."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from cp_engine.config import Config, LossConfig
from cp_engine.distributed.agree import require_equal_digests
from cp_engine.distributed.choose import distribute, load
from cp_engine.distributed.full_weights import named_full_weights
from cp_engine.distributed.mesh import make_mesh
from cp_engine.distributed.ranks import Ranks, join_ranks
from cp_engine.kernels.shared.on_device import moved
from cp_engine.layers.attention import Heads, kernel_intervals
from cp_engine.lookahead import Lookahead, PlannedPack
from cp_engine.losses.router_balance import RouterBalance
from cp_engine.metrics import StepMeter, metered
from cp_engine.models.liger import use_liger
from cp_engine.models.load import check_given, float32_parameters, prepare_for_trees, save_adapter, save_model
from cp_engine.models.lora import add_lora
from cp_engine.models.recompute import recompute_layers
from cp_engine.models.routers import router_shape
from cp_engine.models.shape import attention_window, conv_width, longest_sequence, model_shape
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.pack import DevicePack
from cp_engine.pack_budget import resolved_memory, resolved_packing
from cp_engine.placement import PlacedPack, place_pack, plan_rank
from cp_engine.rollouts import Rollout, check_rollouts
from cp_engine.routes import check_routes, row_routes
from cp_engine.schedule import learning_rate
from cp_engine.sharding.exchange.rows import accumulation_dtype
from cp_engine.sharding.packing import Pack
from cp_engine.step import StepData, pack_loss, prepare_step

_LOG = logging.getLogger(__name__)


@cache
def _warn_of_idle_groups(packs: int, groups: int) -> None:
    _LOG.warning(
        "a step has %d packs for %d data-parallel groups: %d groups compute nothing. A pack holds whole rollouts: give "
        "a step more of them, or set parallel.dp to a smaller number",
        packs, groups, groups - packs,
    )  # fmt: skip


@cache
def _warn_of_long_rollouts(longest: int) -> None:
    _LOG.warning(
        "there are rollouts of more than the %d tokens that the model's config allows for (max_position_embeddings, or "
        "YaRN's factor), and they are trained with its rotary angles. If the sampler stretched them, give the model's "
        "config.json the same rope_parameters",
        longest,
    )


class Engine:
    """Trains one model on a (dp, cp) mesh of ranks.

    Every rank constructs it with the same config and passes the same rollouts to `train_step`.

    Args:
        causal_lm: the model to train, in the configured dtype, as `cp_engine.models.load.load_model` makes it; None, on
            all ranks, loads ``config.model.path``. Engines that shard it take the first rank's weights; on the other
            ranks it may be on the meta device.
        only_scores: freeze the model, for `logprobs` alone: ranks then hold its weights in the configured dtype and
            neither float32 masters nor gradients nor optimizer states.

    Raises:
        ValueError: when ``parallel.dp x parallel.cp`` is not the number of rank processes, ranks were given different
            settings (raised on every rank), or the model is not supported, has another dtype, or trains nothing.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks | None = None,
        causal_lm: nn.Module | None = None,
        only_scores: bool = False,
    ):
        if not isinstance(config, Config):
            raise ValueError(
                "config must be a cp_engine.Config, got "
                f"{type(config).__name__}: cp_engine.config.read_config reads a YAML file, parse_config a dictionary"
            )
        self.config = config
        self.ranks = ranks or join_ranks(config.parallel.timeout_s)
        # Ranks with another loss or learning rate would go on together and train something else, and those with another
        # mesh would wait for groups that the others do not make, as those without a model would for one to be sent.
        settings = config.model_dump_json(exclude={"data", "metrics", "output_dir"})
        given = repr((causal_lm is None, only_scores))
        for value, what in ((settings, "configuration"), (given, "causal_lm (given or None) or only_scores")):
            digest = hashlib.blake2b(value.encode(), digest_size=16).hexdigest()
            require_equal_digests(digest, what, self.ranks)
        self.mesh = make_mesh(self.ranks, config.parallel.dp, config.parallel.cp, config.parallel.timeout_s)
        if config.memory.offload_activations and self.ranks.device.type != "cuda":
            raise ValueError(
                "memory.offload_activations moves activations from GPUs to host memory, and these ranks run on CPUs: "
                "leave it out"
            )
        self.dtype = getattr(torch, config.dtype)
        if causal_lm is not None:
            check_given(causal_lm, self.dtype)
        hf_model = load(config, self.ranks) if causal_lm is None else causal_lm
        self.conv_width, self.window = conv_width(hf_model.config), attention_window(hf_model.config)
        self.longest = longest_sequence(hf_model.config)
        self.shape = model_shape(hf_model.config, self.dtype.itemsize)
        self.metered = metered(hf_model.config, config, self.shape, self.ranks.device)
        self.routers = router_shape(hf_model)
        if config.loss.router_aux_coef and self.routers is None:
            raise ValueError(
                f"loss.router_aux_coef is {config.loss.router_aux_coef}, but the model {config.model.path!r} has no "
                "expert routers: leave it out"
            )
        prepare_for_trees(hf_model)
        if config.model.liger:
            use_liger(hf_model, self.dtype, self.ranks.device)
        if config.lora is not None:
            add_lora(hf_model, config.lora, config.seed)
        if only_scores:
            hf_model.requires_grad_(False)
        elif not any(parameter.requires_grad for parameter in hf_model.parameters()):
            raise ValueError(
                "no parameter of causal_lm has requires_grad, so there is nothing to train: set it, add a lora "
                "section, or give only_scores=True"
            )
        self.only_scores = only_scores
        recompute_layers(hf_model, resolved_memory(config, hf_model, self.ranks))
        self.packing = resolved_packing(config, hf_model, self.ranks)
        whole = float32_parameters(hf_model, self.dtype)
        self.model = TreeCausalLM(hf_model).train()
        self.distributed = distribute(self.model, whole, config, self.ranks)
        self.lookahead = Lookahead(self._prepare, self._plan, self.mesh)
        self.steps_done = 0

    @property
    def vocab_size(self) -> int:
        """Ids in rollouts must be smaller."""
        return self.model.causal_lm.config.get_text_config().vocab_size

    def train_step(self, rollouts: Sequence[Rollout], upcoming: Sequence[Rollout] | None = None) -> dict[str, Any]:
        """One forward, backward and optimizer step over all rollouts; returns the step's metrics.

        A step whose rollouts are all overlong (``loss.overlong_tokens``) runs forward only, for its metrics: weights
        and optimizer states stay as they are, and it is reported as ``skipped``.

        Args:
            upcoming: the rollouts of the step after this one, where they are known already: its first plan is then
                made while this step runs. Pass the same object to the next call.

        Raises:
            ValueError: for rollouts that the loss cannot use, a rollout over the pack budget, ranks that were given
                different rollouts (raised on every rank), or an engine that only scores.
            RuntimeError: when a gradient is not finite, unless ``optimizer.on_nonfinite`` is ``skip``, which reports
                it as ``skipped``. The weights are unchanged in both cases.
        """
        if self.only_scores:
            raise ValueError("this engine was made with only_scores, so its weights are frozen: make another to train")
        started = time.perf_counter()
        step = self.lookahead.step(rollouts)
        self._require_equal(step, "step")
        self.distributed.zero_grad()
        meter = StepMeter(step, self.mesh, self.metered)
        self.accumulate_gradients(step, meter, upcoming)
        optimizer = self.config.optimizer
        lr = learning_rate(self.steps_done, optimizer, self.config.steps)
        # The gradient would be zero, but weight decay and AdamW's moments would move the weights all the same.
        norm = self.distributed.update(lr, optimizer.max_grad_norm) if step.trains else 0.0
        finite = math.isfinite(norm)
        if not finite and optimizer.on_nonfinite == "raise":
            raise RuntimeError(
                f"the gradient norm of step {self.steps_done + 1} is {norm}; the weights are those from before it. "
                "Lower optimizer.lr, or set optimizer.on_nonfinite: skip to go on without such steps"
            )
        self.steps_done += 1
        return meter.summary(self.steps_done, norm, lr, not (finite and step.trains), started)

    def accumulate_gradients(
        self, step: StepData, meter: StepMeter | None = None, upcoming: Sequence[Rollout] | None = None
    ) -> None:
        """Forward and backward over the packs of a step.

        Afterwards the ranks hold the step's whole gradients: each one all of them with ``engine.name: plain``; none
        where no occurrence of the step weighs anything, which runs forward only.
        """
        accumulate, loss = accumulation_dtype(self.dtype), self.config.loss
        packs, balance = self._packs(step), None
        if loss.router_aux_coef:
            packs = list(packs)
            balance = self._router_balance(step, [on_device for _, on_device, _ in packs])
        for planned, on_device, last in packs:
            with nullcontext() if step.trains else torch.no_grad():
                result = pack_loss(self.distributed, on_device, step, planned.pack, loss, accumulate, balance)
            if last and upcoming is not None:
                # Not before: the device has nothing to do yet, and a planning thread keeps the forward from it.
                self.lookahead.begin(upcoming)
            if step.trains:
                self.distributed.backward(result.loss, last)
            if meter is not None:
                meter.add(planned.placed, on_device.plan, result, planned.seconds, planned.waited)
        if not step.trains:
            self.distributed.after_forward()

    @torch.no_grad()
    def _router_balance(self, step: StepData, packs: list[DevicePack]) -> RouterBalance:
        """The load-balancing loss of a step, knowing the choices of all packs but the first.

        Gradients of one pack depend on how often each expert is chosen in all packs, so the routers of the others run
        ahead; those of the first one tell when it is trained.
        """
        coefficient = self.config.loss.router_aux_coef
        balance = RouterBalance(coefficient, self.routers, step.flat_tokens, self.ranks.group)
        for pack in packs[1:]:
            balance.count(self.distributed(pack, outputs="routers"), pack)
        self.distributed.after_forward()
        return balance

    def _require_equal(self, step: StepData, what: str) -> None:
        if self.ranks.group is not None:
            require_equal_digests(step.digest, what, self.ranks)

    def _packs(self, step: StepData) -> Iterator[tuple[PlannedPack, DevicePack, bool]]:
        """This DP group's packs of a step on the device, and whether each is the last."""
        rounds = -(-max(1, len(step.packs)) // self.mesh.dp)
        for index, planned in enumerate(self.lookahead.planned(step)):
            require_equal_digests(planned.on_host.plan.digest, "pack plan", self.ranks, self.mesh.cp)
            yield planned, planned.on_host.on_device(), index + 1 == rounds

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
        temperature = self.config.loss.temperature
        step = self._prepare(rollouts, LossConfig(name="sft"))
        self._require_equal(step, "batch")
        found = torch.zeros(len(step.flat.token), dtype=torch.float64, device=self.ranks.device)
        for planned, on_device, _ in self._packs(step):
            edge_logprob, _ = self.distributed(on_device, temperature=temperature)
            index = moved(torch.as_tensor(step.occurrence_index(planned.pack, on_device.plan)), found.device)
            found[index] = edge_logprob[on_device.occurrence_edge].double()
        self.distributed.after_forward()
        if self.ranks.group is not None:  # each occurrence lies on one rank
            dist.all_reduce(found, group=self.ranks.group)
        values = np.where(step.counted, found.cpu().numpy(), np.nan)
        return np.split(values, step.flat.row_start[1:-1])

    def _prepare(self, rollouts: Sequence[Rollout], loss: LossConfig | None = None) -> StepData:
        check_rollouts(rollouts, self.vocab_size, self.packing.max_pack_tokens)
        check_routes(rollouts, self.routers)
        loss = loss or self.config.loss
        if loss.router_aux_coef and any(r.routes is not None for r in rollouts):
            raise ValueError(
                f"loss.router_aux_coef is {loss.router_aux_coef}, but the rollouts carry routes: balancing counts the "
                "router's own choices, which they replace; set it to 0"
            )
        step = prepare_step(rollouts, self.packing, loss, self.shape, self.mesh.dp)
        if self.ranks.group is not None:
            _ = step.digest  # here, where the planning thread may be
        if self.ranks.is_first:
            if len(step.packs) < self.mesh.dp:
                _warn_of_idle_groups(len(step.packs), self.mesh.dp)
            if self.longest is not None and max(rollout.length for rollout in rollouts) > self.longest:
                _warn_of_long_rollouts(self.longest)
        return step

    def _plan(self, step: StepData, pack: Pack) -> tuple[PlacedPack, DevicePack]:
        """Where a pack's tokens lie, and this rank's tables on the host."""
        placed = place_pack(pack, self.config.parallel, self.shape, self.mesh.hosts)
        context, parallel = self.mesh.context, self.config.parallel
        plan = plan_rank(placed, context.rank, parallel.gdn_exchange, self.conv_width, self.window)
        heads = Heads(self.shape.query_heads, self.shape.kv_heads, self.shape.head_dim, self.dtype)
        intervals = tuple(
            None if attention is None else kernel_intervals(attention, self.ranks.device, heads)
            for attention in (plan.attention, plan.window_attention)
        )
        routes = [
            None if layout is None else row_routes(step.flat, placed.pack, layout.rank_tokens(context.rank))
            for layout in (placed.layout, placed.gdn_layout)
        ]
        return placed, DevicePack(
            plan, context.group, self.ranks.device, *routes, intervals=intervals, transport=parallel.transport
        )

    def named_full_weights(self, adapter: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream whole weights, one tensor at a time, for a sampler or an export; every rank iterates to the end.

        Args:
            adapter: only the LoRA adapters, under the names of a `peft` adapter file; else adapters are merged in.
        """
        return named_full_weights(self.distributed, adapter)

    def save(self, path: str | Path, adapter: bool = False) -> None:
        """Write the weights as a Hugging Face folder that plain `transformers` loads. Every rank calls it.

        The first rank collects the whole model in host memory.

        Args:
            adapter: write a folder that `peft` loads, with the LoRA adapters alone.

        Raises:
            ValueError: for an adapter where the configuration has no ``lora``.
        """
        if adapter and self.config.lora is None:
            raise ValueError("there is no adapter to save: the configuration has no lora section")
        tensors = {}
        for name, tensor in self.named_full_weights(adapter):
            if self.ranks.is_first:
                tensors[name] = tensor.cpu().clone() if tensor.device.type == "cpu" else tensor.cpu()
        if self.ranks.is_first:
            if adapter:
                save_adapter(tensors, self.model.causal_lm, self.config, path)
            else:
                source = self.config.model.path if Path(self.config.model.path).is_dir() else None
                save_model(self.model.causal_lm, path, source=source, tensors=tensors)
        if self.ranks.group is not None:
            dist.barrier(group=self.ranks.group)
