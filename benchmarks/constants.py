"""The planner's constants (`cp_engine.sharding.cost`) as measured here, beside those in the file.

    python -m benchmarks.constants                           # one GPU: attention, dense products, memory
    torchrun --nproc-per-node 2 -m benchmarks.constants      # the same, and the links between two GPUs of a host

Prints a line a constant, then how far predictions with the file's and with the measured constants are from the measured
attention times. Nothing is written: the constants are edited by hand.

Shapes: W workloads, M message sizes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import attention_ranks, clock
from benchmarks.attention_layouts import attention_alone
from benchmarks.attention_problem import Problem, make_problem
from benchmarks.attention_ranks import say
from benchmarks.attention_workloads import DATA, WORKLOADS, Workload
from cp_engine.kernels.attention import attention, attention_backward
from cp_engine.sharding.cost import H200, MIB, Costs
from cp_engine.sharding.layer_time import kernel_time
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.measure import TILE, Survey, measure

# Head sizes and the trees whose times a head size's constants are fitted on.
FITTED = {
    128: ("grpo_5k16", "dualkv_4k28", "dualkv_16k28", "tau_calls", "toolbench", "game24", "art_5k16x100"),
    256: ("d256_16k16", "tau_calls_d256"),
    64: ("grpo_5k16", "tau_calls", "toolbench"),
}
STEPS = ("forward", "backward")
MESSAGES_MIB = (1, 4, 16, 64, 256)  # sent to the peer
PRODUCT = 8192  # rows and columns of the dense product
COPY_MIB = 1024
GROUPS = 4  # head groups whose cost over one is counted
OVERLAP_MIB = 256


@dataclass(frozen=True)
class Line:
    """A constant in integer nanoseconds of the unit that the file gives it."""

    name: str
    file: int
    measured: int

    def __str__(self) -> str:
        return (
            f"{self.name:<28} file {self.file:>10,}  measured {self.measured:>10,}  x {self.measured / self.file:.3f}"
        )


@dataclass(frozen=True)
class Sample:
    """One attention step of one workload on one GPU."""

    workload: str
    size: int  # head size
    step: str
    heads: int
    tiles: int
    query_tiles: int
    ms: float

    def predicted(self, costs: Costs) -> float:
        shape = attention_alone(Workload("", self.heads, self.heads, self.size))
        both = kernel_time(self.tiles, self.query_tiles, self.heads, shape, costs)
        return int(both[STEPS.index(self.step)]) / 1e6


def attention_calls(problem: Problem, groups: int = 1) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of `auto`, the kv heads in ``groups`` calls."""
    p, call = problem, {"intervals": problem.intervals, "scale": problem.scale, "backend": "auto"}
    parts = list(zip(*(x.chunk(groups, 1) for x in (p.q, p.k, p.v, p.dout)), strict=True))
    # As `gather` calls it: fetched keys are whole, queries and gradients are slices.
    parts = [(q, k.contiguous(), v.contiguous(), dout) for q, k, v, dout in parts]
    saved: list = [None] * groups

    def forward():
        for index, (q, k, v, _) in enumerate(parts):
            saved[index] = attention(q, k, v, **call)

    def backward():
        for index, (q, k, v, dout) in enumerate(parts):
            attention_backward(q, k, v, *saved[index], dout, **call)

    return forward, backward


