"""Seeded values for verifying a loss: advantages and log-probs that exercise every branch of the clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_engine.rollouts import Rollout

_ACTIVE_SHARE = 0.56  # occurrences that are clipped by construction; chance adds some of the others
_KINK_MARGIN = 0.01  # log-ratios stay this far from the clip boundary, where rounding would decide the branch


@dataclass(frozen=True, eq=False)
class DrawnValues:
    """Per flat token [N]: the advantage, and log-probs relative to the model's own."""

    advantage: np.ndarray
    old_offset: np.ndarray  # log p_old - log p
    ref_offset: np.ndarray
    sampler_offset: np.ndarray


def draw_values(tokens: int, clip_low: float, clip_high: float, seed: int) -> DrawnValues:
    """Draw advantages of both signs and offsets such that 20 to 60 % of occurrences are clipped on each side of
    ``[1 - clip_low, 1 + clip_high]``."""
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1.0, 1.0], tokens)
    high, low = np.log1p(clip_high), np.log1p(-clip_low)
    beyond = rng.uniform(2 * _KINK_MARGIN, 0.5, tokens)
    clipped = np.where(sign > 0, high + beyond, low - beyond)
    free = rng.uniform(2.5 * low, 2.5 * high, tokens)
    for boundary in (low, high):
        near = np.abs(free - boundary) < _KINK_MARGIN
        free[near] = boundary + np.copysign(_KINK_MARGIN, free[near] - boundary)
    log_ratio = np.where(rng.random(tokens) < _ACTIVE_SHARE, clipped, free)
    old_offset = -log_ratio
    return DrawnValues(
        advantage=sign * rng.uniform(0.5, 1.5, tokens),
        old_offset=old_offset,
        ref_offset=rng.normal(0.0, 0.3, tokens),
        sampler_offset=old_offset - rng.uniform(-0.5, 1.0, tokens),
    )


def paired(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """Rollouts for a loss over pairs: neighbours become groups of two, the preferred one drawn.

    Rollouts without trained tokens are left out, and the last one if their number is odd.
    """
    trained = [r for r in rollouts if r.loss_mask[1:].any()]
    first = np.random.default_rng(seed).integers(0, 2, len(trained) // 2)
    return [
        replace(rollout, group=str(pair), rollout=str(member), reward=float(member == first[pair]))
        for pair in range(len(trained) // 2)
        for member, rollout in enumerate(trained[2 * pair : 2 * pair + 2])
    ]


def with_placeholders(rollout: Rollout) -> Rollout:
    """A rollout that every loss takes, until values are drawn around the model's own log-probs."""
    zeros = np.zeros(rollout.length)
    return replace(rollout, advantage=0.0, old_logprobs=None, ref_logprobs=zeros, sampler_logprobs=zeros)
