"""Starting N local rank processes of the same command, for `--cp N` without torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

_GRACE_S = 10.0  # how long the other ranks may take to end by themselves once one has failed


def run_local_ranks(world: int, argv: list[str]) -> int:
    """Run ``python -m cp_engine ARGV`` on ``world`` local ranks and return the exit code of the first that failed.

    Rank 0 writes to our stdout; the others' stdout is dropped, their stderr is ours. When one rank fails, the rest
    are ended after a grace period, since they may wait for it in a collective. Whoever terminates us ends them all.
    """
    # By default SIGTERM would skip the `finally` below and leave the ranks running.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
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
    first, deadline = 0, None
    while True:
        codes = [process.poll() for process in processes]
        if deadline is None and any(codes):
            first, deadline = next(code for code in codes if code), time.monotonic() + _GRACE_S
        if all(code is not None for code in codes) or (deadline is not None and time.monotonic() > deadline):
            return first
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
