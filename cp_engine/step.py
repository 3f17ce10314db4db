"""From the rollouts of one optimizer step to the loss of each pack.

`prepare_step` is numpy and equal on every rank; `pack_loss` runs one pack through the model.

Shapes: R rollouts of the step, N flat tokens, O occurrences of this rank in a pack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cp_engine.config import LossConfig, PackingConfig
from cp_engine.kernels.shared.on_device import moved
from cp_engine.losses.advantages import centred_rewards, normalised_rewards
from cp_engine.losses.choose import occurrence_loss
from cp_engine.losses.occurrences import OccurrenceLoss, Occurrences
from cp_engine.losses.pairs import pair_preferences
from cp_engine.losses.rollout_sums import rollout_sum_over
from cp_engine.losses.router_balance import RouterBalance
from cp_engine.losses.weights import rollout_weights
from cp_engine.pack import DevicePack
from cp_engine.rollouts import FlatRollouts, Rollout, flatten_rollouts
from cp_engine.sharding.cost import ModelShape
from cp_engine.sharding.packing import Pack, pack_rollouts
from cp_engine.sharding.plan import ShardPlan
from cp_engine.sharding.replay import run_prices


@dataclass(frozen=True, eq=False)
class StepData:
    """One optimizer step on the host; every rank holds the same."""

    flat: FlatRollouts
    packs: list[Pack]
    counted: np.ndarray  # bool [N] trained tokens that have a predictor
    trained: np.ndarray  # int64 [R] occurrences of each rollout
    weight: np.ndarray  # float64 [R] weight of each occurrence of a rollout
    preference: np.ndarray  # float64 [R] dpo: 1 for the chosen rollout of a group, -1 for the rejected; else NaN
    advantage: np.ndarray  # float64 [N]; this and the next three are NaN where not given
    old_logprob: np.ndarray
    ref_logprob: np.ndarray
    sampler_logprob: np.ndarray

    @property
    def trains(self) -> bool:
        """Whether an occurrence weighs anything; not where all rollouts are overlong (``loss.overlong_tokens``)."""
        return bool(self.weight.any())

    @property
    def tree_tokens(self) -> int:
        return sum(pack.forest.tokens for pack in self.packs)

    @property
    def flat_tokens(self) -> int:
        return len(self.flat.token)

    def occurrence_index(self, pack: Pack, plan: ShardPlan) -> np.ndarray:
        """int64 [O]: the flat token of each occurrence of this rank in the pack."""
        rollout = pack.rollouts[plan.loss.occurrence_rollout]
        return self.flat.row_start[rollout] + plan.loss.occurrence_position

    @cached_property
    def digest(self) -> str:
        """Hash of everything that the ranks must agree on; 16 ms for 330,000 flat tokens."""
        digest = hashlib.blake2b(digest_size=16)
        arrays = (self.flat.token, self.flat.row_start, self.flat.loss_mask, self.weight, self.preference)
        for array in (*arrays, self.advantage, self.old_logprob, self.ref_logprob, self.sampler_logprob):
            digest.update(str(len(array)).encode() + np.ascontiguousarray(array).tobytes())
        if self.flat.routes is not None:
            digest.update(np.ascontiguousarray(self.flat.routes).tobytes())
        for pack in self.packs:
            digest.update(np.ascontiguousarray(pack.rollouts).tobytes())
        return digest.hexdigest()


def prepare_step(
    rollouts: Sequence[Rollout], packing: PackingConfig, loss: LossConfig, shape: ModelShape | None = None, dp: int = 1
) -> StepData:
    """Flatten, weigh and pack the rollouts of a step.

    Args:
        shape: of the model, for the prices of ``packing.share_or_replay`` and of packs for several groups.
        dp: data-parallel groups that the packs are dealt to.

    Raises:
        ValueError: for rollouts that the loss cannot use (no reward and no advantage, missing log-probs), a step
            without trained tokens, or a rollout over the pack budget.
    """
    check_usable(rollouts, loss)
    flat = flatten_rollouts(rollouts)
    length = np.diff(flat.row_start)
    counted = flat.loss_mask.copy()
    counted[flat.row_start[:-1]] = False  # a first token has no predictor
    trained = np.add.reduceat(counted.astype(np.int64), flat.row_start[:-1])
    if not trained.any():
        raise ValueError("no rollout of the step has a trained token (loss_mask 1 beyond its first token)")
    weighed = trained if loss.overlong_tokens is None else np.where(length >= loss.overlong_tokens, 0, trained)
    paired = loss.name == "dpo"
    preference = pair_preferences(rollouts, trained) if paired else np.full(len(length), np.nan)
    packs = pack_rollouts(
        flat.token,
        flat.row_start,
        flat.group,
        flat.loss_mask,
        share=packing.share,
        share_key=flat.share_key,
        max_pack_tokens=packing.max_pack_tokens,
        coupled=flat.group if paired else None,
        run_prices=run_prices(shape) if packing.share_or_replay else None,
        dp=dp,
        dp_prices=run_prices(shape) if dp > 1 else None,
    )
    return StepData(
        flat=flat,
        packs=packs,
        counted=counted,
        trained=trained,
        weight=rollout_weights(weighed, loss.aggregation, loss.sum_norm),
        preference=preference,
        advantage=np.full(len(flat.token), np.nan)
        if loss.name in ("sft", "dpo")
        else _advantages(rollouts, flat, loss),
        old_logprob=_per_token([r.old_logprobs for r in rollouts], length),
        ref_logprob=_per_token([r.ref_logprobs for r in rollouts], length),
        sampler_logprob=_per_token([r.sampler_logprobs for r in rollouts], length),
    )


def check_usable(rollouts: Sequence[Rollout], loss: LossConfig) -> None:
    """Refuse rollouts that the loss cannot use: of a step, or of all steps before the first one.

    Raises:
        ValueError: naming the first rollout, or pair, that lacks what the loss needs.
    """
    if loss.name == "dpo":
        pair_preferences(rollouts, np.array([int(r.loss_mask[1:].sum()) for r in rollouts]))
    elif loss.name != "sft":
        _require_rewards(rollouts, loss)
    _require_logprobs(rollouts, loss)


def _per_token(values: list[np.ndarray | None], length: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(n, np.nan) if v is None else v for v, n in zip(values, length, strict=True)])


def _advantages(rollouts: Sequence[Rollout], flat: FlatRollouts, loss: LossConfig) -> np.ndarray:
    """The given advantages; where a rollout has none, its reward against its group's."""
    # Rollouts that bring their own advantage may lack a reward; they stay out of their group's statistics.
    rewarded = np.array([r.advantage is None for r in rollouts])
    relative = np.zeros(len(rollouts))
    if rewarded.any():
        reward = np.array([r.reward for r in rollouts if r.advantage is None], np.float64)
        against_group = centred_rewards if loss.name == "dr_grpo" else normalised_rewards
        relative[rewarded] = against_group(reward, flat.group[rewarded])
    given = [relative[i] if r.advantage is None else r.advantage for i, r in enumerate(rollouts)]
    return np.concatenate([np.broadcast_to(np.float64(a), r.length) for a, r in zip(given, rollouts, strict=True)])


