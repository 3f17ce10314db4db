"""Host-side numbers of a step's loss: aggregation weights and group-normalised advantages.

Both are computed from the whole step's rollouts, which every rank holds, so denominators are global and need no
collective. Shapes: R rollouts, N flat tokens.
"""

from __future__ import annotations

import numpy as np

AGGREGATIONS = ("token-mean", "seq-mean-token-mean")
ADVANTAGE_EPSILON = 1e-6


def rollout_weights(trained: np.ndarray, aggregation: str) -> np.ndarray:
    """Weight of each occurrence of a rollout, such that the loss is the weighted sum over occurrences.

    ``token-mean``: 1 / (trained occurrences of the step). ``seq-mean-token-mean``: 1 / (rollouts with trained tokens ×
    the rollout's own trained tokens).

    Args:
        trained: int [R] trained occurrences of each rollout.

    Returns:
        float64 [R]; 0 for a rollout without trained tokens.

    Raises:
        ValueError: for an unknown aggregation, or a step without a single trained token.
    """
    trained = np.asarray(trained, np.int64)
    total = int(trained.sum())
    if total == 0:
        raise ValueError("no rollout of the step has a trained token (loss_mask 1 beyond its first token)")
    has = trained > 0
    if aggregation == "token-mean":
        return np.where(has, 1.0 / total, 0.0)
    if aggregation == "seq-mean-token-mean":
        return np.where(has, 1.0 / (int(has.sum()) * np.maximum(trained, 1)), 0.0)
    raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")


def group_advantages(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Group-normalised advantage of each rollout (GRPO, Shao et al. 2024, section 4.1.2).

    ``A_i = (r_i - mean(r)) / (std(r) + 1e-6)`` over the rollouts of the group in the step, with the sample standard
    deviation (divisor n - 1). A group of one rollout, or of equal rewards, has advantage 0.

    Args:
        reward: float [R].
        group: int [R] group numbers from 0.
    """
    reward, group = np.asarray(reward, np.float64), np.asarray(group, np.int64)
    count = np.bincount(group)
    mean = np.bincount(group, reward) / np.maximum(count, 1)
    centred = reward - mean[group]
    std = np.sqrt(np.bincount(group, centred**2) / np.maximum(count - 1, 1))
    return centred / (std[group] + ADVANTAGE_EPSILON)
