"""Learning rates, counted in optimizer steps."""

from __future__ import annotations

import math

from cp_engine.config import OptimizerConfig


def learning_rate(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of a step.

    It rises linearly over ``warmup_steps`` steps, the last of which has ``lr``; then it is constant, or goes to
    ``final_lr`` at step ``total_steps - 1`` along a line or half a cosine, and stays there.

    Args:
        step: steps taken before this one, from 0.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    first = max(0, optimizer.warmup_steps - 1)  # the step that has lr
    share = min(1.0, (step - first) / max(1, total_steps - 1 - first))
    left = 1.0 - share if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    final = optimizer.final_lr or 0.0
    return final + (optimizer.lr - final) * left
