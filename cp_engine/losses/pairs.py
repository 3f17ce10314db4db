"""Which rollout of a pair is preferred.

Shapes: R rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cp_engine.rollouts import Rollout


def pair_preferences(rollouts: Sequence[Rollout], trained: np.ndarray) -> np.ndarray:
    """1 for the rollout of higher reward of each group of two, -1 for the other: float64 [R].

    Args:
        trained: int [R] trained tokens of each rollout.

    Raises:
        ValueError: for a group that has not two rollouts with trained tokens and different rewards.
    """
    members: dict[str, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        members.setdefault(rollout.group, []).append(index)
    preference = np.empty(len(rollouts))
    for group, pair in members.items():
        rewards = [rollouts[i].reward for i in pair]
        if len(pair) != 2:
            raise ValueError(f"dpo needs two rollouts in each group of a step; group {group!r} has {len(pair)}")
        if None in rewards or rewards[0] == rewards[1]:
            raise ValueError(
                f"dpo prefers the rollout of higher reward, so the two of a group need different rewards; group "
                f"{group!r} has {rewards[0]} and {rewards[1]}"
            )
        if not trained[pair].all():
            raise ValueError(f"dpo compares trained tokens; a rollout of group {group!r} has none")
        preference[pair] = (1.0, -1.0) if rewards[0] > rewards[1] else (-1.0, 1.0)
    return preference
