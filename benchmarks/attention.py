"""Times of tree attention: our backends and what they compete with, on trees of papers and on real ones.

    python -m benchmarks.attention --workloads dualkv_16k28 tau_calls --record
    torchrun --nproc-per-node 2 -m benchmarks.attention --workloads art_5k16x100 --record

On one GPU all methods are compared; on several ours, by layout and exchange (`benchmarks.attention_ranks`).
Results are compared with the reference kernel in float32 on the same inputs. A method whose outputs differ gets no
speed-up. Times are medians by CUDA events. TFLOP/s counts visible pairs only: forward 4 * pairs * Hq * D, backward 2.5
times that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import attention_ranks, clock
from benchmarks.attention_layouts import LAYOUTS, place, predicted_ms
from benchmarks.attention_problem import Problem, make_problem, right
from benchmarks.attention_rivals import BACKENDS, FLAT, METHODS, OURS, RIVALS
from benchmarks.attention_workloads import DATA, WORKLOADS
from benchmarks.child import in_child
from benchmarks.record import RESULTS, append, stamp
from cp_engine.sharding.attention_plan import EXCHANGES
from cp_engine.sharding.exchange.transport import TRANSPORTS

PACKAGES = ("torch", "triton", "nvidia-cudnn-frontend", "flash-attn-4")
COLUMNS = ("fwd_ms", "bwd_ms", "tflops_fwd", "tflops_bwd", "vs_flat", "vs_best", "max_err", "peak_gib")
COLUMNS += ("predicted_ms", "seconds")
# PyTorch's varlen FlashAttention-2 ends in an illegal memory access on the thousands of short rollouts of `game24`; its
# process can use the GPU no more.
IN_A_CHILD = ("flat_fa2",)


def measure(name: str, method: str, problem: Problem) -> dict:
    """The record of one method on one workload, without the comparisons between methods."""
    began = time.perf_counter()
    problem.truth  # noqa: B018 - once for all methods, and no part of what this one holds
    found: dict[str, torch.Tensor] = {}
    forward, backward, peak = 0.0, 0.0, 0.0
    for call in METHODS[method](problem):
        call.forward()
        call.backward()
        clock.reset_peak(problem.device)  # the first pass may have held what compiling and autotuning need
        call.forward()
        call.backward()
        peak = max(peak, clock.peak_gib(problem.device))
        call.results_into(found)
        forward += clock.median_ms(call.forward, problem.device)
        backward += clock.median_ms(call.backward, problem.device)
    flops = problem.forward_flops
    return {
        "bench": "attention",
        "workload": name,
        "method": method,
        "exchange": None,
        "layout": None,
        "gpus": 1,
        "tokens": problem.forest.tokens,
        "fwd_ms": round(forward, 3),
        "bwd_ms": round(backward, 3),
        "tflops_fwd": round(flops / forward / 1e9, 1),
        "tflops_bwd": round(2.5 * flops / backward / 1e9, 1),
        "max_err": problem.error(found),
        "peak_gib": peak,
        "moved_mib": 0,
        "exposed_ms": 0,
        "pair_ratio": round(problem.forest.flat_pairs / problem.forest.tree_pairs, 3),
        "seconds": round(time.perf_counter() - began, 1),
    }


def compare(records: list[dict]) -> None:
    """Add, to the records of one workload, ``vs_flat``: how many times faster than the fastest flat method, and
    ``vs_best``: time over the fastest rival's. None where the outputs are wrong or there is nothing to compare with."""

    def best(methods) -> float | None:
        return min((r["fwd_ms"] + r["bwd_ms"] for r in records if right(r) and r["method"] in methods), default=None)

    flat, rival = best(FLAT), best(RIVALS)
    for record in records:
        total = record["fwd_ms"] + record["bwd_ms"]
        record["vs_flat"] = round(flat / total, 3) if right(record) and flat else None
        record["vs_best"] = round(total / rival, 3) if right(record) and rival else None


def measure_alone(name: str, method: str, data: Path) -> dict:
    """`measure` in a process that has nothing else to lose."""
    return measure(name, method, make_problem(WORKLOADS[name], data=data, device=torch.device("cuda", 0)))


