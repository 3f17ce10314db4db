"""What activation recompute takes from the forward pass instead of computing it again.

Under activation checkpointing a decoder layer's forward runs a second time in backward. Its exchanges must not: they
cost time on every rank, and ranks would have to repeat them in one order. So each goes through `kept`: the first run
keeps its results, the second one takes them in the same order. Outside of `contexts` it is a plain call.

Torch's selective checkpointing could do this with operators, but it watches every operator of the layer, and hooks of
sharded weights (ZeRO-3) run other collectives in the second run than in the first, which it refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

# What moves between ranks; and what one rank's attention or recurrence computes, where nothing moves.
Kind = Literal["exchange", "mixer"]


@dataclass(frozen=True)
class Keeping:
    """What a checkpointed function keeps.

    Args:
        offload: keep it in host memory, pinned where the results lie on a GPU.
    """

    kinds: frozenset[Kind]
    offload: bool = False


class _Results:
    """What one call of a checkpointed function has kept."""

    def __init__(self, keeping: Keeping):
        self.keeping = keeping
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def add(self, results: tuple[torch.Tensor, ...]) -> None:
        # Autograd hangs its graph on the tensors that a function returns; these are others on the same memory.
        move = _to_host if self.keeping.offload else torch.Tensor.detach
        self.calls.append(tuple(move(tensor) for tensor in results))

    def take(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        assert self.calls, "a recomputed layer asks for more than its forward pass kept, or goes backward twice"
        # Copies in both directions are on one stream, so that they need no other order.
        return tuple(tensor.to(device, non_blocking=True) for tensor in self.calls.pop(0))


class _Run(threading.local):
    """The checkpointed run that this thread is in; recomputation has threads of the autograd engine."""

    results: _Results | None = None
    again = False


_RUN = _Run()


def kept(kind: Kind, work: Callable[[], tuple[torch.Tensor, ...]], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``work()``; in a recomputation that keeps this kind, what it returned in the forward pass.

    Forward and recomputation must come here equally often and in one order. Records no autograd graph: call it inside
    the forward of an autograd function.

    Args:
        work: returns tensors that nobody writes to later.
        like: any tensor on their device.
    """
    if is_taken(kind):
        return _RUN.results.take(like.device)
    results = _RUN.results
    if results is None or kind not in results.keeping.kinds:
        return tuple(work())
    with _running(None, False):  # what is inside is kept as a part of this
        made = tuple(work())
    results.add(made)
    return made


@contextmanager
def part_of(kind: Kind) -> Iterator[None]:
    """Where this kind is kept, results of calls inside are not: they go into one that `kept` makes later."""
    if _RUN.results is None or kind not in _RUN.results.keeping.kinds:
        yield
        return
    with _running(None, False):
        yield


def is_taken(kind: Kind) -> bool:
    """Whether `kept` would return results of the forward pass, so that what only they need can be left out."""
    return _RUN.again and kind in _RUN.results.keeping.kinds


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
    results = _Results(keeping)
    return _running(results, False), _recomputing(results, inside())


@contextmanager
def _running(results: _Results | None, again: bool) -> Iterator[None]:
    before = _RUN.results, _RUN.again
    _RUN.results, _RUN.again = results, again
    try:
        yield
    finally:
        _RUN.results, _RUN.again = before


@contextmanager
def _recomputing(results: _Results, inside: AbstractContextManager) -> Iterator[None]:
    with inside, _running(results, True):
        yield