def attention_samples(size: int, data: Path, device: torch.device, **options) -> list[Sample]:
    """Times of the trees of one head size."""
    samples = []
    for name in FITTED[size]:
        problem = make_problem(replace(WORKLOADS[name], size=size), data=data, device=device, **options)
        survey = Survey(problem.forest)
        figures = measure(survey, contiguous_layout(problem.forest, 1), recurrent=False)
        counts = problem.workload.query_heads, int(figures.tiles[0]), -(-problem.forest.tokens // TILE)
        for step, call in zip(STEPS, attention_calls(problem), strict=True):
            call()
            samples.append(Sample(name, size, step, *counts, clock.median_ms(call, device)))
        del problem
        clock.release(device)
    return samples


def fit_attention(samples: list[Sample]) -> dict[str, tuple[dict[int, int], int]]:
    """By step: nanoseconds of 1,000 touched tiles of a head, by head size, and of 1,000 query tiles of a head.

    Both are fitted on head size 128, where relative errors are smallest; other sizes get a tile cost with the same cost
    of a query tile. Negative ones become 0.
    """
    fitted = {}
    for step in STEPS:
        mine = [s for s in samples if s.step == step]
        base = [s for s in mine if s.size == 128]
        counts = np.array([[s.tiles, s.query_tiles] for s in base]) * np.array([[s.heads] for s in base]) / 1000
        took = np.array([s.ms * 1e6 for s in base])
        tile, query = np.linalg.lstsq(counts / took[:, None], np.ones(len(base)), rcond=None)[0]
        if query < 0:
            query, tile = 0.0, 1 / np.mean(counts[:, 0] / took)
        tiles = {128: round(tile)}
        for size in {s.size for s in mine} - {128}:
            each = [(s.ms * 1e9 / s.heads - s.query_tiles * query) / s.tiles for s in mine if s.size == size]
            tiles[size] = round(max(0.0, float(np.mean(each))))
        fitted[step] = dict(sorted(tiles.items())), round(query)
    return fitted


def with_attention(costs: Costs, fitted: dict[str, tuple[dict[int, int], int]]) -> Costs:
    """The costs with fitted constants of attention."""
    changed = {}
    for step, (tiles, query) in fitted.items():
        known = dict(getattr(costs, f"tile_{step}")) | tiles
        changed |= {f"tile_{step}": tuple(sorted(known.items())), f"query_tile_{step}": query}
    return replace(costs, **changed)


def attention_lines(costs: Costs, fitted: dict[str, tuple[dict[int, int], int]]) -> list[Line]:
    lines = []
    for step, (tiles, query) in fitted.items():
        known = dict(getattr(costs, f"tile_{step}"))
        lines += [Line(f"tile_{step}[{size}]", known[size], tile) for size, tile in tiles.items()]
        lines.append(Line(f"query_tile_{step}", getattr(costs, f"query_tile_{step}"), query))
    return lines


def card_lines(costs: Costs, device: torch.device, product: int = PRODUCT, copy_mib: int = COPY_MIB) -> list[Line]:
    """Dense products and copies in memory."""
    a, b = (torch.randn(product, product, device=device, dtype=torch.bfloat16) for _ in range(2))
    multiply = clock.median_ms(lambda: a @ b, device) * 1e6 / (2 * product**3 / 1e12)
    source = torch.ones(copy_mib * MIB // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = clock.median_ms(lambda: target.copy_(source), device) * 1e6 / (2 * copy_mib)
    lines = [("tera_product", multiply), ("memory_mib", copy)]
    return [Line(name, getattr(costs, name), round(took)) for name, took in lines]


def group_line(costs: Costs, problem: Problem) -> Line:
    """What one more head group adds to forward and backward."""
    took = {}
    for groups in (1, GROUPS):
        calls = attention_calls(problem, groups)
        for call in calls:
            call()
        took[groups] = sum(clock.median_ms(call, problem.device) for call in calls)
    further = (took[GROUPS] / took[1] - 1) / (GROUPS - 1)
    return Line("group_per_mille", costs.group_per_mille, round(1000 * further))


def slowest_ms(call: Callable[[], None], device: torch.device) -> float:
    """Median over repeats of the slowest rank's time. Every rank must call it."""
    start = torch.ones(1, device=device)
    times = []
    for _ in range(attention_ranks.WARM_UPS + attention_ranks.REPEATS):
        dist.all_reduce(start)
        times += clock.laps_ms([call], device)
    slowest = torch.tensor(times[attention_ranks.WARM_UPS :], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


def fit_link(sizes_mib: tuple[float, ...], took_ms: list[float]) -> tuple[int, int]:
    """Nanoseconds of a MiB and of a message without bytes: a line through all sizes, by relative errors."""
    took = np.array(took_ms) * 1e6
    counts = np.stack([np.array(sizes_mib, float), np.ones(len(took))], 1)
    each, latency = np.linalg.lstsq(counts / took[:, None], np.ones(len(took)), rcond=None)[0]
    return round(each), max(0, round(latency))


def all_to_all(mib: float, device: torch.device) -> Callable[[], None]:
    """Each of two ranks sends ``mib`` to the other one."""
    sent = torch.ones(2 * int(mib * MIB), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent)


def send(mib: float, device: torch.device) -> Callable[[], None]:
    """Both ranks send and receive ``mib`` at once, as a ring does."""
    peer = 1 - dist.get_rank()
    sent = torch.ones(int(mib * MIB), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def call():
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return call


def pull(mib: float, device: torch.device) -> Callable[[], None]:
    """Both ranks read ``mib`` out of the other's memory, by copy engines."""
    import torch.distributed._symmetric_memory as symmetric_memory

    shared = symmetric_memory.empty(int(mib * MIB), dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(shared, dist.group.WORLD)
    there = handle.get_buffer(1 - dist.get_rank(), shared.shape, shared.dtype)
    received = torch.empty_like(there)

    def call():
        assert shared.shape == there.shape  # keeps the memory that the peer reads
        received.copy_(there)

    return call


LINKS = {"all_to_all": all_to_all, "send": send, "pull": pull}


def link_lines(
    costs: Costs, device: torch.device, names=tuple(LINKS), sizes: tuple[float, ...] = MESSAGES_MIB
) -> list[Line]:
    """Every rank must call it."""
    lines = []
    for name in names:
        took = [slowest_ms(LINKS[name](mib, device), device) for mib in sizes]
        say(f"{name}: " + ", ".join(f"{mib} MiB {ms * 1e3:.0f} us" for mib, ms in zip(sizes, took, strict=True)))
        each, latency = fit_link(sizes, took)
        for constant, value in ((f"{name}_mib", each), (f"{name}_latency", latency)):
            lines.append(Line(constant, getattr(costs, constant), value))
    return lines


def slowdown_line(costs: Costs, problem: Problem) -> Line:
    """How much longer attention takes while rows are pulled, in percent of the pull. Every rank must call it."""
    device, side = problem.device, torch.cuda.Stream(problem.device)
    forward, _ = attention_calls(problem)
    fetch = pull(OVERLAP_MIB, device)
    forward()
    alone, one = slowest_ms(forward, device), slowest_ms(fetch, device)
    pulls = max(1, int(alone / one))

    def together():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(pulls):
                fetch()
        forward()

    longer = slowest_ms(together, device) - alone
    clock.wait(device)
    dist.barrier()  # the peer has read what it reads here
    return Line("pull_slowdown_percent", costs.pull_slowdown_percent, round(100 * longer / (pulls * one)))


def report(samples: list[Sample], before: Costs, after: Costs) -> list[str]:
    """Measured attention times beside the predictions of two sets of constants."""
    lines = []
    for s in samples:
        errors = [f"{s.predicted(costs):.2f} ({s.predicted(costs) / s.ms - 1:+.1%})" for costs in (before, after)]
        what = f"{s.workload}, D {s.size}, {s.step}"
        lines.append(f"{what:<36} measured {s.ms:8.2f} ms  file {errors[0]:>18}  fitted {errors[1]:>18}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, choices=FITTED, default=[128, 256], help="head sizes, with 128")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real sets (holds tokens/)")
    arguments = parser.parse_args()
    began = time.perf_counter()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    device = attention_ranks.start() if ranks > 1 else torch.device("cuda", 0)
    if int(os.environ.get("RANK", "0")) == 0:
        samples = [s for size in arguments.sizes for s in attention_samples(size, arguments.data, device)]
        fitted = fit_attention(samples)
        lines = attention_lines(H200, fitted) + card_lines(H200, device)
        lines.append(group_line(H200, make_problem(WORKLOADS["art_5k16x100"], device=device)))
        print("\n".join([*map(str, lines), *report(samples, H200, with_attention(H200, fitted))]), flush=True)
    if ranks > 1:
        dist.barrier()
        lines = link_lines(H200, device)
        lines.append(slowdown_line(H200, make_problem(WORKLOADS["dualkv_4k28"], device=device)))
        say("\n".join(map(str, lines)))
        dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
