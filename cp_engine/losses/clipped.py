"""The policy gradient clipped by the ratio: ppo, grpo, dr_grpo, dapo, and gspo with a rollout's ratio.

Shapes: O occurrences.
"""

from __future__ import annotations

import math

import torch

from cp_engine.losses.occurrences import OccurrenceLoss


def log_ratio_to_old(log_prob: torch.Tensor, old_logprob: torch.Tensor) -> torch.Tensor:
    """``log p - log p_old`` [O]. Where ``old_logprob`` is NaN the step is on-policy: old is log p itself, detached."""
    return log_prob - old_or_own(log_prob, old_logprob)


def old_or_own(log_prob: torch.Tensor, old_logprob: torch.Tensor) -> torch.Tensor:
    own = log_prob.detach()
    return torch.where(old_logprob.isnan(), own, old_logprob)


def clipped_loss(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> OccurrenceLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(log_ratio)``.

    Schulman et al. 2017 ("PPO", eq. 7), Shao et al. 2024 ("DeepSeekMath", GRPO, eq. 3) and Liu et al. 2025
    ("Understanding R1-Zero-like training", Dr. GRPO) with clip_low = clip_high; Yu et al. 2025 ("DAPO", eq. 8) with
    clip_high above clip_low ("clip-higher"). They differ in advantages and aggregation. With ``dual_clip`` c (Ye et al.
    2020, "Mastering complex control in MOBA games", dual-clip PPO) the objective where A < 0 is at least ``c A``.

    Args:
        log_ratio: [O], differentiable.
        advantage: [O].
    """
    # The minimum clips r from above where A >= 0 and from below where A < 0; the dual clip, from above where A < 0.
    # Clipping the logarithm keeps a ratio that overflows (samplers report -9999 for impossible tokens) from making
    # 0 * inf of a clipped loss or gradient.
    negative = advantage < 0
    detached = log_ratio.detach()
    highest = torch.full_like(detached, math.log1p(clip_high)).masked_fill_(negative, math.log(dual_clip))
    lowest = torch.full_like(detached, math.log1p(-clip_low)).masked_fill_(~negative, -math.inf)
    loss = -log_ratio.clamp(lowest, highest).exp() * advantage
    above, below = (detached > highest) & (advantage != 0), (detached < lowest) & negative
    return OccurrenceLoss(loss, above, below)
