"""The modules of a causal LM without its weights, for ranks that do not load them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Blueprint:
    """What a `transformers` model is built from; it can be sent to another process."""

    model_class: type[nn.Module]
    config: Any  # of the loaded model, so implementations of attention and experts are chosen already
    dtypes: dict[str, torch.dtype]  # of its parameters

    def build(self) -> nn.Module:
        """The model with its parameters and buffers on the meta device."""
        model = self._modules()
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name])
        return model

    def _modules(self) -> nn.Module:
        # The library writes into the config it is given, and draws initial weights.
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return self.model_class._from_config(copy.deepcopy(self.config))


def blueprint_of(model: nn.Module) -> Blueprint:
    """What a model that `load_model` returned is built from.

    Raises:
        ValueError: if its class and config alone do not give its modules, as with quantized weights.
    """
    blueprint = Blueprint(type(model), model.config, {name: p.dtype for name, p in model.named_parameters()})
    built = blueprint._modules()
    # A tensor that is neither parameter nor buffer would keep no values.
    differing = {name for name, _ in _shapes(built) ^ _shapes(model)} | {name for name, _ in _attributes(built)}
    if differing:
        names = sorted(differing)
        raise ValueError(
            f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''} of {type(model).__name__} do not follow "
            "from its config, so the weights cannot be handed out by the rank that reads them; use engine.name: plain"
        )
    return blueprint


def without_values(model: nn.Module) -> list[str]:
    """Names of the parameters, buffers and other tensors of the modules that are on the meta device."""
    tensors = [*model.named_parameters(), *model.named_buffers(), *_attributes(model)]
    return [name for name, tensor in tensors if tensor.is_meta]


def _shapes(model: nn.Module) -> set[tuple[str, torch.Size]]:
    """Of parameters and buffers; a tied one counts under its first name."""
    return {(name, tensor.shape) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", value