def run_workload(
    name: str,
    methods: list[str],
    data: Path,
    device: torch.device,
    finished: Callable[[list[dict]], None] = lambda records: None,
    **options,
) -> list[dict]:
    """Measure methods on one workload and print them as they finish.

    Args:
        finished: gets the records, also those of the methods that were done when something stopped the run.
        options: those of `make_problem`.
    """
    began = time.perf_counter()
    problem = make_problem(WORKLOADS[name], data=data, device=device, **options)
    problem.truth  # noqa: B018
    clock.wait(device)
    made = time.perf_counter() - began
    print(f"{name}: {problem.forest.tokens:,} tokens, {problem.workload}, truth in {made:.1f} s", flush=True)
    records: list[dict] = []
    try:
        measure_methods(name, methods, data, problem, records)
    finally:
        finish(records, problem)
        finished(records)
    return records


def measure_methods(name: str, methods: list[str], data: Path, problem: Problem, records: list[dict]) -> None:
    """Add a record for each method that runs."""
    for method in methods:
        began = time.perf_counter()
        try:
            if method in IN_A_CHILD and problem.device.type == "cuda":
                records.append(in_child(measure_alone, name, method, data))
            else:
                records.append(measure(name, method, problem))
        except Exception as error:  # noqa: BLE001
            # A method that is not installed, does not fit or does not compile is a gap in the table, not the end.
            told = (str(error).splitlines() or [""])[0][:200]
            seconds = time.perf_counter() - began
            print(f"  {method:<10}  {seconds:5.1f} s  {type(error).__name__}: {told}", flush=True)
        else:
            shown = "  ".join(f"{key} {records[-1][key]}" for key in ("seconds", "fwd_ms", "bwd_ms", "max_err"))
            print(f"  {method:<10}  {shown}", flush=True)
        clock.release(problem.device)


def finish(records: list[dict], problem: Problem) -> None:
    """Compare the records of one workload and print them."""
    compare(records)
    alone = place("contiguous", problem.forest, 1, problem.workload)
    predicted = predicted_ms(alone, problem.workload)["gather"]
    for record in records:
        record["predicted_ms"] = predicted if record["method"] in OURS else None
    print_table(records, ("method", *COLUMNS))


def print_table(records: list[dict], columns: tuple[str, ...]) -> None:
    cells = [list(columns), *([str(record[column]) for column in columns] for record in records)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def installed(packages: tuple[str, ...]) -> list[str]:
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return [package for package in packages if package in names]


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    # Inductor times FlexAttention on a full mask to tune it: five minutes a workload, and no faster at head size 128.
    usual = [method for method in METHODS if method != "flex_tuned"]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=usual, help="on one GPU; all but flex_tuned")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="on several GPUs")
    parser.add_argument("--exchanges", nargs="+", choices=EXCHANGES, default=list(EXCHANGES), help="on several GPUs")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="on several GPUs")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="on several GPUs")
    parser.add_argument("--head-groups", type=int, help="of `gather`; by default what it chooses")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real sets (holds tokens/)")
    parser.add_argument("--record", action="store_true", help="append to the file of results, workload by workload")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where --record appends")
    parser.add_argument("--commit", help="the commit to record, where this is a copy without history")
    return parser.parse_args(given)


def main() -> None:
    arguments = arguments_of()
    # A time limit ends the run as an error does: what is finished is written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.perf_counter()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    device = attention_ranks.start() if ranks > 1 else torch.device("cuda", 0)
    first = int(os.environ.get("RANK", "0")) == 0
    stamped = None
    if arguments.record and first:
        card = torch.cuda.get_device_name()
        stamped = stamp(*installed(PACKAGES), card=card, commit=arguments.commit)

    def record(records: list[dict]) -> None:
        if stamped is not None:
            append(records, stamped, arguments.results)

    for name in arguments.workloads:
        if ranks > 1:
            attention_ranks.run_workload(name, arguments, device, record)
        else:
            run_workload(name, arguments.methods, arguments.data, device, record)
        clock.release(device)
    if first:
        print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
