"""CISPO: clipped importance weights instead of clipped updates.

Shapes: O occurrences.
"""

from __future__ import annotations

import math

import torch

from cp_engine.losses.clipped import log_ratio_to_old
from cp_engine.losses.occurrences import OccurrenceLoss


def cispo_loss(
    log_prob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, *, clip_high: float
) -> OccurrenceLoss:
    """``-sg(min(r, 1 + clip_high)) A log p`` with ``r = exp(log p - log p_old)``; sg takes no gradient.

    Chen et al. 2025 ("MiniMax-M1", eq. 4 and 5), without a lower bound, as they train. A clipped occurrence keeps its
    gradient, at most ``(1 + clip_high) |A|``.
    """
    log_ratio = log_ratio_to_old(log_prob, old_logprob).detach()
    highest = math.log1p(clip_high)
    # The logarithm is clipped, so a ratio that overflows is harmless.
    loss = -log_ratio.clamp(max=highest).exp() * advantage * log_prob
    return OccurrenceLoss(loss, log_ratio > highest, torch.zeros_like(log_ratio, dtype=torch.bool))
