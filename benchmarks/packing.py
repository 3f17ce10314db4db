"""Forests and packs of the seven data sets: how long they take, and what cutting into packs costs.

    OMP_NUM_THREADS=1 python -m benchmarks.packing --data ../shared/data/tokens [--record]

Packs of at most 32,768 tree tokens, shared over the batch. The lower bound of packs is all tree tokens over the
budget, were no ancestor replayed. Times are medians of repeats on one core, from arrays in memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.planner import Rows, read_sets
from benchmarks.record import append, stamp
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.packing import pack_rollouts

BUDGET = 32_768


def timed(work, repeats: int) -> dict:
    """Median wall and processor milliseconds of ``work()``."""
    wall, cpu = [], []
    for _ in range(repeats):
        began, busy = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    return {"ms": 1e3 * statistics.median(wall), "cpu_ms": 1e3 * statistics.median(cpu), "repeats": repeats}


def joined(sets: dict[str, Rows]) -> Rows:
    """All sets as the rollouts of one step; groups of different sets stay apart."""
    shift = np.cumsum([0] + [int(rows.group.max()) + 1 for rows in sets.values()])
    length = np.concatenate([np.diff(rows.row_start) for rows in sets.values()])
    return Rows(
        np.concatenate([rows.token for rows in sets.values()]),
        np.concatenate([[0], np.cumsum(length)]),
        np.concatenate([rows.group + first for rows, first in zip(sets.values(), shift[:-1], strict=True)]),
        np.concatenate([rows.loss_mask for rows in sets.values()]),
    )


def packing(name: str, rows: Rows, repeats: int) -> dict:
    """Packs of one batch."""

    def pack():
        return pack_rollouts(rows.token, rows.row_start, rows.group, rows.loss_mask, max_pack_tokens=BUDGET)

    packs = pack()
    tree = build_forest(rows.token, rows.row_start).tokens
    replayed = sum(p.replayed_tokens for p in packs)
    assert sum(p.tokens for p in packs) == tree + replayed and sum(len(p.rollouts) for p in packs) == len(rows.group)
    return {
        "bench": "packing",
        "workload": name,
        "rollouts": len(rows.group),
        "flat_tokens": len(rows.token),
        "tree_tokens": tree,
        "budget": BUDGET,
        "packs": len(packs),
        "packs_at_least": -(-tree // BUDGET),
        "replayed_tokens": replayed,
        **timed(pack, repeats),
    }


def forests(sets: dict[str, Rows], repeats: int) -> dict:
    """All sets, each as one forest shared over the batch."""

    def build() -> list[int]:
        return [build_forest(rows.token, rows.row_start).tokens for rows in sets.values()]

    return {
        "bench": "forest",
        "workload": "all sets",
        "rollouts": sum(len(rows.group) for rows in sets.values()),
        "flat_tokens": sum(len(rows.token) for rows in sets.values()),
        "tree_tokens": sum(build()),
        **timed(build, repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the seven token files")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    args = parser.parse_args()
    stamped, sets = stamp("numpy"), read_sets(args.data)
    records = [packing(name, rows, args.repeats) for name, rows in sets.items()]
    records.append(packing("all sets as one step", joined(sets), args.repeats))
    records.append(forests(sets, args.repeats))
    for r in records:
        print(f"{r['bench']} {r['workload']}: {r['tree_tokens']:,} tree tokens, {r['ms']:.1f} ms")
    print(f"packing of the seven sets: {sum(r['ms'] for r in records[: len(sets)]):.0f} ms")
    if args.record:
        append(records, stamped)


if __name__ == "__main__":
    main()
