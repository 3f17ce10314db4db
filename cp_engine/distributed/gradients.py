"""Gradients over the ranks: the loss is a sum over ranks, so gradients are summed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from cp_engine.distributed.ranks import Ranks

_BUCKET_ELEMENTS = 16_000_000  # one all-reduce carries at most about this many elements


def sum_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Sum every parameter's gradient over the ranks, in place and in few collectives."""
    if ranks.group is None:
        return
    bucket: list[torch.Tensor] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (
            bucket[0].dtype != parameter.grad.dtype
            or sum(g.numel() for g in bucket) + parameter.grad.numel() > _BUCKET_ELEMENTS
        ):
            _sum_bucket(bucket, ranks)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _sum_bucket(bucket, ranks)


def _sum_bucket(bucket: list[torch.Tensor], ranks: Ranks) -> None:
    joined = torch.cat([g.reshape(-1) for g in bucket])
    dist.all_reduce(joined, group=ranks.group)
    for gradient, summed in zip(bucket, joined.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def clip_gradients(model: nn.Module, max_norm: float | None) -> float:
    """Global gradient norm; gradients are scaled down to ``max_norm`` where it is given."""
    limit = float("inf") if max_norm is None else max_norm
    return float(nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), limit))
