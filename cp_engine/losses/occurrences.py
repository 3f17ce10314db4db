"""What losses are functions of, and what they return.

An occurrence is one (rollout, position) that is trained. A tree token shared by several rollouts has one log-prob and
several occurrences, each with its own advantage and old log-prob; so clipping happens per occurrence, as it does on
flat rows. Shapes: O occurrences of this rank, r rollouts of the pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class Occurrences:
    """The occurrences of a pack on one rank; float tensors in the accumulation dtype, NaN where not given."""

    log_prob: torch.Tensor  # [O], differentiable
    entropy: torch.Tensor  # [O] of the distribution that predicts it, differentiable
    advantage: torch.Tensor  # [O]
    old_logprob: torch.Tensor  # [O]; NaN: this step is on-policy there
    ref_logprob: torch.Tensor  # [O]
    sampler_logprob: torch.Tensor  # [O]
    rollout: torch.Tensor  # int64 [O] rollout of the pack
    trained: torch.Tensor  # [r] occurrences of each rollout, over all ranks
    preference: torch.Tensor  # [r] dpo: 1 for the chosen rollout of a pair, -1 for the rejected, else NaN
    pair: torch.Tensor  # int64 [r] dpo: pair of the pack, from 0; else zeros


@dataclass(frozen=True)
class OccurrenceLoss:
    """Loss [O] of each occurrence, and which were clipped above and below (bool [O]).

    ``terms`` add up to the loss; ``watched`` is what is measured and not trained. Both are [O] and detached; the
    functions of single losses leave them empty.
    """

    loss: torch.Tensor
    clipped_high: torch.Tensor
    clipped_low: torch.Tensor
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    watched: Mapping[str, torch.Tensor] = field(default_factory=dict)


def unclipped(loss: torch.Tensor) -> OccurrenceLoss:
    """The loss of a function that clips nothing."""
    none = torch.zeros_like(loss, dtype=torch.bool)
    return OccurrenceLoss(loss, none, none)
