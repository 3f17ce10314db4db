"""Times of the Triton attention kernels by tile sizes and launch options, on one GPU.

    python -m benchmarks.attention_tiles tau_calls now forward=64,64,4,3 dq=64,64,4,2 dkdv=32,64,4,3
    python -m benchmarks.attention_tiles d256_16k16 now scores=128,32,8,3 product=64,128,8,3

Each further argument is one trial: ``now`` for the sizes in use, or one or more ``kernel=rows,keys,warps,stages``
joined by ``+``; a fifth number says how many owned tiles registers hold (`primitives.Sizes`). ``scores`` and
``product`` are those of the backward that stores scores (head sizes above 128 on Hopper cards). Elsewhere ``dkdv`` at
head size 256 replaces the two launches of dk and dv. A trial's results are compared with the first trial's; the largest
difference is relative to the largest value.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import clock
from benchmarks.attention_problem import NAMES, Problem, make_problem
from benchmarks.attention_workloads import DATA, WORKLOADS
from cp_engine.kernels.attention import attention, attention_backward
from cp_engine.kernels.attention.triton import primitives, stored_pass
from cp_engine.kernels.attention.triton.primitives import SIZES, Sizes

STORED = ("scores", "product")
MOST_HELD = {"forward": 1, "dq": 2, "scores": 2}  # kernels whose owned tiles can be held in registers


def sizes_of(trial: str) -> dict[str, Sizes]:
    """The kernels' sizes that a trial changes.

    Raises:
        ValueError: for an unknown kernel, anything but four or five numbers, or more held tiles than a kernel owns.
    """
    changed = {}
    for part in [] if trial == "now" else trial.split("+"):
        kernel, _, numbers = part.partition("=")
        values = numbers.split(",")
        numbers_given = len(values) in (4, 5) and all(value.isdigit() for value in values)
        if kernel not in (*SIZES, *STORED) or not numbers_given:
            known = ", ".join((*SIZES, *STORED))
            form = "kernel=rows,keys,warps,stages or kernel=rows,keys,warps,stages,held"
            raise ValueError(f"a trial is 'now' or {form} with one of {known}; got {part!r}")
        changed[kernel] = Sizes(*map(int, values))
        if changed[kernel].held > MOST_HELD.get(kernel, 0):
            raise ValueError(f"{kernel} can hold {MOST_HELD.get(kernel, 0)} tiles in registers; got {part!r}")
    return changed


@contextlib.contextmanager
def in_use(changed: dict[str, Sizes], column: int) -> Iterator[None]:
    """The kernels at the padded head size ``column`` take these sizes, for short segments too."""
    made, short = copy.deepcopy(primitives.SIZES), copy.deepcopy(primitives.SHORT_SIZES)
    for kernel, sizes in changed.items():
        if kernel in STORED:
            continue
        made[kernel][column] = sizes
        short.get(kernel, {}).pop(column, None)
        if kernel == "dkdv":
            for apart in ("dk", "dv"):
                made[apart].pop(column, None)
    before, stored = (primitives.SIZES, primitives.SHORT_SIZES), stored_pass.IN_USE
    primitives.SIZES, primitives.SHORT_SIZES = made, short
    stored_pass.IN_USE = replace(stored, **{name: sizes for name, sizes in changed.items() if name in STORED})
    try:
        yield
    finally:
        primitives.SIZES, primitives.SHORT_SIZES = before
        stored_pass.IN_USE = stored


def run_trial(problem: Problem, trial: str, first: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Time a trial, print a line, return its results."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    call = {"intervals": problem.intervals, "scale": problem.scale, "backend": "triton"}
    forward = partial(attention, q, k, v, **call)
    with in_use(sizes_of(trial), max(64, primitives.padded(problem.workload.size))):
        out, lse = forward()
        backward = partial(attention_backward, q, k, v, out, lse, dout, **call)
        results = dict(zip(NAMES, (out, *backward()), strict=True))
        times = [clock.median_ms(step, problem.device) for step in (forward, backward)]
    largest = 0.0
    for name, got in results.items() if first is not None else ():
        wanted = first[name].float()
        largest = max(largest, float((got.float() - wanted).abs().max() / wanted.abs().max()))
    print(
        f"  {trial:<44} forward {times[0]:8.3f} ms  backward {times[1]:8.3f} ms  difference {largest:.1e}", flush=True
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("trials", nargs="+")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real sets (holds tokens/)")
    arguments = parser.parse_args()
    for trial in arguments.trials:
        sizes_of(trial)
    problem = make_problem(WORKLOADS[arguments.workload], data=arguments.data)
    print(f"{arguments.workload}: {problem.forest.tokens:,} tokens, {problem.workload}", flush=True)
    first = None
    for trial in arguments.trials:
        try:
            results = run_trial(problem, trial, first)
        except (RuntimeError, ValueError) as error:
            # Sizes that do not fit the card are a gap in the table, not the end of the run.
            print(f"  {trial:<44} {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        first = results if first is None else first


if __name__ == "__main__":
    main()
