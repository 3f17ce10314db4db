"""Tree attention over several GPUs: a layout and an exchange at a time, beside one GPU with the same pairs to itself.

    torchrun --nproc-per-node 2 -m benchmarks.attention --workloads art_5k16x100 --layouts planner spread --record

P GPUs get P times the pairs of one (`workload_forest`). ``efficiency`` is visible pairs a GPU and second over those of
rank 0 alone with a P-th of the pairs, forward and backward, in the same run. ``exposed_ms`` is the time over that of
the same calls when nothing moves and nobody waits. A time is that of the slowest rank, from a common start on the
streams; medians. ``moved_mib`` is what the busiest rank sends or receives in a layer, from the plan.

Shapes: T tokens, n local rows, P ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks import clock
from benchmarks.attention_exchange import rows_present
from benchmarks.attention_layouts import place, predicted_ms
from benchmarks.attention_problem import NAMES, Problem, make_problem, right
from benchmarks.attention_workloads import WORKLOADS, Workload, one_gpu_forest, workload_forest
from cp_engine.kernels.attention import attention, attention_backward
from cp_engine.layers.attention import attention_tables, moved_bytes, tree_attention
from cp_engine.prediction import Placement
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.exchange.transport import transport_for

REPEATS, WARM_UPS = 5, 2
COLUMNS = ("layout", "exchange", "fwd_ms", "bwd_ms", "layer_ms", "exposed_ms", "moved_mib", "efficiency")
COLUMNS += ("predicted_ms", "max_err", "peak_gib", "seconds")


@dataclass(frozen=True)
class Times:
    """Of one layer on the slowest rank; ms."""

    forward: float
    layer: float  # forward and backward


class Layer:
    """This rank's part of one attention layer."""

    def __init__(self, problem: Problem, placement: Placement, exchange: str, options: argparse.Namespace):
        self.problem, self.backend, rank = problem, options.backend, dist.get_rank()
        self.plan = attention_plan(placement.forest, placement.layout, rank, exchange)
        self.tables = attention_tables(
            self.plan, rank, problem.device, transport=options.transport, head_groups=options.head_groups
        )
        self.tokens = torch.as_tensor(placement.layout.rank_tokens(rank), device=problem.device)
        rows = (self._local(x) for x in (problem.q, problem.k, problem.v, problem.dout))
        self.q, self.k, self.v, self.dout = rows
        for x in (self.q, self.k, self.v):
            x.requires_grad_()

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.tokens] if len(self.tokens) else x.new_zeros((1, *x.shape[1:]))

    def forward(self):
        group = dist.group.WORLD
        self.out = tree_attention(self.q, self.k, self.v, self.tables, group, self.problem.scale, self.backend)

    def backward(self):
        self.grads = torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout)

    def moved_mib(self) -> float:
        """What this rank sends or receives, whichever is more, in forward and backward."""
        w = self.problem.workload
        moved = moved_bytes(self.plan, dist.get_rank(), w.query_heads, w.kv_heads, w.size, self.q.dtype)
        return max(moved.forward_out + moved.backward_out, moved.forward_in + moved.backward_in) / 2**20

    def error(self) -> float | None:
        """As `Problem.error`, over the rows of all ranks; equal on all ranks."""
        results = {}
        for name, x in zip(NAMES, (self.out.detach(), *self.grads), strict=True):
            heads = self.problem.checked_heads[name]
            whole = self.problem.truth[name].new_zeros((self.problem.forest.tokens, len(heads), x.shape[2]))
            whole[self.tokens] = x[: len(self.tokens), heads].to(whole.dtype)
            dist.all_reduce(whole)
            results[name] = whole
        return self.problem.error_of_checked(results)


