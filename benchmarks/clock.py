"""Times and memory on a device: CUDA events and allocator counters on a GPU, a wall clock on the CPU of the tests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS, WARM_UPS = 7, 1
FEWEST, ENOUGH_MS = 3, 1000  # a call so slow that this much time is timed already is repeated less often


def elapsed_ms(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call on the device's current stream."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call that has run before."""
    for _ in range(WARM_UPS):
        call()
    times: list[float] = []
    while len(times) < REPEATS and (len(times) < FEWEST or sum(times) < ENOUGH_MS):
        times.append(elapsed_ms(call, device))
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Return when the device has finished everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Most memory allocated since `reset_peak`; 0 on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else 0.0
