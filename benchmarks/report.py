"""Write docs/benchmarks.md from benchmarks/results.jsonl.

    python -m benchmarks.report

Every record has a ``bench``; each bench is a section. A bench without a writer of its own gets a table of all its
columns. Of records about the same case the last one counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.game_report import GAME, game_rows
from benchmarks.record import RESULTS, ROOT
from benchmarks.step_report import STEP, STEP_LAYER, step_layers, steps
from benchmarks.tables import cell, table

PAGE = ROOT / "docs" / "benchmarks.md"
STAMP = ("commit", "versions", "card", "command", "date")
CASE = (
    "bench",
    "workload",
    "model",
    "weights",
    "seed",
    "method",
    "exchange",
    "layout",
    "gpus",
    "P",
    "transport",
    "head_groups",
    "recompute",
    "more",
    "engine",
)  # what a record is about
KEPT = ("largest",)  # found by a search that not every run repeats: the last one that did counts
# Methods that nothing measures any more. Their records stay in the file; the page names them without figures.
GONE = {
    "attention": ("fa4",),
    "gdn-sweep": tuple(f"dqkwg, 64 columns, 8 warps, 2 stages, tiles, {n} chunks a program" for n in (4, 8, 16)),
}
RIVALS = ("contiguous", "zigzag", "snake", "chord")

HEAD = """# Benchmarks

Written by `python -m benchmarks.report` from `benchmarks/results.jsonl`, where each line is one measurement with its
commit, versions, card and command. `benchmarks/` holds what measures.
"""

QUALITY = """Each set in packs of at most 65,536 tree tokens (whole groups in file order, shared inside a group) on P
context-parallel ranks. Worst pack of each set, or the mean over packs where it says so. Pairs and tiles: largest rank
over the mean. Rows: the busiest rank's in / out, mean over packs. Exposed: exchange that no compute hides, of the
slowest rank's softmax-attention layer, forward and backward. Step: predicted time of all decoder layers over that of
another layout of the same pack, worst pack (mean).

