"""Advantages from rewards, on the host: every rank holds the rewards of the whole step.

Shapes: R rollouts.
"""

from __future__ import annotations

import numpy as np

ADVANTAGE_EPSILON = 1e-6


def centred_rewards(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """``A_i = r_i - mean(r)`` over the rollouts of the group in the step (Dr. GRPO, Liu et al. 2025): float64 [R].

    Args:
        reward: float [R].
        group: int [R] group numbers from 0.
    """
    reward, group = np.asarray(reward, np.float64), np.asarray(group, np.int64)
    mean = np.bincount(group, reward) / np.maximum(np.bincount(group), 1)
    return reward - mean[group]


def normalised_rewards(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """``A_i = (r_i - mean(r)) / (std(r) + 1e-6)`` over the rollouts of the group in the step, with the sample standard
    deviation (divisor n - 1): GRPO, Shao et al. 2024, section 4.1.2.

    A group of one rollout, or of equal rewards, has advantage 0. Arguments and result as `centred_rewards`.
    """
    group = np.asarray(group, np.int64)
    centred = centred_rewards(reward, group)
    std = np.sqrt(np.bincount(group, centred**2) / np.maximum(np.bincount(group) - 1, 1))
    return centred / (std[group] + ADVANTAGE_EPSILON)