def _require_rewards(rollouts: Sequence[Rollout], loss: LossConfig) -> None:
    lacking = [r for r in rollouts if r.advantage is None and r.reward is None]
    if lacking:
        raise ValueError(
            f"{loss.name} needs a reward or an advantage for every rollout; {len(lacking)} have neither, the first is "
            f"rollout {lacking[0].rollout!r} of group {lacking[0].group!r}"
        )


def _require_logprobs(rollouts: Sequence[Rollout], loss: LossConfig) -> None:
    needs = []
    if loss.kl_coef:
        needs.append(("ref_logprobs", "loss.kl_coef is set"))
    if loss.name == "dpo":
        needs.append(("ref_logprobs", "loss.name is dpo"))
    if loss.sampler_cap is not None:
        needs.append(("sampler_logprobs", "loss.sampler_cap is set"))
    for field, reason in needs:
        for rollout in rollouts:
            values, trained = getattr(rollout, field), rollout.loss_mask[1:]
            missing = np.flatnonzero(trained if values is None else trained & np.isnan(values[1:]))
            if len(missing):
                command = "`python -m cp_engine logprobs --field ref_logprobs` adds them to a file"
                raise ValueError(
                    f"{reason}, so every trained token needs {field}; rollout {rollout.rollout!r} of group "
                    f"{rollout.group!r} has none at position {missing[0] + 1}"
                    + (f"; {command}" if field == "ref_logprobs" else "")
                )


