"""The planner on the seven data sets: how good its layouts are, and how long planning takes.

    OMP_NUM_THREADS=1 python -m benchmarks.planner --data ../shared/data/tokens [--record]

Quality: every set in packs of at most 65,536 tree tokens (whole groups in file order, shared inside a group), at P 2,
4 and 8, against contiguous, zigzag, PTRR-style snake and the plain chord on the same pack. Times: the whole plan of
one rank (layout, attention, GDN, loss, hash), building all forests and packing; medians of repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.baselines import baseline_layouts
from benchmarks.record import append, stamp
from cp_engine.rollouts import flatten_rollouts, read_rollouts
from cp_engine.sharding.cost import PRESETS, ModelShape, step_time
from cp_engine.sharding.forest import Forest, build_forest, expand_ranges
from cp_engine.sharding.layout import imbalance
from cp_engine.sharding.measure import Survey, measure
from cp_engine.sharding.packing import pack_rollouts
from cp_engine.sharding.plan import shard_plan
from cp_engine.sharding.search import SMALL_RANK, balanced_layout

SETS = (
    "tau_airline",
    "tau_airline_calls",
    "toolbench_dfs",
    "game24_tree",
    "game24_samples",
    "gsm8k_solutions",
    "creative_writing",
)
PACK_TOKENS = 65_536
WORLDS = (2, 4, 8)
CONV_WIDTH = 4


@dataclass(frozen=True, eq=False)
class Rows:
    """Rollouts as `build_forest` takes them."""

    token: np.ndarray
    row_start: np.ndarray
    group: np.ndarray
    loss_mask: np.ndarray

    def select(self, rows: np.ndarray) -> Rows:
        length = np.diff(self.row_start)[rows]
        flat = expand_ranges(self.row_start[rows], length)
        start = np.concatenate([[0], np.cumsum(length)])
        return Rows(self.token[flat], start, self.group[rows], self.loss_mask[flat])

    @property
    def forest(self) -> Forest:
        return build_forest(self.token, self.row_start, self.group)


def read_set(path: Path) -> Rows:
    flat = flatten_rollouts(read_rollouts(path))
    return Rows(flat.token, flat.row_start, flat.group, flat.loss_mask)


def whole_group_packs(rows: Rows, budget: int) -> list[Rows]:
    """Groups in file order; a new pack where the next group's tree would pass the budget."""
    packs: list[list[int]] = []
    filled = 0
    for group in dict.fromkeys(rows.group.tolist()):
        tokens = rows.select(np.flatnonzero(rows.group == group)).forest.tokens
        if not packs or filled + tokens > budget:
            packs.append([])
            filled = 0
        packs[-1].append(group)
        filled += tokens
    return [rows.select(np.flatnonzero(np.isin(rows.group, groups))) for groups in packs]


def mixed(sets: dict[str, Rows], tokens: int) -> Rows:
    """Whole groups of all sets, drawn with a fixed seed, up to about so many tree tokens."""
    groups, shift = [], 0
    for rows in sets.values():
        groups.append(rows.group + shift)
        shift += int(rows.group.max()) + 1
    length = np.concatenate([np.diff(rows.row_start) for rows in sets.values()])
    every = Rows(
        np.concatenate([rows.token for rows in sets.values()]),
        np.concatenate([[0], np.cumsum(length)]),
        np.concatenate(groups),
        np.concatenate([rows.loss_mask for rows in sets.values()]),
    )
    forest = every.forest
    root = np.flatnonzero(forest.parent < 0)
    tree = np.searchsorted(root, forest.end_segment, side="right") - 1
    size = np.zeros(shift, np.int64)
    first = np.unique(tree, return_index=True)[1]
    np.add.at(size, every.group[first], np.diff(np.append(forest.segment_start[root], forest.tokens)))
    order = np.random.default_rng(0).permutation(shift)
    chosen = order[np.cumsum(size[order]) <= tokens]
    return every.select(np.flatnonzero(np.isin(every.group, chosen)))


def quality(name: str, packs: list[Rows], world: int, model: ModelShape) -> dict:
    """One row of the table: the worst pack in each figure, or the mean where the name says so."""
    found, faults = [], []
    for index, rows in enumerate(packs):
        forest = rows.forest
        survey = Survey(forest)
        placed = balanced_layout(forest, world, model=model)
        figures = placed.figures
        rivals = {k: measure(survey, v) for k, v in baseline_layouts(survey, world, model).items()}
        steps = {k: step_time(v, model).step for k, v in rivals.items()}
        ratio = placed.time.step / min(steps.values())
        pair, limit = imbalance(figures.pairs), 1.02 if forest.tokens >= SMALL_RANK * world else 1.05
        rows_ratio = figures.busiest_rows / max(1, rivals["contiguous"].busiest_rows)
        exposed = placed.time.exposed_share
        where = f"pack {index} ({forest.tokens:,} tokens)"
        if pair > limit:
            faults.append(f"{where}: pairs {pair:.4f} over {limit}")
        if ratio > 1:
            best = min(steps, key=lambda k: steps[k])
            rival = imbalance(rivals[best].pairs)
            faults.append(f"{where}: {best} is {ratio - 1:.2%} faster (its pairs {rival:.3f}, limit {limit})")
        if exposed > 0.03 and rows_ratio > 1.5:
            faults.append(f"{where}: exposed {exposed:.1%} and {rows_ratio:.2f} x the rows of contiguous")
        found.append(
            {
                "pair_imbalance": pair,
                "token_spread": int(np.ptp(figures.tokens)),
                "most_pieces": int(figures.pieces.max()),
                "mean_pieces": float(figures.pieces.mean()),
                "tile_imbalance": imbalance(figures.tiles),
                "rows": figures.busiest_rows,
                "contiguous_rows": rivals["contiguous"].busiest_rows,
                "exposed": exposed,
                "step_ms": placed.time.step / 1e6,
                **{f"step_over_{k}": placed.time.step / v for k, v in steps.items()},
            }
        )
    worst = {key: max(row[key] for row in found) for key in found[0]}
    for key in ("tile_imbalance", "rows", "contiguous_rows", "step_ms"):
        worst[f"mean_{key}"] = statistics.fmean(row[key] for row in found)
    return {"bench": "planner-quality", "workload": name, "P": world, "packs": len(packs), **worst, "listed": faults}


