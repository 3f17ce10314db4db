"""Times of the gated delta rule of one layer on one GPU: our kernels on trees, and what they compete with.

    python -m benchmarks.gdn --workloads grpo_5k16 tau_calls --record

16 q/k heads, 32 value heads, K = V = 128, bf16. Every method is compared with the float64 reference on some rollouts of
the workload: it runs the whole tree with an output gradient that is zero elsewhere. A method whose values are wrong
gets no speed-up. Times are medians by CUDA events. ``vs_many`` is time over that of as many tokens at the rate of
80 sequences alone; ``vs_flat`` is how many times faster than our own kernels on every rollout alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.attention import installed
from benchmarks.attention_workloads import DATA
from benchmarks.clock import median_ms, peak_gib, release, reset_peak
from benchmarks.gdn_check import check, floor_of
from benchmarks.gdn_rivals import METHODS, STRAIGHT, Ours, fla_refusal_lifted, run_part
from benchmarks.gdn_stages import stage_table
from benchmarks.gdn_sweep import sweep
from benchmarks.gdn_tuning import AUTOTUNE, compile_in_parallel, shorten_autotuning
from benchmarks.gdn_workloads import CHAINS, HEADS, MANY, WORKLOADS, Problem, chunk_count, sequences, tree_of
from benchmarks.record import RESULTS, append, stamp
from cp_engine.sharding.forest import Forest

PACKAGES = ("torch", "triton", "fla-core")
COLUMNS = ("fwd_ms", "bwd_ms", "vs_many", "vs_flat", "max_err", "segment_err", "right", "peak_gib", "seconds")


def measure(workload: str, name: str, problem: Problem, floor: dict[str, float]) -> dict:
    """The record of one method, without the comparisons between methods."""
    began, device = time.perf_counter(), problem.dout.device
    method = METHODS[name]
    found = check(method, problem, floor)
    reset_peak(device)
    forward = backward = 0.0
    tokens = chunks = 0
    stages = {}
    with fla_refusal_lifted() if found["timing_only"] else nullcontext():
        for part in method.parts(problem):
            run = run_part(method, part, problem)
            run.forward()
            run.backward()
            forward, backward = forward + median_ms(run.forward, device), backward + median_ms(run.backward, device)
            tokens, chunks = tokens + part.forest.tokens, chunks + chunk_count(part.forest)
            if method.run is Ours and not method.flat:
                stages = {"fwd": stage_table(run.forward, device), "bwd": stage_table(run.backward, device)}
            del run
    return {
        "bench": "gdn",
        "workload": workload,
        "method": name,
        "exchange": None,
        "layout": None,
        "gpus": 1,
        "tokens": tokens,
        "chunks": chunks,
        "partial": round(chunks * 64 / tokens, 4),
        "fwd_ms": round(forward, 3),
        "bwd_ms": round(backward, 3),
        "peak_gib": peak_gib(device),
        "stages": stages,
        **found,
        "autotune": AUTOTUNE,
        "seconds": round(time.perf_counter() - began, 1),
    }


def compare(records: list[dict], many: dict | None) -> None:
    """Add ``vs_many`` and ``vs_flat``; None where values are wrong or there is nothing to compare with."""
    flat = next((r for r in records if r["method"] == "flat" and r["right"]), None)
    for record in records:
        total = record["fwd_ms"] + record["bwd_ms"]
        record["vs_many"] = record["vs_flat"] = None
        if record["right"] and many is not None and many["right"]:
            rate = (many["fwd_ms"] + many["bwd_ms"]) / many["tokens"]
            record["vs_many"] = round(total / (rate * record["tokens"]), 3)
        # A backward with wrong values makes no speed-up.
        if record["right"] and not record["timing_only"] and flat is not None and record["method"] not in STRAIGHT:
            record["vs_flat"] = round((flat["fwd_ms"] + flat["bwd_ms"]) / total, 3)


def on_gpu(forest: Forest) -> Problem:
    return Problem.make(forest, HEADS, "cuda", torch.bfloat16)


def run_workload(
    workload: str, methods: list[str], forest: Forest, make: Callable[[Forest], Problem] = on_gpu
) -> list[dict]:
    """Records of the methods, without the comparisons."""
    print(f"{workload}: {forest.tokens:,} tokens, {forest.flat_tokens:,} flat", flush=True)
    records = []
    for straight in (False, True):
        mine = [method for method in methods if (method in STRAIGHT) == straight]
        if not mine:
            continue
        problem = make(sequences([forest.tokens]) if straight else forest)
        floor = floor_of(problem)
        for method in mine:
            try:
                records.append(measure(workload, method, problem, floor))
            except Exception as error:  # noqa: BLE001
                # A method that does not fit or does not compile is a gap in the table, not the end.
                told = (str(error).splitlines() or [""])[0][:200]
                print(f"  {method:<12}  {type(error).__name__}: {told}", flush=True)
            release(problem.dout.device)
    return records


def sweep_problems(workloads: list[str], data: Path) -> dict[str, Callable[[], Problem]]:
    """One straight sequence as long as the first workload, then the workloads.

    Raises:
        ValueError: for a real set whose file is not in ``data``.
    """
    forests = {workload: tree_of(workload, data) for workload in workloads}
    first = forests[workloads[0]]
    return {
        name: lambda forest=forest: on_gpu(forest)
        for name, forest in ({"straight": sequences([first.tokens])} | forests).items()
    }


def show(records: list[dict]) -> None:
    for record in records:
        shown = "  ".join(f"{column} {record[column]}" for column in COLUMNS)
        print(f"  {record['method']:<12} {shown}", flush=True)
        if not record["right"]:
            print(f"    root mean square, worst segment, worst alone: {record['errors']}", flush=True)
        for direction, stages in record["stages"].items():
            parts = "  ".join(f"{name} {ms} ({least})" for name, (ms, least) in stages.items())
            print(f"    {direction}: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=[w for w in WORKLOADS if w != "chain_128k"]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sweep", action="store_true", help="time the launch options of our kernels instead")
    parser.add_argument("--skip-options", type=int, default=0, help="of the sweep, from the first on")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real sets (holds tokens/)")
    parser.add_argument("--record", action="store_true", help="append to the file of results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file than benchmarks/results.jsonl")
    parser.add_argument("--commit", help="the commit to record, where this is a copy without history")
    arguments = parser.parse_args()
    stamped = (
        stamp(*installed(PACKAGES), card=torch.cuda.get_device_name(), commit=arguments.commit)
        if arguments.record
        else None
    )
    began = time.perf_counter()
    if arguments.sweep:
        problems = sweep_problems(arguments.workloads, arguments.data)
        compile_in_parallel("sweep")
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
        sweep(
            problems,
            skip=arguments.skip_options,
            keep=lambda record: stamped and append([record], stamped, arguments.results),
        )
        print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
        return
    compile_in_parallel("kernels")
    shorten_autotuning()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    many = None
    for workload in sorted(arguments.workloads, key=lambda name: name != MANY):
        if many is None and workload != MANY:
            many = next((r for r in run_workload(MANY, ["flat"], tree_of(MANY, arguments.data))), None)
        methods = [m for m in arguments.methods if workload not in CHAINS or m not in ("flat", "fla_flat", *STRAIGHT)]
        records = run_workload(workload, methods, tree_of(workload, arguments.data))
        if workload == MANY:
            many = next((r for r in records if r["method"] == "flat"), None)
        compare(records, many)
        show(records)
        if stamped is not None:
            append(records, stamped, arguments.results)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
