"""Attention whose exchange moves nothing: what an exchange costs is the time over that of this."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from cp_engine.layers import attention
from cp_engine.sharding.exchange.transport import Arrival, Part


class PresentTransport:
    """Rows are packed and used as always, but the received ones hold whatever their memory held: nobody waits."""

    name = "present"

    def reserve(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        pass

    def open(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> PresentShipment:
        return PresentShipment(parts, dtype, device)


class PresentShipment:
    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device):
        self._parts, self._dtype, self._device = parts, dtype, device

    def outgoing(self, part: int) -> torch.Tensor:
        return self._new(part, self._parts[part].moves.rows_out)

    def publish(self) -> None:
        pass

    def start(self, part: int) -> Arrival:
        return Arrival(self._new(part, self._parts[part].moves.rows_in), lambda: None)

    def _new(self, part: int, rows: int) -> torch.Tensor:
        return torch.empty((rows, *self._parts[part].row_shape), dtype=self._dtype, device=self._device)


@contextlib.contextmanager
def rows_present() -> Iterator[None]:
    """Inside, `tree_attention` uses a `PresentTransport`."""
    present = PresentTransport()
    with mock.patch.object(attention, "transport_for", lambda group, device, name: present):
        yield