def fresh(forest: Forest) -> Forest:
    """The same forest without its cached tables."""
    names = ("token", "segment_start", "parent", "depth", "subtree_end", "end_segment")
    return Forest(**{name: getattr(forest, name) for name in names})


def plan_times(name: str, rows: Rows, world: int, model: ModelShape, repeats: int) -> dict:
    """Median times of one rank's whole plan."""
    forest = rows.forest
    wall, cpu, layout = [], [], []
    for _ in range(repeats):
        again = fresh(forest)
        began, busy = time.perf_counter(), time.process_time()
        placed = balanced_layout(again, world, model=model)
        layout.append(time.perf_counter() - began)
        shard_plan(placed.forest, placed.layout, world // 2, rows.loss_mask, conv_width=CONV_WIDTH)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    return {
        "bench": "planner-time",
        "workload": name,
        "P": world,
        "tokens": forest.tokens,
        "segments": forest.segments,
        "ms": 1e3 * statistics.median(wall),
        "cpu_ms": 1e3 * statistics.median(cpu),
        "layout_ms": 1e3 * statistics.median(layout),
        "method": placed.method,
        "repeats": repeats,
    }


def timed(name: str, work, repeats: int) -> dict:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return {"bench": "planner-time", "workload": name, "ms": 1e3 * statistics.median(times), "repeats": repeats}


def pack_all(sets: dict[str, Rows]) -> None:
    for rows in sets.values():
        pack_rollouts(rows.token, rows.row_start, rows.group, rows.loss_mask, max_pack_tokens=32_768)


def print_quality(rows: list[dict]) -> None:
    print(
        f"{'set':18s}  P packs  pairs  spread pieces(mean)  tiles mean/max   rows mean/max   contiguous  exposed  "
        "step against contiguous zigzag snake chord"
    )
    for r in rows:
        rivals = " ".join(f"{r[f'step_over_{k}']:.4f}" for k in ("contiguous", "zigzag", "snake", "chord"))
        print(
            f"{r['workload']:18s} {r['P']:2d} {r['packs']:5d} {r['pair_imbalance']:.4f} {r['token_spread']:6d} "
            f"{r['most_pieces']:4d} ({r['mean_pieces']:.2f})     {r['mean_tile_imbalance']:.3f} / "
            f"{r['tile_imbalance']:.3f} {r['mean_rows']:8.0f} / {r['rows']:6d} {r['mean_contiguous_rows']:9.0f}   "
            f"{r['exposed']:7.2%}   {rivals}"
        )
        for fault in r["listed"]:
            print(f"{'':21s}{fault}")


def print_times(rows: list[dict]) -> None:
    for r in rows:
        what = f" P {r['P']}, {r['tokens']:,} tokens, {r['segments']:,} segments" if "P" in r else ""
        more = f" (cpu {r['cpu_ms']:.1f}, layout {r['layout_ms']:.1f}; {r['method']})" if "P" in r else ""
        print(f"{r['workload']}{what}: {r['ms']:.1f} ms{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the seven token files")
    parser.add_argument("--model", choices=PRESETS, default="qwen3-8b", help="whose layers are predicted")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=("quality", "times"), help="leave the other half out")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    args = parser.parse_args()
    model, stamped = PRESETS[args.model], stamp("numpy")
    print(", ".join(f"{key} {value}" for key, value in stamped.items()), flush=True)
    sets = {name: read_set(args.data / f"{name}.jsonl.gz") for name in SETS}
    records: list[dict] = []
    if args.only != "times":
        for name, rows in sets.items():
            packs = whole_group_packs(rows, PACK_TOKENS)
            records += [quality(name, packs, world, model) for world in WORLDS]
        print_quality(records)
    if args.only != "quality":
        times = [
            plan_times("tau_airline_calls", sets["tau_airline_calls"], 8, model, args.repeats),
            plan_times("game24_tree", sets["game24_tree"], 8, model, args.repeats),
            plan_times("mixed 0.1M", mixed(sets, 100_000), 64, model, args.repeats),
            plan_times("mixed 1M", mixed(sets, 1_000_000), 64, model, args.repeats),
            timed("forests of all sets", lambda: [rows.forest for rows in sets.values()], min(3, args.repeats)),
            timed("packing of all sets at 32,768", lambda: pack_all(sets), min(3, args.repeats)),
        ]
        print_times(times)
        records += times
    if args.record:
        append(
            [record | {"model": args.model, "method": record.get("method", "balanced")} for record in records], stamped
        )


if __name__ == "__main__":
    main()
