"""Times of our kernels of the gated delta rule under every launch option, each of them checked."""

from __future__ import annotations

from benchmarks.gdn_check import check, floor_of
from benchmarks.gdn_rivals import METHODS
from benchmarks.gdn_stages import stage_table
from benchmarks.gdn_tuning import SWEEP, restore_sizes, set_sizes, sizes_of
from benchmarks.gdn_workloads import Problem

# Kernel, the launch options that it reads, and the direction in which it is timed.
KERNELS = (
    ("states", "states", "fwd"),
    ("adjoint", "states", "bwd"),
    ("output", "output", "fwd"),
    ("dqkwg", "dqkwg", "bwd"),
)


def sweep(workload: str, problem: Problem, options: dict[str, list[tuple[int, int, int]]] = SWEEP) -> list[dict]:
    """A record for each kernel and option that fits; prints them, the fastest right one first."""
    from triton.runtime.errors import OutOfResources, PTXASError

    floor, device, records = floor_of(problem), problem.dout.device, []
    for family, of_family in options.items():
        kept = sizes_of(family)
        for option in of_family:
            set_sizes(family, *option)
            try:
                found = check(METHODS["tree"], problem, floor)
                run = METHODS["tree"].made(problem)
                run.forward()
                run.backward()
                stages = {"fwd": stage_table(run.forward, device), "bwd": stage_table(run.backward, device)}
            except (OutOfResources, PTXASError) as error:
                print(f"  {family} {option}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            finally:
                restore_sizes(family, kept)
            for kernel, its_family, direction in KERNELS:
                if its_family == family:
                    records.append(_record(workload, kernel, option, stages[direction][kernel][0], found))
    for kernel, _, _ in KERNELS:
        mine = [r for r in records if r["kernel"] == kernel]
        for r in sorted(mine, key=lambda r: (not r["right"], r["ms"])):
            print(f"  {workload} {r['method']:42s} {r['ms']} ms  right {r['right']}", flush=True)
    return records


def _record(workload: str, kernel: str, option: tuple[int, int, int], ms: float, found: dict) -> dict:
    columns, warps, stages = option
    shared = {name: found[name] for name in ("right", "max_err", "segment_err")}
    method = f"{kernel}, {columns} columns, {warps} warps, {stages} stages"
    return {"bench": "gdn-sweep", "workload": workload, "method": method, "kernel": kernel, "ms": ms, **shared}