Limits: tokens at most 64 apart; pairs at most 1.02 where the pack has 8,192 tokens a rank, else 1.05; at most 4 pieces
on a rank and under 2 in the mean. Below the table stands every case in which another layout is predicted faster (only
one that breaks a limit can be), and every one with over 3 % exposed and over 1.5 x the rows of contiguous.
"""

TIMES = """Median of repeats on one core: balanced layout, then one rank's attention, GDN and loss plan and the hash.
Mixed: whole groups drawn from all seven sets.
"""

PACKING = """Packs of at most 32,768 tree tokens, shared over the batch. Packs at least: all tree tokens over the
budget, were no ancestor replayed. Median of repeats on one core.
"""

ATTENTION = """Forward and backward of one layer's attention in bf16, medians in ms. TFLOP/s count visible pairs only,
of one GPU. vs flat: how many times faster than the fastest method that computes every rollout on its own; the pair
ratio is what sharing saves in pairs. vs rival: time over that of the fastest method that is not ours, which is named.
Both compare with the methods of the row's own run, and neither is shown where outputs differ from the float32
reference. A method that was measured again without the flat ones keeps its row beside them (`beside flat`). Error:
largest relative one of out, dq, dk, dv, and of any segment's rows of out and dv. Predicted: by the planner's cost
model. `cudnn_fa4`: forward by cuDNN, backward by FlashAttention-4 on rectangles.
"""

SEVERAL = """Times of the slowest rank. Exposed: over the time of the same calls with all rows present. Moved:
MiB that the busiest rank sends or receives. Efficiency: pairs a GPU and second over those of one GPU that has a share
of the pairs to itself. Layout `spread`: every trunk cut over all ranks, which begin trees in turn; up to commit 0273e74
all of them began on rank 0.
"""

GDN = """Kernels of one layer with 16 query and key heads, 32 value heads, K = V = 128, bf16, on one card. `tree`: our
kernels on the tree; `flat`: on every rollout alone; `straight`: on one sequence of the tree's tokens; `fla_levels`: a
full set of fla's kernels for each tree level; `fla_flat` and `fla_straight`: fla's operator as it is called today.
Chunks: 64 x chunks over tokens. Over many: time over that of as many tokens at the rate of our kernels on the rollouts
of `grpo_5k16` alone. Gain: time of `flat` over that of the method. Error: relative root mean square of the worst result
against float64 on some rollouts, and the worst segment's largest difference over its largest value. No gain is given to
wrong values, nor to a backward that fla refuses on this card (timing only).
"""

GDN_LAYER = """A whole layer (as in the next section) on one card: ours, and with the library's operators in place of
our gates and norm. Projections alone: their products, forward and backward. Error: largest relative root mean square of
output and gradients against the layer with the library's operators. Stages: rest is what no stage holds, in backward
the projections' products.
"""

GDN_RANKS = """A whole layer (hidden size 2,048, 16 query and key heads, 32 value heads of size 128, bf16): projections,
convolution, gates, recurrence, norm and output gate; times of the slowest rank. One GPU: the layer with a GPU's share
of the tokens, in the same run. Predicted: the planner's cost model for the exchange affine. Error: largest relative
root mean square of output and gradients against one GPU with all tokens; wrong results get no ratio. Layout `spread`:
as for attention. Stages: of rank 0, with what it waits for. Predicted stages: of the slowest rank; what needs no state,
passes run again for other ranks (where states cross ranks by affine maps, up to commit c9d76de always), waiting, state
passes, and what is computed from states.
"""

GDN_SWEEP = """Launch options of one family of our kernels, others as they are; all: the fastest right ones together.
Straight: one sequence as long as the first workload. Apart: largest relative root mean square of the difference of a
result from that of the options in use. In use: at the commit of the row's run, named below; what was decided from it
is in the log. fla's kernels are not tuned in these runs.
"""

LM_HEAD = """Log-probs and entropies of edges from hidden states in bf16, medians in ms: `triton` (also with other sizes
of its chunks of logits) against the eager `reference`. Products: the matrix products alone, in the chunks of `triton`;
of a forward pass one, of a backward pass two where the head is frozen, else three (the first of them, the logits, is
computed again). Error: largest relative root mean square of log-probs, entropies and gradients against float64; wrong
results get no gain. Memory: beside inputs and truth.
"""


@dataclass(frozen=True)
class Section:
    """How the records of one bench are shown."""

    title: str
    text: str
    body: Callable[[list[dict]], str]


def quality(records: list[dict]) -> str:
    head = ["model", "set", "P", "packs", "tokens apart", "pairs", "pieces: most (mean)", "tiles: worst (mean)"]
    head += ["rows in / out", "of contiguous", "exposed", *(f"step / {rival}" for rival in RIVALS)]
    rows, notes = [], []
    for r in records:
        steps = [f"{r[f'step_over_{k}']:.4f} ({r[f'mean_step_over_{k}']:.4f})" for k in RIVALS]
        rows.append(
            [
                r["model"],
                r["workload"],
                str(r["P"]),
                str(r["packs"]),
                str(r["token_spread"]),
                f"{r['pair_imbalance']:.4f}",
                f"{r['most_pieces']} ({r['mean_pieces']:.2f})",
                f"{r['tile_imbalance']:.3f} ({r['mean_tile_imbalance']:.3f})",
                f"{r['mean_rows_in']:,.0f} / {r['mean_rows_out']:,.0f}",
                f"{r['mean_contiguous_rows_in']:,.0f} / {r['mean_contiguous_rows_out']:,.0f}",
                f"{r['exposed']:.2%}",
                *steps,
            ]
        )
        notes += [f"- {r['model']}, {r['workload']}, P {r['P']}, {note}" for note in r["broken"] + r["listed"]]
    packs = sum(r["packs"] for r in records)
    broken = sum(len(r["broken"]) for r in records)
    found = f"\n{packs} layouts; {broken} break a limit or lose to a layout that holds them. Listed:\n\n"
    return table(head, rows) + found + "\n".join(notes) + "\n"


def times(records: list[dict]) -> str:
    head = (
        "model",
        "forest",
        "P",
        "tokens",
        "segments",
        "whole plan, ms",
        "processor, ms",
        "layout alone, ms",
        "chosen",
    )
    text = table(
        head,
        [
            [r["model"], r["workload"], str(r["P"]), f"{r['tokens']:,}", f"{r['segments']:,}"]
            + [f"{r[key]:.1f}" for key in ("ms", "cpu_ms", "layout_ms")]
            + [r["chosen"]]
            for r in records
        ],
    )
    for model in dict.fromkeys(r["model"] for r in records):
        mine = {r["workload"]: r for r in records if r["model"] == model}
        small, large = mine["mixed 0.1M"], mine["mixed 1M"]
        more, longer = large["tokens"] / small["tokens"], large["ms"] / small["ms"]
        text += f"\n{model}: {more:.1f} x the tokens take {longer:.1f} x as long at P {large['P']}.\n"
    return text


def packing(records: list[dict]) -> str:
    head = ("rollouts of", "rollouts", "flat tokens", "tree tokens", "packs", "packs at least", "replayed tokens", "ms")
    keys = ("rollouts", "flat_tokens", "tree_tokens", "packs", "packs_at_least", "replayed_tokens")
    text = table(head, [[r["workload"], *(f"{r[k]:,}" for k in keys), f"{r['ms']:.1f}"] for r in records])
    alone = [r["ms"] for r in records if r["workload"] != "all sets as one step"]
    return text + f"\nThe {len(alone)} sets one after the other: {sum(alone):.0f} ms.\n"


def attention(records: list[dict]) -> str:
    alone = [r for r in records if r["gpus"] == 1]
    text = ""
    for workload in dict.fromkeys(r["workload"] for r in alone):
        mine = _named_runs([r for r in alone if r["workload"] == workload])
        text += f"\n### {workload}: {mine[0]['tokens']:,} tokens, pair ratio {mine[0]['pair_ratio']:.2f}\n\n"
        text += _attention_table(mine, ("method",), ("vs_flat", "vs_best", "max_err", "peak_gib", "predicted_ms"))
    several = [r for r in records if r["gpus"] > 1]
    if several:
        text += f"\n### Several GPUs\n\n{SEVERAL}\n"
        about = ("workload", "gpus", "tokens", "layout", "exchange", "transport", "method")
        figures = ("exposed_ms", "moved_mib", "efficiency", "max_err", "peak_gib", "predicted_ms")
        text += _attention_table(several, about, figures)
    return text.lstrip("\n")


def _named_runs(records: list[dict]) -> list[dict]:
    """Rows of one workload, each with its run's fastest rival; of rows without flat methods only the newer ones."""
    # Only methods of ours have a predicted time.
    fastest = [r for r in records if r["vs_best"] == 1 and r.get("predicted_ms") is None]
    rivals = {(r["commit"], r["command"]): r["method"] for r in fastest}
    beside = {r["method"]: r for r in records if r["vs_flat"] is not None}
    shown = []
    for r in records:
        flat = beside.get(r["method"], r)
        if r["vs_flat"] is None and r["line"] < flat["line"]:
            continue
        newer = any(r["method"] == again["method"] and r["line"] < again["line"] for again in records)
        rival = rivals.get((r["commit"], r["command"]))
        other = rival not in (None, r["method"]) and r["vs_best"] is not None
        named = f"{cell(r['vs_best'])} ({rival})" if other else r["vs_best"]
        shown.append(r | {"method": r["method"] + (", beside flat" if newer else ""), "vs_best": named})
    return shown


