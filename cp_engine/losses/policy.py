"""The loss of one occurrence, for every loss by name.

An occurrence is one (rollout, position) that is trained. A tree token shared by several rollouts has one log-prob and
several occurrences, each with its own advantage and old log-prob; so clipping happens per occurrence, as it does on
flat rows. Shapes: O occurrences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOSSES = ("sft", "grpo")


@dataclass(frozen=True)
class OccurrenceValues:
    """What the rollouts say about each occurrence; tensors [O] in the accumulation dtype, NaN where not given."""

    advantage: torch.Tensor
    old_logprob: torch.Tensor
    ref_logprob: torch.Tensor
    sampler_logprob: torch.Tensor


@dataclass(frozen=True)
class OccurrenceLoss:
    """Loss [O] of each occurrence, and which were clipped above and below (bool [O]; all False for sft)."""

    loss: torch.Tensor
    clipped_high: torch.Tensor
    clipped_low: torch.Tensor


def sft_loss(log_prob: torch.Tensor) -> OccurrenceLoss:
    """Negative log-likelihood: ``-log p``."""
    none = torch.zeros_like(log_prob, dtype=torch.bool)
    return OccurrenceLoss(-log_prob, none, none)


def grpo_loss(
    log_prob: torch.Tensor,
    values: OccurrenceValues,
    *,
    clip: float,
    kl_coef: float = 0.0,
    sampler_cap: float | None = None,
) -> OccurrenceLoss:
    """Clipped policy gradient of GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3), for one occurrence:

    ``-min(r A, clip(r, 1 - clip, 1 + clip) A) + kl_coef * (exp(d) - d - 1)`` with ``r = exp(log p - log p_old)`` and
    ``d = log p_ref - log p`` (the k3 estimator). Where ``old_logprob`` is NaN the step is on-policy: old is log p
    itself, r is 1. With ``sampler_cap`` the policy term is multiplied by ``min(exp(log p_old - log p_sampler), cap)``,
    which corrects for a sampler whose log-probs differ from the trainer's (truncated importance sampling).

    An occurrence that lacks a reference or sampler log-prob that is asked for gets NaN: `prepare_step` refuses it.
    """
    detached = log_prob.detach()
    old = torch.where(values.old_logprob.isnan(), detached, values.old_logprob)
    log_ratio = log_prob - old
    advantage = values.advantage
    # The minimum clips r from above where A >= 0 and from below where A < 0. Clipping the logarithm keeps a ratio that
    # overflows (samplers report -9999 for impossible tokens) from making 0 * inf of a clipped loss or gradient.
    negative = advantage < 0
    highest = torch.full_like(detached, math.log1p(clip)).masked_fill_(negative, math.inf)
    lowest = torch.full_like(detached, math.log1p(-clip)).masked_fill_(~negative, -math.inf)
    surrogate = log_ratio.clamp(lowest, highest).exp() * advantage
    if sampler_cap is not None:
        surrogate = surrogate * (old - values.sampler_logprob).exp().clamp(max=sampler_cap)
    loss = -surrogate
    if kl_coef:
        difference = values.ref_logprob - log_prob
        loss = loss + kl_coef * (difference.exp() - difference - 1)
    with torch.no_grad():
        high, low = (log_ratio > highest) & (advantage > 0), (log_ratio < lowest) & (advantage < 0)
    return OccurrenceLoss(loss, high, low)
