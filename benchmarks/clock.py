"""Times and memory on a device: CUDA events and allocator counters on a GPU, a wall clock on the CPU of the tests."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPEATS, WARM_UPS = 7, 1
FEWEST, ENOUGH_MS = 3, 1000  # a call so slow that this much time is timed already is repeated less often
MOST = 100  # of a call of some microseconds: the idling before each (below) takes a hundred times as long
# A GPU that was idle, while the host compiled or planned, needs a while to reach its clock, and short calls scatter:
# the same kernel read 1 to 10 % apart with one warm-up and 7 repeats.
GPU_WARM_UP_MS, GPU_TIMED_MS = 100, 150
# The device idles so long (about 3 ms) before the first call, so that the host has launched it by then: in a model the
# host is ahead of the device, and what a call needs of the host before its first kernel is not seen.
HEAD_START_CYCLES = 6_000_000


def laps_ms(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Times of calls that follow each other on the device's current stream."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    torch.cuda._sleep(HEAD_START_CYCLES)
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call that has run before."""
    warm_up_ms, timed_ms = (GPU_WARM_UP_MS, GPU_TIMED_MS) if device.type == "cuda" else (0, 0)
    times: list[float] = []
    while len(times) < WARM_UPS or (len(times) < MOST and sum(times) < warm_up_ms):
        times += laps_ms([call], device)
    times = []
    while len(times) < FEWEST or (len(times) < MOST and sum(times) < ENOUGH_MS and _too_little(times, timed_ms)):
        times += laps_ms([call], device)
    return statistics.median(times)


def _too_little(times: list[float], timed_ms: float) -> bool:
    return len(times) < REPEATS or sum(times) < timed_ms


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


def release(device: torch.device) -> None:
    """Give memory of dropped tensors back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