ATTENTION_HEADS = {
    "vs_flat": "vs flat",
    "vs_best": "vs rival",
    "max_err": "error",
    "peak_gib": "peak GiB",
    "predicted_ms": "predicted",
    "exposed_ms": "exposed",
    "moved_mib": "moved MiB",
}


def _attention_table(records: list[dict], about: tuple[str, ...], figures: tuple[str, ...]) -> str:
    head = [*about, "forward", "backward", "both", "TFLOP/s", *(ATTENTION_HEADS.get(key, key) for key in figures)]
    rows = []
    for r in records:
        times = [f"{ms:.2f}" for ms in (r["fwd_ms"], r["bwd_ms"], r["fwd_ms"] + r["bwd_ms"])]
        rates = f"{r['tflops_fwd']:.0f} / {r['tflops_bwd']:.0f}"
        rows.append([*(cell(r[key]) for key in about), *times, rates, *(cell(r.get(key)) for key in figures)])
    return table(head, rows)


def gdn_times(records: list[dict]) -> str:
    head = (
        "workload",
        "method",
        "tokens",
        "chunks",
        "forward, ms",
        "backward, ms",
        "over many",
        "gain",
        "error",
        "GiB",
    )
    rows, stages = [], []
    for r in records:
        note = (", values wrong" if not r["right"] else "") + (", timing only" if r["timing_only"] else "")
        rows.append(
            [r["workload"], r["method"] + note, f"{r['tokens']:,}", f"{r['partial']:.3f}"]
            + [f"{r[key]:.2f}" for key in ("fwd_ms", "bwd_ms")]
            + [cell(r[key]) for key in ("vs_many", "vs_flat")]
            + [f"{r['max_err']:.2g}, {r['segment_err']:.2g}", f"{r['peak_gib']:.1f}"]
        )
        stages += stage_rows(r)
    return table(head, rows) + "\n" + table(STAGE_HEAD, stages)


