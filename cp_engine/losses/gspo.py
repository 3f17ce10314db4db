"""GSPO: one ratio for a whole rollout.

Shapes: O occurrences of this rank, r rollouts of the pack.
"""

from __future__ import annotations

import torch

from cp_engine.losses.clipped import clipped_loss, log_ratio_to_old
from cp_engine.losses.occurrences import OccurrenceLoss
from cp_engine.losses.rollout_sums import RolloutSum


def gspo_loss(
    log_prob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    rollout: torch.Tensor,
    trained: torch.Tensor,
    rollout_sum: RolloutSum,
    *,
    clip_low: float,
    clip_high: float,
) -> OccurrenceLoss:
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` with the ratio of the occurrence's rollout,
    ``s = exp(mean over its trained tokens of (log p - log p_old))``.

    Zheng et al. 2025 ("Group sequence policy optimization", eq. 5 to 7). Averaged by seq-mean-token-mean it is their
    objective; s is differentiable, so each occurrence's gradient reaches all tokens of its rollout.

    Args:
        rollout: int64 [O].
        trained: [r] trained tokens of each rollout; where it is 0 no occurrence reads the ratio.
        rollout_sum: sums [O] to [r] over all ranks.
    """
    total = rollout_sum(log_ratio_to_old(log_prob, old_logprob), rollout, len(trained))
    log_ratio = total / trained.clamp(min=1)
    return clipped_loss(log_ratio[rollout], advantage, clip_low=clip_low, clip_high=clip_high)
