"""Models that the first rank reads alone: the others build the same modules and are sent the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

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
        RuntimeError: on the other ranks, for anything else that the first one raises.
    """
    model = blueprint = failed = None
    if ranks.is_first:
        try:
            model = load_configured(config, torch.device("cpu"))
            blueprint = None if ranks.group is None else blueprint_of(model)
        except Exception as error:  # a damaged file has the errors of its library, and the others wait here
            failed = error
    blueprint, told = _from_first((blueprint, _to_tell(failed)), ranks)
    if failed is not None or told is not None:
        raise failed or told
    return model if ranks.is_first else blueprint.build()


def _to_tell(failed: Exception | None) -> Exception | None:
    """What other ranks raise, made of text alone: errors of libraries cannot always be sent."""
    if failed is None:
        return None
    if isinstance(failed, ValueError):
        return ValueError(str(failed))
    return RuntimeError(f"the first rank could not load the model: {type(failed).__name__}: {failed}")


def _from_first(sent: Any, ranks: Ranks) -> Any:
    """What the first rank sent; collective."""
    if ranks.group is None:
        return sent
    messages = [sent]
    dist.broadcast_object_list(messages, src=0, group=ranks.group, device=torch.device("cpu"))
    return messages[0]


def load_configured(config: Config, device: torch.device) -> nn.Module:
    """`load_model` of the configured model."""
    model = config.model
    return load_model(model.path, getattr(torch, config.dtype), model.vocab_size, model.seed, device)


def require_same_modules(model: nn.Module, ranks: Ranks) -> None:
    """Make sure that all ranks pass the same tensors to `receive`, and that the first one's have values.

    Raises:
        ValueError: on every rank, if the model of another rank has other parameters or buffers than the first one's,
            or that one has some on the meta device.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    described = repr([(name, list(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors])
    require_equal_digests(hashlib.blake2b(described.encode(), digest_size=16).hexdigest(), "model", ranks)
    lacking = _from_first(without_values(model), ranks)
    if lacking:
        raise ValueError(
            f"{', '.join(lacking[:4])}{' and others' if len(lacking) > 4 else ''} of the first rank's model are on the "
            "meta device, and the other ranks get its values: load or initialise them there"
        )


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
            # What is sent are bytes in the order in which they lie, and room that was made has them by rows.
            tensor.data = tensor.data.to(ranks.device).contiguous()
        if ranks.group is not None:
            dist.broadcast(tensor.data, src=0, group=ranks.group)


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
