"""Stand-ins for symmetric memory and a side stream, for CPU ranks of one machine.

Memory is a mapped file, barriers are counters in it, and the side stream is a thread that starts late and copies
slowly: what a peer overwrites or reads too early shows.

Shapes: P ranks, B bytes of each rank's memory.
"""

from __future__ import annotations

import os
import queue
import random
import tempfile
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from cp_engine.sharding.exchange import transport as transports
from cp_engine.sharding.exchange.peer import PeerTransport, group_timeout_ms

PATIENCE_S = 60
CHANNELS = 2


class SharedMemory:
    """What `torch.distributed._symmetric_memory.rendezvous` returns, of B bytes a rank, all of them NaN at first."""

    def __init__(self, nbytes: int, group, delay_s: float):
        self.rank, self.world, self.nbytes, self.delay_s = (
            dist.get_rank(group),
            dist.get_world_size(group),
            nbytes,
            delay_s,
        )
        path = [None]
        if self.rank == 0:
            handle, path[0] = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            os.truncate(handle, self.world * nbytes + CHANNELS * self.world * 8)
            os.close(handle)
        dist.broadcast_object_list(path, 0, group=group)
        self.counters = np.memmap(path[0], np.int64, "r+", self.world * nbytes, (CHANNELS, self.world))
        self.memory = torch.from_file(path[0], shared=True, size=self.world * nbytes, dtype=torch.uint8)
        self.memory[self.rank * nbytes :][:nbytes] = 0xFF
        dist.barrier(group)
        if self.rank == 0:
            os.unlink(path[0])

    def get_buffer(self, rank: int, sizes, dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        if rank != self.rank:
            time.sleep(random.random() * self.delay_s)
        mine = self.memory[rank * self.nbytes :][: self.nbytes].view(dtype)
        return mine[storage_offset:][: int(np.prod(sizes))].view(*sizes)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.counters[channel, self.rank] += 1
        mine, deadline = self.counters[channel, self.rank], time.monotonic() + timeout_ms / 1000
        while self.counters[channel].min() < mine:
            time.sleep(1e-4)
            assert time.monotonic() < deadline, "a rank did not come to the barrier"


class SideThread:
    """Runs what is submitted in order, each a little later."""

    def __init__(self, delay_s: float):
        self.delay_s, self.work = delay_s, queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work):
        done, errors = threading.Event(), []
        self.work.put((work, done, errors))

        def wait() -> None:
            assert done.wait(PATIENCE_S), "the side thread hangs"
            if errors:
                raise errors[0]

        return wait

    def _run(self) -> None:
        while True:
            work, done, errors = self.work.get()
            time.sleep(random.random() * self.delay_s)
            try:
                work()
            except BaseException as error:
                errors.append(error)
            done.set()


class PoisoningTransport(PeerTransport):
    """Fills the slot that a shipment gets with NaN before the shipment packs into it."""

    def open(self, parts, dtype, device):
        shipment = super().open(parts, dtype, device)
        slot = (self._opened - 1) % 2 * self._slot_bytes
        if self._memory is not None:
            self._memory.get_buffer(self.rank, (self._slot_bytes,), torch.uint8, slot).fill_(0xFF)
        return shipment


def use_stand_in(group, kind: type[PeerTransport] = PoisoningTransport, delay_s: float = 0.0) -> PeerTransport:
    """Give the group's `peer` transport the stand-ins; collective."""

    def make_memory(nbytes: int) -> SharedMemory:
        dist.barrier(group)
        return SharedMemory(nbytes, group, delay_s)

    timeout_ms = group_timeout_ms(group, torch.device("cpu"))
    made = kind(dist.get_rank(group), make_memory, SideThread(delay_s), timeout_ms)
    transports._MADE.setdefault(group, {})["peer"] = made
    return made
