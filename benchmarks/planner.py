"""The planner on the seven data sets: how good its layouts are, and how long planning takes.

    OMP_NUM_THREADS=1 python -m benchmarks.planner --data ../shared/data/tokens [--record]

Quality: every set in packs of at most 65,536 tree tokens (whole groups in file order, shared inside a group), at P 2,
4 and 8, against contiguous, zigzag, PTRR-style snake and the plain chord on the same pack. Times: the whole plan of
one rank (layout, attention, GDN, loss, hash); medians of repeats.
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
from cp_engine.sharding.cost import PRESETS, ModelShape
from cp_engine.sharding.forest import Forest, build_forest, expand_ranges
from cp_engine.sharding.layer_time import StepTime, step_time
from cp_engine.sharding.layout import imbalance
from cp_engine.sharding.measure import Figures, Survey, measure
from cp_engine.sharding.plan import shard_plan
from cp_engine.sharding.search import MOST_PIECES, SMALL_RANK, TOKEN_SPREAD, balanced_layout

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
# A layout over both is listed with its reason.
MOST_EXPOSED = 0.03  # of an attention layer, forward and backward
MOST_ROWS_RATIO = 1.5  # of the busiest link, over contiguous


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


def read_sets(folder: Path) -> dict[str, Rows]:
    """All seven, by name."""
    return {name: read_set(folder / f"{name}.jsonl.gz") for name in SETS}


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


@dataclass(frozen=True, eq=False)
class Judged:
    """A layout of a pack: its counts, its predicted step, and whether it holds the limits on tokens, pairs, pieces."""

    figures: Figures
    time: StepTime
    limit: float  # most pairs of a rank over the mean

    @property
    def pairs(self) -> float:
        return imbalance(self.figures.pairs)

    @property
    def holds(self) -> bool:
        pieces = self.figures.pieces
        even = np.ptp(self.figures.tokens) <= TOKEN_SPREAD and self.pairs <= self.limit
        return bool(even and pieces.max() <= MOST_PIECES and pieces.sum() < 2 * len(pieces))

    @property
    def text(self) -> str:
        """What the limits are about, for a person."""
        pieces = self.figures.pieces
        return (
            f"pairs {self.pairs:.4f} of at most {self.limit}, {pieces.max()} pieces on a rank, {pieces.mean():.2f} in "
            f"the mean, tokens {np.ptp(self.figures.tokens)} apart"
        )


def judge_pack(forest: Forest, world: int, model: ModelShape) -> tuple[Judged, dict[str, Judged]]:
    """The balanced layout of a pack and its rivals, which stand on the forest as it is given."""
    survey, limit = Survey(forest), 1.02 if forest.tokens >= SMALL_RANK * world else 1.05
    placed = balanced_layout(forest, world, model=model)
    rivals = {}
    for name, layout in baseline_layouts(survey, world, model).items():
        figures = measure(survey, layout)
        rivals[name] = Judged(figures, step_time(figures, model), limit)
    return Judged(placed.figures, placed.time, limit), rivals


def complaints(ours: Judged, rivals: dict[str, Judged]) -> tuple[list[str], list[str]]:
    """What is wrong with a layout, and what a reader has to be told although nothing is."""
    broken, listed = [], []
    if not ours.holds:
        broken.append(ours.text)
    for name, rival in rivals.items():
        gain = 1 - rival.time.step / ours.time.step
        if gain > 0 and rival.holds:
            broken.append(f"{name} is {gain:.2%} faster")
        elif gain > 0:
            listed.append(f"{name} would be {gain:.2%} faster but breaks a limit: {rival.text}")
    contiguous, exposed = rivals["contiguous"], ours.time.exposed_share
    ratio = ours.figures.busiest_rows / max(1, contiguous.figures.busiest_rows)
    if exposed > MOST_EXPOSED and ratio > MOST_ROWS_RATIO:
        change = contiguous.time.step / ours.time.step - 1
        listed.append(
            f"exposed {exposed:.1%} and {ratio:.2f} x the rows of contiguous, whose step takes {change:+.2%} with "
            f"pairs {contiguous.pairs:.3f} of at most {contiguous.limit}"
        )
    return broken, listed


def quality(name: str, packs: list[Rows], world: int, model: ModelShape) -> dict:
    """One row of the table: the worst pack in each figure, or the mean where the name says so."""
    found, broken, listed = [], [], []
    for index, rows in enumerate(packs):
        forest = rows.forest
        ours, rivals = judge_pack(forest, world, model)
        figures, contiguous = ours.figures, rivals["contiguous"].figures
        for texts, new in zip((broken, listed), complaints(ours, rivals), strict=True):
            texts += [f"pack {index} ({forest.tokens:,} tokens): {text}" for text in new]
        found.append(
            {
                "pair_imbalance": ours.pairs,
                "token_spread": int(np.ptp(figures.tokens)),
                "most_pieces": int(figures.pieces.max()),
                "mean_pieces": float(figures.pieces.mean()),
                "tile_imbalance": imbalance(figures.tiles),
                "rows_in": int(figures.rows_in.max()),
                "rows_out": int(figures.rows_out.max()),
                "contiguous_rows_in": int(contiguous.rows_in.max()),
                "contiguous_rows_out": int(contiguous.rows_out.max()),
                "exposed": ours.time.exposed_share,
                "step_ms": ours.time.step / 1e6,
                **{f"step_over_{k}": ours.time.step / v.time.step for k, v in rivals.items()},
            }
        )
    worst = {key: max(row[key] for row in found) for key in found[0]}
    means = {f"mean_{key}": statistics.fmean(row[key] for row in found) for key in found[0] if key != "mean_pieces"}
    row = {"bench": "planner-quality", "workload": name, "P": world, "packs": len(packs), **worst, **means}
    return row | {"broken": broken, "listed": listed}


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
        "chosen": placed.method,
        "repeats": repeats,
    }


def print_quality(rows: list[dict]) -> None:
    print(
        f"{'set':18s}  P packs  pairs  spread pieces(mean)  tiles mean/max   rows in/out mean   contiguous  exposed  "
        "step against contiguous zigzag snake chord"
    )
    for r in rows:
        rivals = " ".join(f"{r[f'step_over_{k}']:.4f}" for k in ("contiguous", "zigzag", "snake", "chord"))
        print(
            f"{r['workload']:18s} {r['P']:2d} {r['packs']:5d} {r['pair_imbalance']:.4f} {r['token_spread']:6d} "
            f"{r['most_pieces']:4d} ({r['mean_pieces']:.2f})     {r['mean_tile_imbalance']:.3f} / "
            f"{r['tile_imbalance']:.3f} {r['mean_rows_in']:8.0f} / {r['mean_rows_out']:6.0f} "
            f"{r['mean_contiguous_rows_in']:6.0f} / {r['mean_contiguous_rows_out']:6.0f} {r['exposed']:7.2%}   {rivals}"
        )
        for fault in r["broken"] + r["listed"]:
            print(f"{'':21s}{fault}")


def print_times(rows: list[dict]) -> None:
    for r in rows:
        print(
            f"{r['workload']} P {r['P']}, {r['tokens']:,} tokens, {r['segments']:,} segments: {r['ms']:.1f} ms "
            f"(cpu {r['cpu_ms']:.1f}, layout {r['layout_ms']:.1f}; {r['chosen']})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the seven token files")
    parser.add_argument("--model", choices=PRESETS, action="append", help="whose layers are predicted (default: all)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=("quality", "times"), help="leave the other half out")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    args = parser.parse_args()
    stamped = stamp("numpy")
    print(", ".join(f"{key} {value}" for key, value in stamped.items()), flush=True)
    sets = read_sets(args.data)
    packs = {name: whole_group_packs(rows, PACK_TOKENS) for name, rows in sets.items()}
    timed = [
        ("tau_airline_calls", sets["tau_airline_calls"], 8),
        ("game24_tree", sets["game24_tree"], 8),
        ("mixed 0.1M", mixed(sets, 100_000), 64),
        ("mixed 1M", mixed(sets, 1_000_000), 64),
    ]
    for name in args.model or PRESETS:
        print(name)
        records = []
        if args.only != "times":
            records += [quality(s, packs[s], world, PRESETS[name]) for s in SETS for world in WORLDS]
            print_quality(records)
        if args.only != "quality":
            times = [plan_times(*case, PRESETS[name], args.repeats) for case in timed]
            print_times(times)
            records += times
        if args.record:
            append([record | {"model": name, "method": "balanced"} for record in records], stamped)


if __name__ == "__main__":
    main()
