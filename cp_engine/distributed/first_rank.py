"""Models that the first rank reads alone: the others build the same modules and are sent the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from cp_engine.config import Config
from cp_engine.distributed.agree import require_equal_digests
from cp_engine.distributed.ranks import Ranks
from cp_engine.models.blueprint import blueprint_of, without_values
from cp_engine.models.load import load_model


def load_on_first_rank(config: Config, ranks: Ranks) -> nn.Module:
    """The configured model in host memory on the first rank, and on the meta device on the others.

    They wait for the first one. `receive` gives them the values.

    Raises:
        ValueError: on every rank, as `load_model` and `blueprint_of`.
    """
    model = told = None
    if ranks.is_first:
        try:
            model = load_configured(config, torch.device("cpu"))
            told = None if ranks.group is None else blueprint_of(model)
        except ValueError as error:
            told = error
    if ranks.group is not None:
        messages = [told]
        dist.broadcast_object_list(messages, src=0, group=ranks.group, device=torch.device("cpu"))
        told = messages[0]
    if isinstance(told, ValueError):
        raise told
    return model if ranks.is_first else told.build()


def load_configured(config: Config, device: torch.device) -> nn.Module:
    """`load_model` of the configured model."""
    model = config.model
    return load_model(model.path, getattr(torch, config.dtype), model.vocab_size, model.seed, device)


def require_same_modules(model: nn.Module, ranks: Ranks) -> None:
    """Make sure that all ranks pass the same tensors to `receive`.

    Raises:
        ValueError: on every rank, if the model of another rank has other parameters or buffers than the first one's.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    described = repr([(name, list(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors])
    require_equal_digests(hashlib.blake2b(described.encode(), digest_size=16).hexdigest(), "model", ranks)


def require_values(model: nn.Module) -> None:
    """Make sure that nothing was forgotten in calls of `receive`."""
    forgotten = without_values(model)
    assert not forgotten, f"without values: {forgotten}"


@torch.no_grad()
def receive(tensors: Iterable[torch.Tensor], ranks: Ranks) -> None:
    """Give parameters or buffers, in place and on the ranks' device, the values that they have on the first rank.

    Every rank calls it with the same tensors; those of other ranks may be on the meta device.
    """
    for tensor in tensors:
        if tensor.is_meta:
            # Swapped rather than set anew on the modules, so that tied weights stay tied.
            torch.utils.swap_tensors(tensor, _empty(tensor, ranks.device))
        else:
            tensor.data = tensor.data.to(ranks.device)
        if ranks.group is not None:
            dist.broadcast(tensor.data, src=0, group=ranks.group)


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