def layer_times(layer: Layer) -> Times:
    """Every rank must call it."""
    device = layer.problem.device
    start = torch.ones(1, device=device)
    forward, whole = [], []
    for repeat in range(WARM_UPS + REPEATS):
        dist.all_reduce(start)  # on the stream: nobody begins before everybody
        laps = clock.laps_ms((layer.forward, layer.backward), device)
        if repeat >= WARM_UPS:
            forward.append(laps[0])
            whole.append(laps[0] + laps[1])
    slowest = torch.tensor([forward, whole], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Times(*(statistics.median(times) for times in slowest.tolist()))


def one_gpu_rate(workload: Workload, forest, backend: str, device, dtype) -> float:
    """Visible pairs a ms of rank 0 alone, forward and backward. The others wait; every rank must call it."""
    rate = torch.zeros(1, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        problem = make_problem(workload, device=device, dtype=dtype, forest=forest)
        call = {"intervals": problem.intervals, "scale": problem.scale, "backend": backend}
        saved = []

        def forward():
            saved[:] = attention(problem.q, problem.k, problem.v, **call)

        def backward():
            attention_backward(problem.q, problem.k, problem.v, *saved, problem.dout, **call)

        laps = [clock.laps_ms((forward, backward), device) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
        rate += forest.tree_pairs / statistics.median(sum(lap) for lap in laps)
    dist.broadcast(rate, 0)
    return float(rate)


def measure(problem: Problem, placement: Placement, exchange: str, options: argparse.Namespace, alone: float) -> dict:
    """What one exchange shows under one layout, the same on all ranks. Every rank must call it.

    Args:
        options: backend, transport and head groups, as on the command line.
        alone: pairs a ms of one GPU.
    """
    began = time.perf_counter()
    layer = Layer(problem, placement, exchange, options)
    layer.forward()
    layer.backward()
    error = layer.error()
    clock.reset_peak(problem.device)
    times = layer_times(layer)
    peak = clock.peak_gib(problem.device)
    with rows_present():
        present = layer_times(layer)
    most = torch.tensor([layer.moved_mib(), peak], dtype=torch.float64, device=problem.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    world, flops = dist.get_world_size(), problem.forward_flops
    backward = times.layer - times.forward
    rate = problem.forest.tree_pairs / world / times.layer
    record = {
        "fwd_ms": round(times.forward, 3),
        "bwd_ms": round(backward, 3),
        "layer_ms": round(times.layer, 3),
        "tflops_fwd": round(flops / world / times.forward / 1e9, 1),
        "tflops_bwd": round(2.5 * flops / world / backward / 1e9, 1),
        "max_err": error,
        "peak_gib": round(float(most[1]), 2),
        "moved_mib": round(float(most[0]), 2),
        "exposed_ms": round(times.layer - present.layer, 3),
        "seconds": round(time.perf_counter() - began, 1),
    }
    return record | {"efficiency": round(rate / alone, 4) if right(record) else None}


def run_workload(
    name: str,
    arguments: argparse.Namespace,
    device: torch.device,
    finished: Callable[[list[dict]], None] = lambda records: None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict]:
    """All layouts and exchanges of one workload. Every rank must call it; returns the same records on all.

    Args:
        finished: gets the records, also those that were done when something stopped the run.
    """
    records: list[dict] = []
    try:
        measure_workload(name, arguments, device, dtype, records)
    finally:
        finished(records)
    return records


def measure_workload(
    name: str, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype, records: list[dict]
) -> None:
    """Add a record for each layout and exchange that runs. Every rank must call it."""
    workload, world = WORKLOADS[name], dist.get_world_size()
    began = time.perf_counter()
    forest = workload_forest(workload.tree, world, arguments.data)
    share = one_gpu_forest(workload.tree, world, arguments.data)
    transport = transport_for(dist.group.WORLD, device, arguments.transport).name
    alone = one_gpu_rate(workload, share, arguments.backend, device, dtype)
    flops = 14 * alone * workload.query_heads * workload.size / 1e9
    say(f"{name}: {forest.tokens:,} tokens on {world} GPUs, {workload}, transport {transport}")
    say(f"  one GPU, {share.tokens:,} tokens: {flops:.0f} TFLOP/s, {time.perf_counter() - began:.1f} s")
    problem = None
    for layout in arguments.layouts:
        placement = place(layout, forest, world, workload)
        if problem is None or problem.forest is not placement.forest:
            del problem
            problem = make_problem(workload, device=device, dtype=dtype, forest=placement.forest)
        predicted = predicted_ms(placement, workload)
        for exchange in arguments.exchanges:
            try:
                found = measure(problem, placement, exchange, arguments, alone)
            except (ValueError, torch.OutOfMemoryError) as error:
                # What an exchange refuses, it refuses on all ranks.
                say(f"  {layout:<10}  {exchange:<8}  {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                continue
            about = {"bench": "attention", "workload": name, "method": arguments.backend, "exchange": exchange}
            about |= {"layout": layout, "gpus": world, "tokens": forest.tokens, "transport": transport}
            about |= {"head_groups": arguments.head_groups}
            about |= {"pieces": int(placement.figures.pieces.max()), "predicted_ms": predicted.get(exchange)}
            records.append(about | found)
            shown = "  ".join(f"{key} {records[-1][key]}" for key in COLUMNS[2:])
            say(f"  {layout:<10}  {exchange:<8}  {shown}")
            clock.release(device)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def start() -> torch.device:
    """Join the ranks that torchrun started, each with a GPU of its own."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=300))
    return device
