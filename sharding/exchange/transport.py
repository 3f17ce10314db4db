"""Moving packed rows between ranks while kernels run: what an exchange asks for, and who carries it out.

A `Shipment` is what one exchange moves in one direction, in parts (a head group, a round). Each rank packs its part
into `Shipment.outgoing`, starts it, goes on computing, and waits for the arrival on its compute stream; the host never
waits. All ranks open the same shipments with the same parts and start their parts in the same order, also ranks that
send or receive nothing.

`PeerTransport` (`cp_engine.sharding.exchange.peer`) reads the rows out of the senders' memory with copy engines;
`CollectiveTransport` calls the process group's all-to-all.

Shapes: P ranks; a part moves rows of a free shape.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from cp_engine.sharding.exchange.waits import waiting
from cp_engine.sharding.row_exchange import Moves

_LOG = logging.getLogger(__name__)
TRANSPORTS = ("auto", "peer", "collective")


@dataclass(frozen=True)
class Part:
    """A part of a shipment; equal on all ranks but for ``moves.rank``."""

    moves: Moves
    row_shape: tuple[int, ...]


class Arrival:
    """Rows on their way. What `wait` returns may be used on the stream that was current when it was called."""

    def __init__(self, received: torch.Tensor, wait: Callable[[], object], kept: object = None):
        self._received, self._wait, self._kept = received, wait, kept

    def wait(self) -> torch.Tensor:
        """[rows_in, *row_shape], senders in rank order. Every arrival must be waited for."""
        with waiting(self._received.device):
            self._wait()
        self._kept = None
        return self._received


class Shipment(Protocol):
    def outgoing(self, part: int) -> torch.Tensor:
        """[rows_out, *row_shape] to pack the part's rows into, receivers in rank order. To be called once a part."""

    def publish(self) -> None:
        """All parts are packed. Where reading waits for the senders, the compute stream waits here, once for all."""

    def start(self, part: int) -> Arrival:
        """The part is packed: start moving it."""


class Transport(Protocol):
    name: str

    def reserve(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        """Make memory for a shipment that will be opened while another one is open; hosts may wait for each other."""

    def open(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Shipment: ...


class CollectiveTransport:
    """All-to-all of the process group, asynchronous: NCCL orders it with the streams, gloo works in its own thread."""

    name = "collective"

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def reserve(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        pass

    def open(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Shipment:
        return _Collectives(self._group, parts, dtype, device)


class _Collectives:
    def __init__(self, group, parts: Sequence[Part], dtype: torch.dtype, device: torch.device):
        self._group, self._parts, self._dtype, self._device = group, parts, dtype, device
        self._packed: dict[int, torch.Tensor] = {}

    def outgoing(self, part: int) -> torch.Tensor:
        self._packed[part] = self._new(part, self._parts[part].moves.rows_out)
        return self._packed[part]

    def publish(self) -> None:
        pass

    def start(self, part: int) -> Arrival:
        moves = self._parts[part].moves
        packed = self._packed.pop(part)
        received = self._new(part, moves.rows_in)
        work = dist.all_to_all_single(
            received, packed, moves.recv_counts, moves.send_counts, group=self._group, async_op=True
        )
        return Arrival(received, work.wait, packed)

    def _new(self, part: int, rows: int) -> torch.Tensor:
        return torch.empty((rows, *self._parts[part].row_shape), dtype=self._dtype, device=self._device)


# What packs a part: it writes all of what it is given, `Shipment.outgoing`.
Pack = Callable[[torch.Tensor], object]


def ship(
    parts: Sequence[Part], packs: Sequence[Pack], like: torch.Tensor, transport: Transport | None
) -> list[torch.Tensor]:
    """A shipment that is packed, started and waited for at once, on the current stream: what came of each part.

    Every rank must call it; parts of which no rank sends anything are left out. For an exchange that runs beside the
    computation call it inside `InFlight`.

    Args:
        like: a tensor of the dtype and on the device of what moves.
        transport: may be None where nothing moves.
    """
    came = [like.new_empty((0, *part.row_shape)) for part in parts]
    moving = [index for index, part in enumerate(parts) if part.moves.counts.any()]
    if not moving:
        return came
    shipment = transport.open([parts[index] for index in moving], like.dtype, like.device)
    for place, index in enumerate(moving):
        packs[index](shipment.outgoing(place))
    shipment.publish()
    arrivals = [shipment.start(place) for place in range(len(moving))]
    for index, arrival in zip(moving, arrivals, strict=True):
        came[index] = arrival.wait()
    return came


# For good: a transport holds its group, and a group's memory is set up once.
_MADE: dict[dist.ProcessGroup, dict[str, Transport]] = {}


def transport_for(group: dist.ProcessGroup, device: torch.device, name: str = "auto") -> Transport:
    """The transport of a process group: made by the first call, in which every rank must take part, then kept.

    Args:
        name: `peer`, `collective`, or `auto`: `peer` where it can run.

    Raises:
        ValueError: on every rank, for an unknown name, or for `peer` where it cannot run.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}; got {name!r}")
    made = _MADE.setdefault(group, {})
    if name not in made:
        made[name] = _make(group, device, name)
    return made[name]


def _make(group: dist.ProcessGroup, device: torch.device, name: str) -> Transport:
    if name == "collective":
        return CollectiveTransport(group)
    reason = _why_not_peer(group, device)
    if name == "peer" and reason is not None:
        raise ValueError(f"transport peer {reason}. Use transport collective or auto")
    if name == "auto":
        # One transport, hence one staging memory, whether it was named or found.
        chosen = "peer" if reason is None else "collective"
        first = dist.get_rank(group) == 0
        why = "all ranks share a host" if reason is None else f"peer {reason}"
        _LOG.log(logging.INFO if first else logging.DEBUG, "exchanges use transport %s: %s", chosen, why)
        return transport_for(group, device, chosen)
    from cp_engine.sharding.exchange.peer import on_cuda

    return on_cuda(group, device)


def _why_not_peer(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why ranks cannot read each other's memory, the same on all of them; None where they can."""
    if device.type != "cuda":
        return f"needs GPUs; the tensors are on {device}"
    if dist.get_world_size(group) == 1:
        return "needs more than one rank"
    found: list[tuple[str, int, str | None]] = [("", 0, None)] * dist.get_world_size(group)
    dist.all_gather_object(found, (socket.gethostname(), device.index, why_no_symmetric_memory()), group=group)
    hosts = sorted({host for host, _, _ in found})
    if len(hosts) > 1:
        return f"needs all ranks on one host; they are on {len(hosts)}: {', '.join(hosts[:4])}"
    for _, _, missing in found:
        if missing is not None:
            return missing
    devices = [index for _, index, _ in found]
    if len(set(devices)) < len(devices):
        return f"needs a visible GPU of its own for each rank; the ranks use the devices {devices}"
    return why_devices_apart(devices)


def why_devices_apart(devices: Sequence[int]) -> str | None:
    """Why GPUs of this host cannot read each other's memory; None where they can."""
    apart = [
        (one, other)
        for one in devices
        for other in devices
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    return f"needs GPUs that read each other's memory; devices {apart[0]} do not" if apart else None


def why_no_symmetric_memory() -> str | None:
    """What this torch lacks for reads of other ranks' memory; None where it has it."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return "needs torch.distributed._symmetric_memory, which this torch does not have"
    absent = [name for name in ("empty", "rendezvous") if not hasattr(_symmetric_memory, name)]
    return f"needs torch.distributed._symmetric_memory.{absent[0]}, which this torch lacks" if absent else None
