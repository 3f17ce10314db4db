"""Times of tree attention on one GPU: our backends and what they compete with, on trees of papers and on real ones.

    python -m benchmarks.attention --workloads dualkv_16k28 tau_calls --record

Every result is compared with the reference kernel in float32 on the same inputs. A method whose outputs differ gets no
speed-up. Times are medians of `REPEATS` after `WARM_UPS`, by CUDA events. TFLOP/s counts visible pairs only: forward
4 * pairs * Hq * D, backward 2.5 times that.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import statistics
from pathlib import Path

import torch

from benchmarks.attention_rivals import FLAT, METHODS, RIVALS, Problem
from benchmarks.attention_workloads import DATA, WORKLOADS, forest_of
from benchmarks.record import append, stamp
from cp_engine.kernels.attention import Intervals
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout

REPEATS, WARM_UPS = 7, 3
MOST_ERROR = 1e-2  # relative, in the Frobenius norm; bf16 kernels show 0.002 to 0.003
PACKAGES = ("torch", "triton", "nvidia-cudnn-frontend", "flash-attn-4")
COLUMNS = ("fwd_ms", "bwd_ms", "tflops_fwd", "tflops_bwd", "vs_flat", "vs_best", "max_err", "peak_gib")


def make_problem(name: str, data: Path) -> Problem:
    workload = WORKLOADS[name]
    forest = forest_of(workload.tree, data)
    made = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (forest.tokens, heads, workload.size)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=made)

    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0), "cuda")
    q, k, v, dout = (draw(heads) for heads in (workload.query_heads, *[workload.kv_heads] * 2, workload.query_heads))
    return Problem(workload, forest, intervals, q, k, v, dout)


def median_ms(call) -> float:
    """Median time of a call on the device."""
    times = []
    for repeat in range(WARM_UPS + REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if repeat >= WARM_UPS:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(name: str, method: str, problem: Problem) -> dict:
    """The record of one method on one workload, without the comparisons between methods."""
    torch.cuda.reset_peak_memory_stats()
    made = METHODS[method](problem)
    made.forward()
    made.backward()
    results = made.results()
    error = max(float((results[part].float() - true).norm() / true.norm()) for part, true in problem.truth.items())
    del results
    forward, backward = median_ms(made.forward), median_ms(made.backward)
    workload = problem.workload
    flops = 4 * problem.forest.tree_pairs * workload.query_heads * workload.size
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
        "max_err": float(f"{error:.3g}"),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "moved_mib": 0,
        "exposed_ms": 0,
        "pair_ratio": round(problem.forest.flat_pairs / problem.forest.tree_pairs, 3),
    }


def compare(records: list[dict]) -> None:
    """Add, to the records of one workload, ``vs_flat``: how many times faster than the fastest flat method, and
    ``vs_best``: time over the fastest rival's. None where the outputs are wrong or there is nothing to compare with."""
    right = [record for record in records if record["max_err"] <= MOST_ERROR]

    def best(methods) -> float | None:
        return min((r["fwd_ms"] + r["bwd_ms"] for r in right if r["method"] in methods), default=None)

    flat, rival = best(FLAT), best(RIVALS)
    for record in records:
        total = record["fwd_ms"] + record["bwd_ms"]
        known = record in right
        record["vs_flat"] = round(flat / total, 3) if known and flat else None
        record["vs_best"] = round(total / rival, 3) if known and rival else None


def run_workload(name: str, methods: list[str], data: Path) -> list[dict]:
    problem = make_problem(name, data)
    print(f"{name}: {problem.forest.tokens:,} tokens, {problem.workload}", flush=True)
    records = []
    for method in methods:
        try:
            records.append(measure(name, method, problem))
        except (ImportError, torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            # A rival that is not installed or does not fit is a gap in the table, not the end of the run.
            print(f"  {method:<12} {type(error).__name__}: {str(error).splitlines()[0][:140]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    compare(records)
    for record in records:
        shown = "  ".join(f"{column} {record[column]}" for column in COLUMNS)
        print(f"  {record['method']:<12} {shown}", flush=True)
    return records


def installed(packages: tuple[str, ...]) -> list[str]:
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return [package for package in packages if package in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[m for m in METHODS if m != "flex_tuned"])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real sets (holds tokens/)")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    parser.add_argument("--commit", help="the commit to record, where this is a copy without history")
    arguments = parser.parse_args()
    stamped = None
    if arguments.record:
        card = torch.cuda.get_device_name()
        stamped = stamp(*installed(PACKAGES), card=card, commit=arguments.commit)
    for name in arguments.workloads:
        records = run_workload(name, arguments.methods, arguments.data)
        if stamped is not None:
            append(records, stamped)


if __name__ == "__main__":
    main()
