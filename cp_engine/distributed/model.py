"""What the training engine asks of whoever holds weights, gradients and optimizer states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from cp_engine.config import OptimizerConfig
from cp_engine.distributed.gradients import clip_gradients
from cp_engine.distributed.ranks import Ranks
from cp_engine.models.tree_causal_lm import Outputs, TreeCausalLM
from cp_engine.pack import DevicePack

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's states of the size of a parameter


class DistributedModel(ABC):
    """A `TreeCausalLM` with its optimizer, spread over all ranks. Every method is called by every rank.

    The loss is a sum over ranks, and gradients are its gradients whatever the library behind averages.
    """

    tree: TreeCausalLM

    @abstractmethod
    def __call__(
        self, pack: DevicePack, temperature: float = 1.0, outputs: Outputs = "edges"
    ) -> tuple[torch.Tensor, ...]:
        """`TreeCausalLM.forward`."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of this rank's loss of one pack; ``last`` says that no pack of the step follows."""

    @abstractmethod
    def update(self, lr: float, max_norm: float | None) -> float:
        """Clip the gradients, take an optimizer step and drop the gradients.

        Returns:
            the norm before clipping. If it is not finite, the weights and optimizer states are as they were.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients of a step that was not finished."""

    def after_forward(self) -> None:  # noqa: B027 - nothing to do for most
        """Free what a forward pass without a backward pass leaves."""

    @abstractmethod
    def full_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer of ``tree.causal_lm`` as a whole, in the dtype that the model computes with."""

    @abstractmethod
    def checkpoint_state(self, copies: bool) -> dict[str, torch.Tensor]:
        """Trained weights and optimizer states, in one format whatever the engine and the number of ranks.

        Args:
            copies: in host memory, where no later step changes them, with every whole tensor on one rank only. Else
                they may be the tensors that the next step updates.
        """

    @abstractmethod
    def load_state(self, folder: Path) -> None:
        """Read what `save_tensors` wrote of a `checkpoint_state`."""


def make_optimizer(parameters, optimizer: OptimizerConfig, fused: bool = False) -> torch.optim.Optimizer:
    """The configured optimizer for parameters or parameter groups.

    Args:
        fused: one kernel reads and writes each number once, where torch's own loops do so for every operation.
    """
    if optimizer.name == "sgd":
        return torch.optim.SGD(parameters, lr=optimizer.lr, weight_decay=optimizer.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=fused or None,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class TorchModel(DistributedModel):
    """Shared by the engines that update tensors with torch's own optimizers.

    Args:
        updated: name and tensor that the optimizer updates, for each trained parameter.
    """

    def __init__(self, tree: TreeCausalLM, updated: dict[str, nn.Parameter], optimizer: OptimizerConfig, ranks: Ranks):
        self.tree, self.updated, self.ranks = tree, updated, ranks
        # Sharded and whole tensors cannot share the optimizer's fused loops.
        by_kind: dict[type, list[nn.Parameter]] = {}
        for parameter in updated.values():
            by_kind.setdefault(type(parameter.data), []).append(parameter)
        # A frozen model has no parameters for one.
        fused = bool(updated) and all(parameter.is_cuda for parameter in updated.values())
        self.optimizer = make_optimizer([{"params": group} for group in by_kind.values() or ([],)], optimizer, fused)

    def __call__(self, pack, temperature=1.0, outputs="edges"):
        return self.tree(pack, temperature=temperature, outputs=outputs)

    def update(self, lr, max_norm):
        norm = clip_gradients(self.updated.values(), max_norm)
        if norm - norm == 0.0:  # finite; the same on every rank, since gradients are summed
            set_lr(self.optimizer, lr)
            self.optimizer.step()
            self.after_update()
        self.zero_grad()
        return norm

    def after_update(self) -> None:  # noqa: B027
        """Bring the model's weights up to date."""

    def zero_grad(self):
        for parameter in self.updated.values():
            parameter.grad = None

    def checkpoint_state(self, copies):
        self._begin_moments()
        state = dict(self._state())
        if not copies:
            return state
        # Ranks share the copying of what each holds whole, as they share the writing.
        return {
            name: tensor.detach().to("cpu", copy=True)
            for index, (name, tensor) in enumerate(state.items())
            if isinstance(tensor, DTensor) or index % self.ranks.world == self.ranks.rank
        }

    def load_state(self, folder):
        self._begin_moments()
        load_tensors(dict(self._state()), folder, self.ranks)
        self.after_update()

    def _begin_moments(self) -> None:
        """Give tensors that no step has updated yet, such as after skipped steps, what the first one would."""
        for parameter in self.updated.values():
            state = self.optimizer.state[parameter]
            if not state:
                state |= empty_moments(self.optimizer, parameter)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of a checkpoint, read and written in place."""
        for name, parameter in self.updated.items():
            yield f"weight.{name}", parameter.data
            for key, value in self.optimizer.state[parameter].items():
                yield f"{key}.{name}", value


def empty_moments(optimizer: torch.optim.Optimizer, updated: torch.Tensor) -> dict[str, torch.Tensor]:
    """The optimizer state of a tensor before its first step."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return {}
    # A fused kernel reads the count where it updates.
    step = torch.zeros((), device=updated.device if optimizer.defaults["fused"] else "cpu")
    return {"step": step, **{key: torch.zeros_like(updated.detach()) for key in MOMENTS}}


def save_tensors(
    tensors: dict[str, torch.Tensor], folder: Path, ranks: Ranks, group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors, whole or sharded, each once; ranks may hold different ones.

    Args:
        group: of all ranks, for what they tell one another about it; None for the group of the run.
    """
    dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=ranks.group is None)


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path, ranks: Ranks) -> None:
    """Read tensors in place, whichever way they were sharded when they were written."""
    dcp.load(tensors, checkpoint_id=folder, no_dist=ranks.group is None)
