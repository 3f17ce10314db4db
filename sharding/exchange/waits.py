"""How long computation stands still for exchanges.

Every place where it may has its wait inside `waiting`. On a GPU that records an event before and one after what the
compute stream waits for; they are read when the device has been waited for anyway, so the host never waits for them. On
a CPU it is the wall time of the block. What runs on a side stream (`aside`) keeps nobody waiting and is not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FREE: list[torch.cuda.Event] = []  # to be recorded again: making one takes longer than recording it


class ExchangeWaits:
    """The waits since it was made, until `seconds` is called or another one is made."""

    _present: ExchangeWaits | None = None

    def __init__(self):
        self._on_host = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        ExchangeWaits._present = self

    def seconds(self) -> float:
        """Their sum. The device must have done what was asked of it so far."""
        if ExchangeWaits._present is self:
            ExchangeWaits._present = None
        for before, after in self._events:
            self._on_host += before.elapsed_time(after) / 1e3
            _FREE.extend((before, after))
        self._events.clear()
        return self._on_host

    @contextmanager
    def _one(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._on_host += time.perf_counter() - began
            return
        before, after = _event(), _event()
        stream = torch.cuda.current_stream(device)
        before.record(stream)
        yield
        after.record(stream)
        self._events.append((before, after))


class _Side(threading.local):
    inside = False


_SIDE = _Side()


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """The compute stream of ``device``, or the host where it is a CPU, waits for an exchange inside."""
    present = ExchangeWaits._present
    if present is None or _SIDE.inside:
        yield
        return
    with present._one(device):
        yield


@contextmanager
def aside() -> Iterator[None]:
    """What happens inside is asked of a side stream."""
    before, _SIDE.inside = _SIDE.inside, True
    try:
        yield
    finally:
        _SIDE.inside = before


def _event() -> torch.cuda.Event:
    return _FREE.pop() if _FREE else torch.cuda.Event(enable_timing=True)
