"""Starting N local rank processes of the same command, for `--cp N` without torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

_GRACE_S = 10.0  # how long the other ranks may take to end by themselves once one has failed


def run_local_ranks(world: int, argv: list[str]) -> int:
    """Run ``python -m cp_engine ARGV`` on ``world`` local ranks and return the exit code of the first that failed.

    Rank 0 writes to our stdout; the others' stdout is dropped, their stderr is ours. When one rank fails, the rest
    are ended after a grace period, since they may wait for it in a collective.
    """
    processes = [_start(rank, world, argv, port) for port in [_free_port()] for rank in range(world)]
    try:
        return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(rank: int, world: int, argv: list[str], port: int) -> subprocess.Popen:
    env = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # Several ranks on one machine would each take all cores otherwise; torchrun does the same.
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    stdout = None if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "cp_engine", *argv], env=env, stdout=stdout)


def _wait(processes: list[subprocess.Popen]) -> int:
    deadline = None
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if all(code is not None for code in codes):
            return failed[0] if failed else 0
        if failed and deadline is None:
            first, deadline = failed[0], time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return first
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
