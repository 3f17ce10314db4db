"""How far two runs of one model are apart."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

# A tensor whose gradients are all tiny is measured against this share of the model's largest gradient.
_FLOOR = 1e-3


@dataclass(frozen=True)
class GradientError:
    """The largest error over all parameters, and the parameter it belongs to."""

    error: float
    tensor: str


def gradient_error(tree: nn.Module, flat: nn.Module) -> GradientError:
    """Max-norm error of each parameter's gradient over max(its own max, 1e-3 × the model's largest gradient).

    A parameter that has a gradient in only one of the two, or a gradient that is not finite, counts as infinitely
    wrong.
    """
    mine, theirs = dict(tree.named_parameters()), dict(flat.named_parameters())
    assert mine.keys() == theirs.keys(), "the two models have different parameters"
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    worst = GradientError(0.0, "")
    for name, parameter in theirs.items():
        a, b = mine[name].grad, parameter.grad
        if a is None and b is None:
            continue
        if a is None or b is None:
            return GradientError(float("inf"), name)
        error = float((a - b).abs().max()) / max(float(b.abs().max()), _FLOOR * largest)
        if not error <= worst.error:  # also true for NaN
            worst = GradientError(error, name)
            if error != error:
                return GradientError(float("inf"), name)
    return worst
