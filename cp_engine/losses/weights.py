"""Aggregation: the weight of each occurrence, such that the loss of a step is the weighted sum over occurrences.

Computed from the whole step's rollouts, which every rank holds, so denominators are global over ranks and packs and
need no collective. Shapes: R rollouts.
"""

from __future__ import annotations

import numpy as np

from cp_engine.losses.settings import AGGREGATIONS


def rollout_weights(trained: np.ndarray, aggregation: str, sum_norm: float | None = None) -> np.ndarray:
    """Weight of each occurrence of a rollout. With n the rollout's trained tokens, T those of the step, and S the
    rollouts of the step with n > 0:

    ``token-mean``: 1 / T. ``seq-mean-token-mean``: 1 / (S n). ``seq-mean-token-sum``: 1 / S.
    ``seq-mean-token-sum-norm``: 1 / (S ``sum_norm``), where Dr. GRPO (Liu et al. 2025) takes the generation limit.

    Args:
        trained: int [R] trained occurrences of each rollout.
        sum_norm: None takes the largest n of the step.

    Returns:
        float64 [R]; 0 for a rollout without trained tokens.

    Raises:
        ValueError: for an unknown aggregation.
    """
    trained = np.asarray(trained, np.int64)
    has = trained > 0
    # Without a single trained token nothing has a weight, and there is nothing to divide by.
    total, rollouts = max(1, int(trained.sum())), max(1, int(has.sum()))
    if aggregation == "token-mean":
        denominator = total
    elif aggregation == "seq-mean-token-mean":
        denominator = rollouts * np.maximum(trained, 1)
    elif aggregation == "seq-mean-token-sum":
        denominator = rollouts
    elif aggregation == "seq-mean-token-sum-norm":
        denominator = rollouts * (max(1, trained.max()) if sum_norm is None else sum_norm)
    else:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
    return np.where(has, 1.0 / denominator, 0.0)