STAGE_HEAD = ("workload", "method", "direction", "stage", "ms", "share", "least ms by memory traffic")


def stage_rows(record: dict) -> list[list[str]]:
    """Times of the stages of a record, beside the least that they can take."""
    rows = []
    for direction, table_of in record["stages"].items():
        total, about = max(1e-9, sum(ms for ms, _ in table_of.values())), [record["workload"], record["method"]]
        rows += [
            [*about, direction, name, f"{ms:.3f}", f"{ms / total:.0%}", f"{least:.3f}"]
            for name, (ms, least) in table_of.items()
        ]
    return rows


def gdn_layers(records: list[dict]) -> str:
    head = ("workload", "method", "tokens", "forward, ms", "backward, ms", "both", "projections alone, ms", "error")
    rows, stages = [], []
    for r in records:
        alone = [f"{r['projections'][key][0]:.2f}" for key in ("fwd", "bwd") if key in r["projections"]]
        times = [f"{ms:.2f}" for ms in (r["fwd_ms"], r["bwd_ms"], r["fwd_ms"] + r["bwd_ms"])]
        method = r["method"] + ("" if r["right"] else ", values wrong")
        rows.append([r["workload"], method, f"{r['tokens']:,}", *times, " + ".join(alone) or "–", cell(r["max_err"])])
        stages += stage_rows(r)
    return table(head, rows) + "\n" + table(STAGE_HEAD, stages)


def gdn_ranks(records: list[dict]) -> str:
    head = ("workload", "GPUs", "tokens", "layout", "exchange", "forward, ms", "backward, ms", "both", "one GPU, both")
    head += ("over one GPU", "predicted", "predicted exposed", "predicted over one", "error", "GiB")
    rows, stages = [], []
    for r in records:
        about = [cell(r[key]) for key in ("workload", "gpus", "tokens", "layout", "exchange")]
        total = r["fwd_ms"] + r["bwd_ms"]
        times = [f"{ms:.2f}" for ms in (r["fwd_ms"], r["bwd_ms"], total, r["one_gpu_ms"])]
        figures = ("ratio", "predicted_layer_ms", "predicted_exposed_ms", "predicted_ratio", "max_err", "peak_gib")
        rows.append([*about, *times, *(cell(r[key]) for key in figures)])
        for direction, table_of in r["stages"].items():
            shown = ", ".join(f"{name} {ms:.2f}" for name, (ms, _) in table_of.items())
            path = (r.get("predicted_path") or {}).get(direction)
            ahead = "–" if path is None else ", ".join(f"{name} {ms:.2f}" for name, ms in path.items())
            stages.append([*about[:1], *about[3:], direction, shown, ahead])
    head_of_stages = ("workload", "layout", "exchange", "direction", "stages, ms", "predicted, ms")
    return table(head, rows) + "\n" + table(head_of_stages, stages)


