"""Truncated importance weights, for samplers whose log-probs differ from the trainer's.

Shapes: O occurrences.
"""

from __future__ import annotations

import torch

from cp_engine.losses.clipped import old_or_own


def sampler_weight(
    log_prob: torch.Tensor, old_logprob: torch.Tensor, sampler_logprob: torch.Tensor, cap: float
) -> torch.Tensor:
    """``min(exp(log p_old - log p_sampler), cap)`` [O], without gradient; it multiplies the policy loss.

    Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL training"). Where ``old_logprob`` is
    NaN old is log p itself.
    """
    return (old_or_own(log_prob, old_logprob) - sampler_logprob).exp().clamp(max=cap)
