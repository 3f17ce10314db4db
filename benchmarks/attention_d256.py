"""Times of the five-product backward by what is stored, tile sizes and launch options, on one GPU.

    python -m benchmarks.attention_d256
    python -m benchmarks.attention_d256 --trials now apart+held+scores=128,64,8,2+product=64,64,8,4+gib=5

A trial is ``now`` (the backward in use) or parts joined by ``+``: ``apart`` (dq by a kernel of its own), ``held`` (q in
registers), ``pointers`` (blocks stored without bulk copies), ``scores=rows,keys,warps,stages`` (rows of a block, keys
of a step), ``product=rows,keys,warps,stages`` (rows a step of dk's and dv's kernel, keys a step of dq's), ``gib=``
workspace. The error is that of `Problem.error` against the reference; "equal": two runs agree to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import clock
from benchmarks.attention_problem import NAMES, Problem, make_problem
from benchmarks.attention_workloads import DATA, WORKLOADS
from cp_engine.kernels.attention import attention, attention_backward
from cp_engine.kernels.attention.triton import stored_pass
from cp_engine.kernels.attention.triton.primitives import Sizes
from cp_engine.kernels.attention.triton.stored_pass import Stored

TRIALS = (
    "apart+held+scores=128,64,8,2+product=64,64,8,4",
    "scores=128,32,8,2+product=64,64,8,4",
    "held+scores=128,32,8,3+product=64,64,8,4",
    "apart+held+pointers+scores=128,64,8,2+product=64,64,8,4",
    "apart+held+scores=128,64,8,2+product=128,128,8,2",
    "apart+held+scores=128,64,8,2+product=64,64,8,3",
    "apart+held+scores=128,64,8,2+product=64,64,8,4+gib=1",
    "apart+held+scores=128,64,8,2+product=64,64,8,4+gib=12",
    "held+scores=128,32,8,4+product=64,64,8,4",
    "now",
)
KERNELS = {"_scores_kernel": "scores", "_dq_product_kernel": "dq", "_key_products_kernel": "dk, dv"}


def stored_of(trial: str) -> Stored:
    """What a trial asks for.

    Raises:
        ValueError: for an unknown part or wrong numbers.
    """
    flags = {"dq_apart": False, "held": False}
    for part in trial.split("+"):
        name, _, value = part.partition("=")
        numbers = value.split(",")
        if part in ("apart", "held", "pointers"):
            flags |= {"apart": {"dq_apart": True}, "held": {"held": True}, "pointers": {"store_by_copy": False}}[part]
        elif name in ("scores", "product") and len(numbers) == 4 and all(number.isdigit() for number in numbers):
            flags[name] = Sizes(*map(int, numbers))
        elif name == "gib" and value.isdigit():
            flags["workspace"] = int(value) << 30
        else:
            known = "now, or apart, held, pointers, scores=, product= with four numbers, gib= joined by +"
            raise ValueError(f"a trial is {known}; got {part!r}")
    return Stored(**flags)


def backward_of(trial: str, problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], tuple]:
    given = (problem.q, problem.k, problem.v, out, lse, problem.dout)
    if trial == "now":
        call = {"intervals": problem.intervals, "scale": problem.scale, "backend": "triton"}
        return partial(attention_backward, *given, **call)
    return partial(stored_pass.backward, *given, problem.intervals, problem.scale, False, False, stored_of(trial))


@contextlib.contextmanager
def timed_kernels(spent: dict[str, list]) -> Iterator[None]:
    """Launches of the kernels are put between events, (start, end) by kernel in ``spent``."""

    class Timed:
        def __init__(self, kernel, name: str):
            self.kernel, self.name = kernel, name

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.kernel[grid](*arguments, **options)
                end.record()
                spent.setdefault(self.name, []).append((start, end))

            return launch

    kept = {name: getattr(stored_pass, name) for name in KERNELS}
    for name, kernel in kept.items():
        setattr(stored_pass, name, Timed(kernel, KERNELS[name]))
    try:
        yield
    finally:
        for name, kernel in kept.items():
            setattr(stored_pass, name, kernel)


def kernel_times(backward: Callable[[], tuple], device: torch.device) -> str:
    """Milliseconds of one call by kernel."""
    if device.type != "cuda":
        return ""
    spent: dict[str, list] = {}
    with timed_kernels(spent):
        clock.laps_ms([backward], device)
    sums = {name: sum(start.elapsed_time(end) for start, end in events) for name, events in spent.items()}
    return "  ".join(f"{name} {ms:.1f}" for name, ms in sums.items())


def run_trial(problem: Problem, trial: str, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Check and time a trial, print a line."""
    began = time.perf_counter()
    clock.release(problem.device)
    backward = backward_of(trial, problem, out, lse)
    grads = backward()
    error = problem.error(dict(zip(NAMES, (out, *grads), strict=True)))
    clock.release(problem.device)
    clock.reset_peak(problem.device)
    held = clock.peak_gib(problem.device)
    again = backward()
    peak = clock.peak_gib(problem.device) - held
    equal = all(torch.equal(mine, its) for mine, its in zip(grads, again, strict=True))
    del grads, again
    ms = clock.median_ms(backward, problem.device)
    rate = 2.5 * problem.forward_flops / ms / 1e9
    print(
        f"{trial:<58} {ms:8.2f} ms {rate:5.0f} TFLOP/s  error {error}  equal {equal}  +{peak:.1f} GiB  "
        f"{kernel_times(backward, problem.device)}  ({time.perf_counter() - began:.0f} s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="d256_16k16")
    parser.add_argument("--trials", nargs="+", default=TRIALS)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real sets (holds tokens/)")
    parser.add_argument("--seconds", type=float, default=80, help="no trial begins after so many")
    arguments = parser.parse_args()
    for trial in arguments.trials:
        if trial != "now":
            stored_of(trial)
    began = time.perf_counter()
    problem = make_problem(WORKLOADS[arguments.workload], data=arguments.data)
    out, lse = attention(
        problem.q, problem.k, problem.v, intervals=problem.intervals, scale=problem.scale, backend="triton"
    )
    print(f"{arguments.workload}: {problem.forest.tokens:,} tokens, {problem.workload}", flush=True)
    checked = ", ".join(problem.truth)
    print(f"reference of {checked} made, {time.perf_counter() - began:.0f} s from the start", flush=True)
    for trial in arguments.trials:
        if time.perf_counter() - began > arguments.seconds:
            print(f"{trial:<58} not begun: {arguments.seconds:.0f} s are over", flush=True)
            continue
        try:
            run_trial(problem, trial, out, lse)
        except (RuntimeError, ValueError) as error:
            # Sizes that do not fit the card are a gap in the table, not the end of the run.
            print(f"{trial:<58} {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)


if __name__ == "__main__":
    main()
