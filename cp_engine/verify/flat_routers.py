"""The oracle of expert routers: the unmodified model's own load-balancing loss over all rows of the step at once.

The loss couples all rows, and a batch of all rows would not fit. So each row runs alone twice: first for its router
logits; the library's function is applied to the logits of all rows; then again, to carry the gradient of these logits
into the parameters. That is the chain rule and uses nothing of how the engine splits the loss.

Shapes: N flat tokens, M MoE layers, E experts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from cp_engine.distributed.ranks import Ranks
from cp_engine.models.routers import RouterShape
from cp_engine.step import StepData


@dataclass(frozen=True, eq=False)
class FlatRouters:
    """Equal on every rank."""

    loss: float  # weighted
    gradient: torch.Tensor  # [M, N, E] of the weighted loss
    margin: float  # smallest distance of a chosen expert's logit to one that is not chosen

    def backward_row(self, model, step: StepData, row: int) -> None:
        """Add the gradients of one row's tokens."""
        start, end = int(step.flat.row_start[row]), int(step.flat.row_start[row + 1])
        given = self.gradient[:, start:end]
        logits = row_logits(model, step, row)
        torch.autograd.backward(logits, list(given.to(logits[0].dtype)))


def flat_routers(
    model, step: StepData, rows: list[int], coefficient: float, shape: RouterShape, ranks: Ranks
) -> FlatRouters:
    """Run this rank's rows and gather the logits of all; every rank calls it.

    Args:
        rows: every row of the step is among those of one rank.
    """
    tokens = len(step.flat.token)
    dtype = next(model.parameters()).dtype
    gathered = torch.zeros(shape.layers, tokens, shape.experts, dtype=dtype, device=ranks.device)
    with torch.no_grad():
        for row in rows:
            start, end = int(step.flat.row_start[row]), int(step.flat.row_start[row + 1])
            gathered[:, start:end] = torch.stack(row_logits(model, step, row))
    if ranks.group is not None:
        dist.all_reduce(gathered, group=ranks.group)
    layers = tuple(layer.clone().requires_grad_() for layer in gathered)
    own_loss = sys.modules[type(model).__module__].load_balancing_loss_func
    with _WideSums(dtype):
        loss = coefficient * own_loss(layers, shape.experts, shape.top_k)
    loss.backward()
    ordered = gathered.sort(-1, descending=True).values
    margin = (ordered[..., shape.top_k - 1] - ordered[..., shape.top_k]).min()
    return FlatRouters(float(loss.detach()), torch.stack([layer.grad for layer in layers]), float(margin))


def row_logits(model, step: StepData, row: int) -> tuple[torch.Tensor, ...]:
    """[row length, E] of each MoE layer, of all the row's tokens."""
    start, end = int(step.flat.row_start[row]), int(step.flat.row_start[row + 1])
    ids = torch.as_tensor(step.flat.token[None, start:end], device=next(model.parameters()).device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=1, output_router_logits=True).router_logits


class ForcedRoutes(TorchFunctionMode):
    """The unmodified model with given experts: its routers' top-k yields these, with the router's probabilities.

    Args:
        routes: int64 [n, M, k] of the row that the model is called with.
    """

    def __init__(self, routes: torch.Tensor):
        super().__init__()
        self.layers = iter(routes.unbind(1))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.topk:
            chosen = next(self.layers)
            return args[0].gather(1, chosen), chosen
        return func(*args, **(kwargs or {}))


class _WideSums(TorchFunctionMode):
    """Float64 where the library starts sums with float32 zeros, for a float64 model."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.wide = dtype == torch.float64

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.wide and func is torch.zeros and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
