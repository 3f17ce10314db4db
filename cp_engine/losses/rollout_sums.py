"""Sums over all occurrences of a rollout, which may lie on several ranks.

Shapes: O occurrences of this rank, r rollouts of the pack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

RolloutSum = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(values [O], rollout int64 [O], r) -> sums [r], differentiable."""


def rollout_sum(values: torch.Tensor, rollout: torch.Tensor, rollouts: int) -> torch.Tensor:
    """Sums on one rank: values [O] of rollouts int64 [O] -> [r]."""
    # index_put sorts before it adds, so it is deterministic on a GPU too.
    return values.new_zeros(rollouts).index_put((rollout,), values, accumulate=True)


def rollout_sum_over(group) -> RolloutSum:
    """`rollout_sum` over the ranks of a process group, with one all-reduce forward and one backward.

    Every rank of the group must call it, and run its backward, with the same number of rollouts; a rank without
    occurrences does with O = 0. ``group`` None means a single rank.
    """
    if group is None:
        return rollout_sum

    def over_ranks(values: torch.Tensor, rollout: torch.Tensor, rollouts: int) -> torch.Tensor:
        return _AllReduce.apply(rollout_sum(values, rollout, rollouts), group)

    return over_ranks


class _AllReduce(torch.autograd.Function):
    """Sum over ranks. The loss is a sum over ranks too, so the gradients of all ranks' copies are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
