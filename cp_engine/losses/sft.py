"""Supervised fine-tuning."""

from __future__ import annotations

import torch

from cp_engine.losses.occurrences import OccurrenceLoss, unclipped


def sft_loss(log_prob: torch.Tensor) -> OccurrenceLoss:
    """Negative log-likelihood of each occurrence: ``-log p``."""
    return unclipped(-log_prob)
