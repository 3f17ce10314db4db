"""Times of our kernels of the gated delta rule under launch options, each of them checked.

    python -m benchmarks.gdn --sweep --workloads grpo_5k16 game24

Every option changes one family of kernels; the others stay as they are. Its results are compared with those of the
options in use, and in the end the best option of every family runs together, compared with float64 on the smaller
workloads. Lines come as they are measured. An option that does not compile or launch is a line with its error; one
after which the device answers no more starts the sweep again behind itself, in a new process.

fla's kernels (the solve, w and u) run with the first of their options, so that nothing waits for their tuning: their
times are no measurement.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.clock import laps_ms, release
from benchmarks.gdn_check import BOUNDS, check, floor_of
from benchmarks.gdn_rivals import METHODS
from benchmarks.gdn_stages import stage_table
from benchmarks.gdn_tuning import SWEEP, keep_option, set_sizes, sizes_of
from benchmarks.gdn_workloads import NAMES, Problem
from cp_engine.kernels.gdn.triton.primitives import Sizes

# Stages that a family of launch options changes, and the direction in which they are timed.
STAGES_OF = {"output": (("fwd", "output"),)}
IN_USE = "in use"
REPEATS = 3
CHECKED_TOKENS = 100_000  # float64 on larger workloads takes longer than the sweep

Option = tuple[str, Sizes]


class Subject:
    """A workload made once for all options, and what the options in use find on it."""

    def __init__(self, workload: str, problem: Problem):
        self.workload, self.problem = workload, problem
        self.run = METHODS["tree"].made(problem)

    def results(self) -> list[torch.Tensor]:
        self.run.forward()
        self.run.backward()
        return [self.run.values(), *self.run.gradients()]

    def measure(self, method: str, family: str, expected: list[torch.Tensor] | None) -> dict:
        """The record of the options in effect.

        Args:
            expected: results to compare with; None for the options in use themselves.
        """
        device, run = self.problem.dout.device, self.run
        apart = {} if expected is None else _apart(self.results(), expected)
        table = {}
        laps = {"fwd": [], "bwd": []}
        for _ in range(REPEATS):
            for direction, call in (("fwd", run.forward), ("bwd", run.backward)):
                laps[direction] += laps_ms([call], device)
        table["fwd"] = stage_table(run.forward, device, repeats=REPEATS)
        table["bwd"] = stage_table(run.backward, device, repeats=REPEATS)
        forward, backward = (round(statistics.median(laps[direction]), 3) for direction in ("fwd", "bwd"))
        return {
            "bench": "gdn-sweep",
            "workload": self.workload,
            "method": method,
            "kernel": family,
            "ms": round(forward + backward, 3),
            "fwd_ms": forward,
            "bwd_ms": backward,
            "stage_ms": {f"{a} {b}": table[a][b][0] for a, b in STAGES_OF.get(family, _every_stage(table))},
            "right": all(apart[name] <= BOUNDS[name] for name in apart),
            "max_apart": float(f"{max(apart.values(), default=0.0):.3g}"),
        }


def _every_stage(table: dict) -> list[tuple[str, str]]:
    return [(direction, stage) for direction in table for stage in table[direction]]


def _apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, float]:
    """Relative root mean square of the differences; infinite where a result is not finite."""
    apart = {}
    for name, got, true in zip(NAMES, found, expected, strict=True):
        difference = (got.float() - true.float()).square().mean().sqrt() / true.float().square().mean().sqrt()
        apart[name] = float(torch.nan_to_num(difference, nan=torch.inf))
    return apart


@contextmanager
def in_effect(options: dict[str, Sizes]) -> Iterator[None]:
    kept = {family: sizes_of(family) for family in options}
    try:
        for family, sizes in options.items():
            set_sizes(family, sizes)
        yield
    finally:
        for family, sizes in kept.items():
            set_sizes(family, sizes)


def method_of(family: str, sizes: Sizes) -> str:
    return f"{family}, {sizes.columns} columns, {sizes.warps} warps, {sizes.stages} stages"


def sweep(
    problems: dict[str, Callable[[], Problem]],
    options: dict[str, list[Sizes]] = SWEEP,
    skip: int = 0,
    keep: Callable[[dict], None] = lambda record: None,
) -> list[dict]:
    """A record for each workload and option; ``keep`` takes each as it is made.

    Args:
        problems: makes the problem of each workload.
        skip: options, in their order, that are left out.
    """
    keep_option(0)
    subjects = [Subject(workload, make()) for workload, make in problems.items()]
    records: list[dict] = []

    def add(record: dict) -> None:
        records.append(record)
        keep(record)
        shown = "  ".join(f"{name} {ms}" for name, ms in record["stage_ms"].items())
        print(
            f"  {record['workload']} {record['method']}: {record['ms']} = {record['fwd_ms']} + {record['bwd_ms']} ms  "
            f"right {record['right']} ({record['max_apart']})  {shown}",
            flush=True,
        )

    expected = {}
    for subject in subjects:
        expected[subject.workload] = [x.clone() for x in subject.results()]
        add(subject.measure(IN_USE, IN_USE, None))
    every = [(family, sizes) for family, of_family in options.items() for sizes in of_family]
    for number, (family, sizes) in enumerate(every[skip:], start=skip):
        with in_effect({family: sizes}):
            _try(
                subjects,
                method_of(family, sizes),
                number,
                lambda x, f=family, s=sizes: add(x.measure(method_of(f, s), f, expected[x.workload])),
            )
    for subject in subjects:
        best = best_of(subject.workload, records, every)
        with in_effect(best):
            method = "; ".join(method_of(*option) for option in best.items()) or IN_USE
            _try([subject], method, len(every), lambda x, m=method: add(x.measure(m, "all", expected[x.workload])))
            if subject.problem.forest.tokens <= CHECKED_TOKENS:
                _try([subject], method, len(every), _print_check)
    show(records)
    return records


def _print_check(subject: Subject) -> None:
    found = check(METHODS["tree"], subject.problem, floor_of(subject.problem))
    print(f"  {subject.workload}, best together, against float64: right {found['right']} {found['errors']}", flush=True)


def _try(subjects: list[Subject], method: str, number: int, call: Callable[[Subject], None]) -> None:
    """Call for every subject. An error is a line; if the device is lost, the sweep starts again behind ``number``."""
    for subject in subjects:
        try:
            call(subject)
        except Exception as error:  # noqa: BLE001
            told = (str(error).splitlines() or [""])[0][:160]
            print(f"  {subject.workload} {method}: {type(error).__name__}: {told}", flush=True)
            try:
                release(subject.problem.dout.device)
                if subject.problem.dout.device.type == "cuda":
                    torch.cuda.synchronize()
            except RuntimeError:
                print("  the device answers no more: the sweep starts again behind this option", flush=True)
                again = [x for x in sys.argv[1:] if not x.startswith("--skip-options=")]
                command = [sys.executable, "-m", "benchmarks.gdn", *again, f"--skip-options={number + 1}"]
                os.execv(sys.executable, command)


def best_of(workload: str, records: list[dict], every: list[Option]) -> dict[str, Sizes]:
    """The fastest right option of each family on a workload, where it is faster than what is in use."""
    mine = [r for r in records if r["workload"] == workload]
    limit = next(r["ms"] for r in mine if r["kernel"] == IN_USE)
    best = {}
    for family, sizes in every:
        found = next((r for r in mine if r["method"] == method_of(family, sizes)), None)
        if found is not None and found["right"] and found["ms"] < best.get(family, (limit, None))[0]:
            best[family] = (found["ms"], sizes)
    return {family: sizes for family, (_, sizes) in best.items()}


def show(records: list[dict]) -> None:
    """The options of each workload and family, the fastest right one first."""
    for workload, family in dict.fromkeys((r["workload"], r["kernel"]) for r in records):
        mine = [r for r in records if (r["workload"], r["kernel"]) == (workload, family)]
        for r in sorted(mine, key=lambda r: (not r["right"], r["ms"])):
            print(f"{workload:10s} {r['ms']:9.3f} ms  right {r['right']}  {r['method']}  {r['stage_ms']}", flush=True)
