"""The ranks of a run: joining the process group and leaving it with the right exit code."""

from __future__ import annotations

import datetime
import gc
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks, or among those of its CP group.

    ``group`` is None for a single rank, which then calls no collective.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None
    device: torch.device
    per_node: int | None = None  # ranks on this machine; None: all of them

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def under_launcher() -> bool:
    """Whether torchrun (or our own launcher) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join_ranks(timeout_s: int = 600) -> Ranks:
    """Join the process group that the launcher describes: NCCL where there are GPUs, gloo otherwise.

    A rank that waits longer than ``timeout_s`` seconds in a collective raises instead of hanging. A process group that
    the program, or an engine before, has made already is used as it is, with its timeout.

    Raises:
        ValueError: for a machine with fewer GPUs than ranks, or a group that cannot carry tensors of host and device.
    """
    joined, device = dist.is_initialized(), torch.device("cpu")
    if torch.cuda.is_available():
        present = torch.cuda.current_device() if joined else 0
        local, count = int(os.environ.get("LOCAL_RANK", present)), torch.cuda.device_count()
        if local >= count:
            raise ValueError(f"local rank {local} has no GPU: this machine has {count}, start at most that many ranks")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    # Tensors in host memory too: agreeing over them does not wait for the device, and offloaded gradients live there.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if joined:
        if dist.get_world_size() > 1:
            _require_backends(dist.get_backend_config(), backend)
    elif not under_launcher() or int(os.environ["WORLD_SIZE"]) == 1:
        return Ranks(0, 1, None, device)
    else:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    if dist.get_world_size() == 1:
        return Ranks(0, 1, None, device)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, device, per_node)


def _require_backends(present: str, needed: str) -> None:
    """Refuse a process group, by its backends such as ``cuda:nccl``, that lacks one of those needed."""
    parts = [part if ":" in part else f"cpu:{part}" for part in needed.split(",")]
    if not set(parts) <= set(present.split(",")):
        raise ValueError(
            f"the process group that the program made has the backends {present}, and the engine needs "
            f"{','.join(parts)}: make it with torch.distributed.init_process_group({needed!r}), or leave it to the "
            "engine"
        )


def shutdown(code: int) -> None:
    """End this rank process with ``code``; does not return.

    Interpreter exit with live gloo threads and sharded tensors aborts now and then after all work is done, so every
    rank waits for the others, drops the group, flushes and leaves without running destructors. A rank that failed
    leaves at once: dropping the group waits for what NCCL has in flight, which the others may never join, and they
    learn of the failure from its end.
    """
    if code == 0 and dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
