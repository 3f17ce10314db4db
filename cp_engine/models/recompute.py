"""Activation recompute of decoder layers, through the checkpointing that `transformers` layers know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from cp_engine.config import MemoryConfig
from cp_engine.models.precision import same_precision
from cp_engine.sharding.exchange.kept import Keeping, contexts

_KINDS = {"layers": frozenset({"exchange"}), "layers_keep_mixers": frozenset({"exchange", "mixer"})}


def recompute_layers(causal_lm: nn.Module, memory: MemoryConfig) -> None:
    """Have the layers keep what ``memory`` says for backward, in place; the same results, in less memory.

    A recomputed layer keeps its input and what its exchanges brought, so that recomputation moves nothing between
    ranks. Call it before a distributed engine takes the model.

    Args:
        memory: with a number of layers in the place of ``auto``.

    Raises:
        ValueError: for more layers than the model has.
    """
    if memory.recompute == "none":
        return
    layers, count = causal_lm.base_model.layers, memory.recompute_layers
    if count is not None and count > len(layers):
        raise ValueError(
            f"memory.recompute_layers is {count}, and the model has {len(layers)} decoder layers: give at most so many"
        )
    keeping = Keeping(_KINDS[memory.recompute], memory.offload_activations)
    # The first ones: backward comes to them when what the others keep is gone, so that a layer that is computed again
    # does not add to the peak. Of the last ones it would, by nearly all that a layer saves.
    for layer in layers[:count]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_checkpointed, keeping)


def _checkpointed(keeping: Keeping, function: Callable, hidden_states: torch.Tensor, *args):
    """``function(hidden_states, *args)``, recomputed in backward. Nothing in a layer is random (`support.py`)."""
    inputs = save_on_cpu(pin_memory=hidden_states.is_cuda) if keeping.offload else nullcontext()
    with inputs:
        return checkpoint(
            function,
            hidden_states,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(contexts, keeping, same_precision),
        )
