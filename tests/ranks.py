"""Rank processes for tests: started once per world size, reused by every test.

`run_ranks(3, fn, *args)` calls ``fn(*args)`` on three gloo ranks and returns their results in rank order. ``fn`` must
be a module-level function. A rank that raises fails the test with its traceback; the pool is then replaced.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import traceback

_POOLS: dict[int, _Pool] = {}


def run_ranks(world: int, fn, *args, timeout: float = 300.0) -> list:
    pool = _POOLS.get(world)
    if pool is None:
        pool = _POOLS[world] = _Pool(world)
    try:
        return pool.call(fn, args, timeout)
    except BaseException:
        pool.close()
        _POOLS.pop(world, None)
        raise


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class _Pool:
    def __init__(self, world: int):
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, port), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, fn, args, timeout: float) -> list:
        for pipe in self.pipes:
            pipe.send((fn, args))
        results: dict[int, object] = {}
        waiting = dict(enumerate(self.pipes))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout)
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting)} of {len(self.pipes)} gave no answer in {timeout:.0f} s")
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                ok, value = waiting.pop(rank).recv()
                if not ok:
                    raise RuntimeError(f"rank {rank} of {len(self.pipes)} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()


def _serve(pipe, rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, fn(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@atexit.register
def _close_all() -> None:
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()
