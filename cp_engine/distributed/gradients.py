"""Gradients over the ranks: the loss is a sum over ranks, so gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from cp_engine.distributed.ranks import Ranks

_BUCKET_ELEMENTS = 16_000_000  # one all-reduce carries at most about this many elements


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Sum every trained parameter's gradient over the ranks, in place and in few collectives."""
    if ranks.group is None:
        return
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
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


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Global gradient norm over whole and sharded parameters; gradients are scaled down to ``max_norm`` if given."""
    whole: list[nn.Parameter] = []
    sharded: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (sharded if isinstance(parameter.grad, DTensor) else whole).append(parameter)
    parts = [p for p in (whole, sharded) if p]
    norms = [nn.utils.get_total_norm([p.grad for p in part]) for part in parts]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    # Under CPU offload sharded gradients lie in host memory, whole ones on the device.
    total = torch.stack([norm.to(norms[0].device) for norm in norms]).norm()
    if max_norm is not None:
        for part, norm in zip(parts, norms, strict=True):
            nn.utils.clip_grads_with_norm_(part, max_norm, total.to(norm.device))
    return float(total)
