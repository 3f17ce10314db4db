"""Running unmodified `transformers` models on a machine without a GPU."""

from __future__ import annotations

import inspect
import sys

from torch import nn

from cp_engine.models.hf_gdn import gdn_layers

_TORCH_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def make_cpu_runnable(model: nn.Module) -> None:
    """Make an unmodified model run on the CPU, whatever is installed. Does nothing to a model on another device.

    When it is imported, `transformers` binds the functions of its GDN layers to fla, if that can be imported, without
    asking whether there is a GPU; the first forward then fails with "0 active drivers". The wrappers keep the eager
    PyTorch function as ``__wrapped__``: this binds the modelling module's names to those. That holds for every model
    of the architecture in this process, which is what a process without a GPU needs.

    Raises:
        RuntimeError: if this version of `transformers` names the functions differently.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for module_name in sorted({type(layer).__module__ for layer in gdn_layers(model)}):
        module = sys.modules[module_name]
        missing = [name for name in _TORCH_FUNCTIONS if not hasattr(module, name)]
        if missing:
            raise RuntimeError(f"{module_name} has no {', '.join(missing)}: this transformers version is not supported")
        for name in _TORCH_FUNCTIONS:
            setattr(module, name, inspect.unwrap(getattr(module, name)))
