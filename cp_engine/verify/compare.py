"""How far two runs of one model are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# A tensor whose gradients are all tiny is measured against this share of the model's largest gradient.
_FLOOR = 1e-3


@dataclass(frozen=True)
class GradientError:
    """The largest error over all parameters, and the parameter it belongs to."""

    error: float
    tensor: str


def gradient_error(tree: nn.Module, flat: dict[str, torch.Tensor]) -> GradientError:
    """Max-norm error of each parameter's gradient over max(its own max, 1e-3 × the model's largest gradient).

    A parameter that has a gradient in only one of the two, or a gradient that is not finite, counts as infinitely
    wrong.

    Args:
        tree: the model whose gradients are judged, the same on every rank; they may be sharded.
        flat: the true gradient of each of its parameters, by name; absent where there is none.
    """
    largest = max(float(gradient.abs().max()) for gradient in flat.values())
    worst = GradientError(0.0, "")
    for name, parameter in tree.named_parameters():
        mine, truth = parameter.grad, flat.get(name)
        if mine is None and truth is None:
            continue
        if mine is None or truth is None:
            return GradientError(float("inf"), name)
        if isinstance(mine, DTensor):
            mine = mine.full_tensor()
        error = float((mine - truth).abs().max()) / max(float(truth.abs().max()), _FLOOR * largest)
        if error != error:
            return GradientError(float("inf"), name)
        if error >= worst.error:
            worst = GradientError(error, name)
    return worst
