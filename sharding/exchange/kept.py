"""What activation recompute takes from the forward pass instead of computing it again.

Under activation checkpointing a decoder layer's forward runs a second time in backward. Its exchanges must not: they
cost time on every rank, and ranks would have to repeat them in one order. So each goes through `kept`, an opaque
operator whose results selective checkpointing (`torch.utils.checkpoint`) saves; the second run gets them without
calling anything. Outside of `contexts` it is a plain call.

The operator's argument is the number of a function that waits in a table during the call, so that plans, process
groups and transports need no form that an operator's schema knows, and nothing here keeps them alive.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# What moves between ranks; and what one rank's attention or recurrence computes, where nothing moves.
Kind = Literal["exchange", "mixer"]

_WORK: dict[int, Callable[[], list[torch.Tensor]]] = {}
_NUMBERS = itertools.count()
_THREAD = threading.local()  # recompute runs in threads of the autograd engine


@dataclass(frozen=True)
class Keeping:
    """What a checkpointed function keeps.

    Args:
        offload: keep it in host memory, pinned where the results lie on a GPU.
    """

    kinds: frozenset[Kind]
    offload: bool = False


@torch.library.custom_op("cp_engine::kept", mutates_args=())
def _kept(like: torch.Tensor, work: int) -> list[torch.Tensor]:
    return _WORK[work]()


def kept(kind: Kind, work: Callable[[], tuple[torch.Tensor, ...]], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``work()``; in a recomputation that keeps this kind, what it returned in the forward pass.

    Forward and recomputation must come here equally often and in one order. Records no autograd graph: call it inside
    the forward of an autograd function.

    Args:
        work: returns tensors that share no memory with each other or with ``like``, and that nobody writes to later.
        like: any tensor on their device.
    """
    keeping: Keeping | None = getattr(_THREAD, "keeping", None)
    if keeping is None or kind not in keeping.kinds:
        return tuple(work())
    made: list[torch.Tensor] = []

    def run() -> list[torch.Tensor]:
        made.extend(work())
        return [_to_host(tensor) for tensor in made] if keeping.offload else made

    number = next(_NUMBERS)
    _WORK[number] = run
    try:
        results = _kept(like, number)
    finally:
        del _WORK[number]
    if not keeping.offload:
        return tuple(results)
    # Copies in both directions are on one stream, so that they need no other order.
    return tuple(made) if made else tuple(result.to(like.device, non_blocking=True) for result in results)


def is_taken(kind: Kind) -> bool:
    """Whether `kept` would return results of the forward pass, so that what only they need can be left out."""
    keeping: Keeping | None = getattr(_THREAD, "keeping", None)
    return keeping is not None and kind in keeping.kinds and _THREAD.again


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def contexts(
    keeping: Keeping, inside: Callable[[], AbstractContextManager]
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a checkpointed function's forward and recomputation, for ``context_fn`` of torch's ``checkpoint``.

    Args:
        inside: makes one more context for the recomputation, which may run in another thread.
    """
    forward, again = create_selective_checkpoint_contexts([torch.ops.cp_engine.kept.default])
    return _all_of(_here(keeping, False), forward), _all_of(inside(), _here(keeping, True), again)


@contextmanager
def _all_of(*parts: AbstractContextManager) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        yield


@contextmanager
def _here(keeping: Keeping, again: bool) -> Iterator[None]:
    before = getattr(_THREAD, "keeping", None), getattr(_THREAD, "again", False)
    _THREAD.keeping, _THREAD.again = keeping, again
    try:
        yield
    finally:
        _THREAD.keeping, _THREAD.again = before