def heads(records: list[dict]) -> str:
    columns = ("workload", "method", "predictors", "hidden", "vocab", "head", "fwd_ms", "bwd_ms", "products_fwd_ms")
    columns += ("products_bwd_ms", "gain", "over_products", "max_err", "peak_gib")
    return table([key.replace("_", " ") for key in columns], [[cell(r[key]) for key in columns] for r in records])


def every_column(records: list[dict]) -> str:
    columns = [k for k in dict.fromkeys(k for r in records for k in r) if k not in ("bench", "line", *STAMP)]
    columns = [k for k in columns if any(r.get(k) is not None for r in records)]
    return table(columns, [[cell(r.get(k)) for k in columns] for r in records])


SECTIONS = {
    "planner-quality": Section("Layouts", QUALITY, quality),
    "planner-time": Section("Time to plan", TIMES, times),
    "packing": Section("Packing", PACKING, packing),
    "gdn": Section("Gated delta rule, one card", GDN, gdn_times),
    "gdn-layer": Section("Gated DeltaNet layer, one card", GDN_LAYER, gdn_layers),
    "gdn-ranks": Section("Gated DeltaNet layer, several cards", GDN_RANKS, gdn_ranks),
    "gdn-sweep": Section("Gated delta rule, launch options", GDN_SWEEP, every_column),
    "forest": Section("Building the forests of the seven sets", "Median of repeats on one core.\n", every_column),
    "attention": Section("Attention", ATTENTION, attention),
    "head": Section("LM head", LM_HEAD, heads),
    "step": Section("Training steps", STEP, steps),
    "step-layer": Section("One decoder layer", STEP_LAYER, step_layers),
    "game": Section("Learning the coin game", GAME, lambda records: table(*game_rows(records))),
}


def stamps(records: list[dict]) -> str:
    """Where and how the records of a section were measured."""
    found = {}
    for r in records:
        versions = ", ".join(f"{name} {version}" for name, version in r["versions"].items())
        found[f"- {r['date']}, commit {r['commit']}, {r['card']}, {versions}: `{r['command']}`"] = None
    return "\n".join(found) + "\n"


def page(records: list[dict]) -> str:
    last: dict[tuple, dict] = {}
    for line, r in enumerate(records):
        # One GPU's attention is compared with what ran beside it.
        compared = r["bench"] == "attention" and r["gpus"] == 1 and r["vs_flat"] is not None
        case = (*(r.get(key) for key in CASE), compared)
        before = last.get(case, {})
        last[case] = {key: before[key] for key in KEPT if key in before} | r | {"line": line}
    benches: dict[str, list[dict]] = {bench: [] for bench in SECTIONS}
    for r in last.values():
        benches.setdefault(r["bench"], []).append(r)
    text = HEAD
    for bench, of_bench in benches.items():
        gone = dict.fromkeys(r["method"] for r in of_bench if r.get("method") in GONE.get(bench, ()))
        shown = [r for r in of_bench if r.get("method") not in gone]
        if shown:
            section = SECTIONS.get(bench) or Section(bench.capitalize(), "", every_column)
            text += f"\n## {section.title}\n\n{section.text}\n{section.body(shown)}\n"
            text += f"Measured before, no longer offered: {'; '.join(gone)}.\n\n" if gone else ""
            text += f"Measured:\n\n{stamps(shown)}"
    return text


def main() -> None:
    PAGE.write_text(page([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