@dataclass(frozen=True)
class PackLoss:
    """A pack's part of the step's loss on this rank: the sum over packs and ranks is the loss of the step."""

    loss: torch.Tensor  # scalar, differentiable
    log_prob: torch.Tensor  # [O] log-prob of each occurrence, detached
    entropy: torch.Tensor  # [O] entropy of the distribution that predicts it, detached
    occurrence: OccurrenceLoss
    terms: dict[str, torch.Tensor]  # scalars that add up to the loss, detached: `policy_loss` and what is added to it


def pack_loss(
    model,
    device_pack: DevicePack,
    step: StepData,
    pack: Pack,
    loss: LossConfig,
    dtype: torch.dtype,
    balance: RouterBalance | None = None,
) -> PackLoss:
    """Run one pack through the model and sum its weighted occurrence losses.

    A rank without trained predictors adds exactly zero, with the same graph as the others.

    Args:
        balance: the step's load-balancing loss of routers, which is added.
    """
    outputs = {} if balance is None else {"outputs": "edges and routers"}
    given = _given_values(device_pack, step, pack, dtype)
    weight = _on(device_pack, step.weight[pack.rollouts], dtype)
    edge_logprob, edge_entropy, *router_logits = model(device_pack, temperature=loss.temperature, **outputs)
    # index_select, since its gradient adds an edge's occurrences in a fixed order on CPUs.
    log_prob = edge_logprob.index_select(0, device_pack.occurrence_edge)
    entropy = edge_entropy.index_select(0, device_pack.occurrence_edge)
    occurrences = Occurrences(log_prob=log_prob, entropy=entropy, **given)
    result = occurrence_loss(occurrences, loss, rollout_sum_over(device_pack.group))
    weight = weight[device_pack.occurrence_rollout]
    total = (weight * result.loss).sum()
    terms = {name: (weight * term).sum() for name, term in result.terms.items()}
    if balance is not None:
        router_loss = balance.loss(tuple(router_logits), device_pack, dtype)
        total, terms["router_loss"] = total + router_loss, router_loss.detach()
    return PackLoss(total, log_prob.detach(), entropy.detach(), result, terms)


def _given_values(device_pack: DevicePack, step: StepData, pack: Pack, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What `Occurrences` holds of the rollouts, on the pack's device."""
    index = step.occurrence_index(pack, device_pack.plan)
    # A pack has whole pairs; other losses get zeros.
    pair = np.zeros(len(pack.rollouts), np.int64)
    if not np.isnan(step.preference).any():
        pair = np.unique(step.flat.group[pack.rollouts], return_inverse=True)[1]
    values = {
        "advantage": step.advantage[index],
        "old_logprob": step.old_logprob[index],
        "ref_logprob": step.ref_logprob[index],
        "sampler_logprob": step.sampler_logprob[index],
        "trained": step.trained[pack.rollouts],
        "preference": step.preference[pack.rollouts],
    }
    given = {name: _on(device_pack, value, dtype) for name, value in values.items()}
    return given | {"rollout": device_pack.occurrence_rollout, "pair": _on(device_pack, pair, torch.int64)}


def _on(device_pack: DevicePack, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return moved(torch.as_tensor(values, dtype=dtype), device_pack.device)
