"""Whole weights, gradients and optimizer states on every rank."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from cp_engine.config import OptimizerConfig
from cp_engine.distributed.gradients import sum_gradients
from cp_engine.distributed.model import TorchModel
from cp_engine.distributed.ranks import Ranks
from cp_engine.models.tree_causal_lm import TreeCausalLM


class PlainModel(TorchModel):
    """Gradients are summed over all ranks once a step, in float32 at least.

    A bfloat16 parameter has a float32 master, which takes its gradients and the updates.
    """

    def __init__(self, tree: TreeCausalLM, optimizer: OptimizerConfig, ranks: Ranks):
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        updated = {}
        # A tensor's hook is nothing that Python's collector looks into: with the model in it neither were ever freed.
        move_gradient = weakref.WeakMethod(self._move_gradient)
        for name, parameter in tree.causal_lm.named_parameters():
            if parameter.requires_grad:
                updated[name] = parameter
                if parameter.dtype == torch.bfloat16:
                    updated[name] = self.masters[parameter] = nn.Parameter(parameter.detach().float())
                    parameter.register_post_accumulate_grad_hook(lambda parameter: move_gradient()(parameter))
        super().__init__(tree, updated, optimizer, ranks)

    def _move_gradient(self, parameter: nn.Parameter) -> None:
        master, gradient = self.masters[parameter], parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    def backward(self, loss, last):
        loss.backward()
        if last:
            sum_gradients(self.updated.values(), self.ranks)

    @torch.no_grad()
    def after_update(self):
        for parameter, master in self.masters.items():
            parameter.copy_(master)

    def full_tensor(self, name, tensor):
        return tensor.detach()
