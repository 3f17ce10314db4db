"""Whole weights out of a sharded model, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from cp_engine.distributed.model import DistributedModel
from cp_engine.models.lora import adapter_name, lora_layers


def named_full_weights(model: DistributedModel, adapter: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the model's tensors under their `transformers` names; every rank iterates to the end.

    Args:
        adapter: yield the adapters' tensors under the names of a `peft` adapter file, instead of the model with the
            adapters merged in.

    Yields:
        name and tensor, on the device, in the dtype that the model computes with. A tied tensor comes once.
    """
    causal_lm = model.tree.causal_lm
    layers = dict(lora_layers(causal_lm))
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if ".lora_" in name:
                if adapter:
                    yield adapter_name(name), model.full_tensor(name, parameter)
            elif not adapter:
                module, _, leaf = name.rpartition(".base_layer.")
                whole = model.full_tensor(name, parameter)
                if module in layers and leaf == "weight":
                    whole = _merged(model, module, layers[module], whole)
                yield f"{module}.{leaf}" if module else name, whole
        if not adapter:
            yield from _persistent_buffers(causal_lm, model)


def _merged(model: DistributedModel, name: str, layer: nn.Module, base: torch.Tensor) -> torch.Tensor:
    """``W + alpha / r * B A``, summed in the accumulation dtype."""
    wide = torch.float64 if base.dtype == torch.float64 else torch.float32
    down, up = (
        model.full_tensor(f"{name}.{part}.default.weight", getattr(layer, part)["default"].weight).to(wide)
        for part in ("lora_A", "lora_B")
    )
    return (base.to(wide) + layer.scaling["default"] * (up @ down)).to(base.dtype)


def _persistent_buffers(causal_lm: nn.Module, model: DistributedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in causal_lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                full = f"{prefix}.{name}" if prefix else name
                yield full, model.full_tensor(full, buffer)
