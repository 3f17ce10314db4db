"""Rows by peer reads over symmetric memory: every rank packs into memory that all ranks of the host can read.

A shipment's life on one rank, on its compute stream unless said otherwise:

1. Rows are packed into this rank's slot.
2. A barrier of all ranks, on the device: every slot is packed. `publish` waits in the compute stream, once for all
   parts, before long kernels occupy the card. A part that is started without it (its rows come out of a kernel) has its
   barrier on the side stream, and kernels go on.
3. On the side stream, blocks are copied out of the senders' slots: plain copies, which copy engines do.
4. The compute stream waits for the copies (`Arrival.wait`).

Why nobody overwrites what a peer still reads. Memory has two slots, which shipments take in turn. When this rank packs
shipment i + 2 into the slot of shipment i, its compute stream has waited for all arrivals of shipment i + 1, hence for
that shipment's last barrier (4). Every peer entered that barrier after its copies of shipment i: its compute stream
had waited for them before it came to `publish` (4), or its side stream did the copies first (3). So every arrival must
be waited for, on ranks that receive nothing too, and at most two shipments may be open at a time. An exchange that runs
beside the computation (`transport.ship` inside `InFlight`) packs and publishes on the side stream as well, where all of
this holds by the order of that one stream; the compute stream waits for it before the next shipment.

The slots are made once for a process group and grow in doubling steps. All ranks know from the plans how much any rank
packs, so all grow in the same call; growing is the only thing here that makes a host wait.

Shapes: P ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from cp_engine.sharding.exchange.in_flight import side_stream
from cp_engine.sharding.exchange.transport import Arrival, Part
from cp_engine.sharding.exchange.waits import waiting

ALIGNMENT = 512  # bytes: where parts begin
SMALLEST_SLOT = 1 << 22
PUBLISHED, STARTED = 0, 1  # barrier channels of the compute and of the side stream


class Memory(Protocol):
    """Symmetric memory: a handle of `torch.distributed._symmetric_memory`, or a stand-in."""

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> torch.Tensor: ...

    def barrier(self, channel: int, timeout_ms: int) -> None: ...


class SideStream(Protocol):
    """`CudaSideStream`, or a stand-in."""

    def submit(self, work: Callable[[], None]) -> Callable[[], None]: ...


class PeerTransport:
    """See the module.

    Args:
        make_memory: collective; bytes -> memory of that size on each rank. It returns when no rank uses earlier memory.
        timeout_ms: of barriers. A rank that died leaves the others in one, which no watchdog of the process group sees.
    """

    name = "peer"

    def __init__(self, rank: int, make_memory: Callable[[int], Memory], side: SideStream, timeout_ms: int):
        self.rank = rank
        self._make_memory, self._side, self._timeout_ms = make_memory, side, timeout_ms
        self._memory: Memory | None = None
        self._slot_bytes = 0  # a power of two
        self._opened = 0

    def reserve(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        needed = _offsets(parts, dtype)[-1]
        if needed > self._slot_bytes:
            self._slot_bytes = max(SMALLEST_SLOT, 1 << (needed - 1).bit_length())
            self._memory = self._make_memory(2 * self._slot_bytes)
            self._opened = 0

    def open(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> PeerShipment:
        self.reserve(parts, dtype)
        assert self._memory is not None, "a shipment that moves nothing is not opened"
        slot = (self._opened % 2) * self._slot_bytes
        self._opened += 1
        starts = [(slot + offset) // dtype.itemsize for offset in _offsets(parts, dtype)]
        return PeerShipment(self.rank, self._memory, self._side, self._timeout_ms, parts, starts, dtype, device)


def _offsets(parts: Sequence[Part], dtype: torch.dtype) -> list[int]:
    """Bytes before each part in a slot, and at last its whole use; the same on every rank."""
    offsets = [0]
    for part in parts:
        nbytes = part.moves.most_out * math.prod(part.row_shape) * dtype.itemsize
        offsets.append(offsets[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
    return offsets


class PeerShipment:
    def __init__(
        self,
        rank: int,
        memory: Memory,
        side: SideStream,
        timeout_ms: int,
        parts: Sequence[Part],
        starts: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._rank, self._memory, self._side, self._timeout_ms = rank, memory, side, timeout_ms
        self._parts, self._starts = parts, starts
        self._dtype, self._device = dtype, device
        self._published = False

    def outgoing(self, part: int) -> torch.Tensor:
        rows = self._parts[part].moves.rows_out
        return self._block(self._rank, part, 0, rows)

    def publish(self) -> None:
        with waiting(self._device):
            self._memory.barrier(PUBLISHED, self._timeout_ms)
        self._published = True

    def start(self, part: int) -> Arrival:
        moves, row_shape = self._parts[part].moves, self._parts[part].row_shape
        into = torch.empty((moves.rows_in, *row_shape), dtype=self._dtype, device=self._device)

        def copy_blocks() -> None:
            if not self._published:
                self._memory.barrier(STARTED, self._timeout_ms)
            for peer, there, here, rows in moves.blocks:
                into[here : here + rows].copy_(self._block(peer, part, there, rows))

        # The side stream writes into ``into`` after all that this stream did with that memory before, and this stream
        # waits for it before the memory can go back: no record_stream is needed.
        return Arrival(into, self._side.submit(copy_blocks))

    def _block(self, rank: int, part: int, row: int, rows: int) -> torch.Tensor:
        row_shape = self._parts[part].row_shape
        if not rows:
            return torch.empty((0, *row_shape), dtype=self._dtype, device=self._device)
        start = self._starts[part] + row * math.prod(row_shape)
        return self._memory.get_buffer(rank, (rows, *row_shape), self._dtype, start)


def group_timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """How long the group's collectives on a device wait for a rank; torch tells it in no public way."""
    return int(group._get_backend(device).options._timeout.total_seconds() * 1000)


def on_cuda(group: dist.ProcessGroup, device: torch.device) -> PeerTransport:
    """The transport of a group whose ranks have each a GPU of one host."""
    # Rendezvous would set up multicast, which nothing here uses; barriers take another kernel where it is there.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric_memory

    held: list[torch.Tensor] = []

    def make_memory(nbytes: int) -> Memory:
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index])
        torch.cuda.synchronize(device)
        held.clear()
        held.append(symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device))
        return symmetric_memory.rendezvous(held[0], group)

    return PeerTransport(dist.get_rank(group), make_memory, side_stream(device), group_timeout_ms(group, device))
