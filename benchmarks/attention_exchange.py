"""What the benchmark of several GPUs needs of the exchanges: bytes that a plan moves, and runs without moving them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from cp_engine.layers import attention
from cp_engine.layers.attention import moved_bytes
from cp_engine.sharding.attention_plan import AttentionPlan
from cp_engine.sharding.exchange.transport import Arrival

MIB = 2**20


def moved_mib(plan: AttentionPlan, rank: int, heads: tuple[int, int], size: int, dtype: torch.dtype) -> float:
    """MiB that a rank sends or receives, whichever is more, in forward and backward of one layer."""
    moved = moved_bytes(plan, rank, *heads, size, dtype)
    return max(moved.forward_out + moved.backward_out, moved.forward_in + moved.backward_in) / MIB


class StillTransport:
    """Packs what is to be sent and receives old memory, without waiting for any other rank."""

    name = "still"

    def reserve(self, parts, dtype) -> None:
        pass

    def open(self, parts, dtype, device) -> StillTransport:
        made = StillTransport()
        made.parts, made.place = parts, {"dtype": dtype, "device": device}
        return made

    def outgoing(self, part: int) -> torch.Tensor:
        return torch.empty((self.parts[part].moves.rows_out, *self.parts[part].row_shape), **self.place)

    def publish(self) -> None:
        pass

    def start(self, part: int, into: torch.Tensor | None = None) -> Arrival:
        if into is None:
            into = torch.empty((self.parts[part].moves.rows_in, *self.parts[part].row_shape), **self.place)
        return Arrival(into, lambda: None)


@contextlib.contextmanager
def rows_present() -> Iterator[None]:
    """Inside, exchanges compute and copy as always but wait for no other rank: received rows hold old memory."""
    with mock.patch.object(attention, "transport_for", lambda *arguments: StillTransport()):
        yield
