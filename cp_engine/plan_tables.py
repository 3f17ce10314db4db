"""The `plan` command's figures as tables for people."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from cp_engine.plan_report import PlanSettings
from cp_engine.scaling import LIMITS, WEAK_TOKENS, ScalingRow

RANK_COLUMNS = ("tokens", "pairs", "pieces", "fragments", "rows_in", "rows_out")
MOST_RANKS = 32  # ranks that get a line each; of more ranks only the smallest, mean and largest figures are shown
SWEEP_COLUMNS = ("GiB", "step ms", "exposed ms", "speed-up", "efficiency")
_LAYER_NAMES = {
    "attention": "one attention layer",
    "window": "one attention layer with a sliding window",
    "gdn": "one gdn layer",
    "relay": "moving hidden states around one run of gdn layers",
}
FILE_WIDTH = 160  # characters of a line where the output is no terminal


def print_plan(report: dict) -> None:
    """Print the figures of `plan_report`."""
    console = _console()
    summary = _table("figure", "value", first_left=True)
    for name, value in report.items():
        if name not in ("packs", "predicted"):
            summary.add_row(name, f"{value:,}")
    _print(console, "rollouts", summary)
    for index, pack in enumerate(report["packs"]):
        title = (
            f"pack {index}: {pack['tree_tokens']:,} tree tokens, layout {pack['layout_method']}, max over mean "
            f"{pack['token_imbalance']:.3f} in tokens, {pack['pair_imbalance']:.3f} in pairs"
        )
        gdn = pack["gdn_layout"]
        notes = []
        if gdn is not None:
            title += "; GDN layers have a layout of their own" if gdn["own"] else ""
            notes = [f"GDN layers: {gdn['reason']}"]
        _print(console, title, _rank_table(pack), pack["exchange_reason"], *notes)
    predicted = report["predicted"]
    scaled = "" if predicted["device_measured"] else ", scaled from the H200"
    where = "one host" if predicted["nodes"] == 1 else f"{predicted['nodes']} hosts of {predicted['gpus_per_node']}"
    title = f"predicted for {predicted['model']} on {predicted['device']}{scaled}, {where}"
    _print(console, title, _prediction_table(predicted, report["packs"]))


def _print(console: Console, title: str, table: Table, *notes: str) -> None:
    """A table between its title and notes, which keep their lines however narrow the table is."""
    console.print(title, style="bold", soft_wrap=True, highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)
    console.print()


def _rank_table(pack: dict) -> Table:
    table = _table("rank", *RANK_COLUMNS)
    ranks = pack["ranks"]
    if len(ranks) <= MOST_RANKS:
        for rank, figures in enumerate(ranks):
            table.add_row(str(rank), *(f"{figures[name]:,}" for name in RANK_COLUMNS))
        return table
    values = np.array([[figures[name] for name in RANK_COLUMNS] for figures in ranks])
    for name, row in (("smallest", values.min(0)), ("mean", values.mean(0)), ("largest", values.max(0))):
        table.add_row(f"{name} of {len(ranks)}", *(f"{value:,.0f}" for value in row))
    return table


def _prediction_table(predicted: dict, packs: list[dict]) -> Table:
    table = _table("what", "value", first_left=True)
    for index, pack in enumerate(packs):
        for kind, layer in pack["predicted"]["layers"].items():
            table.add_row(
                f"pack {index}: {_LAYER_NAMES[kind]}, forward + backward",
                f"{layer['forward_ms']:,.3f} + {layer['backward_ms']:,.3f} ms, "
                f"{layer['exposed_ms']:,.3f} of it exposed exchange",
            )
    table.add_row(
        "all decoder layers, all packs",
        f"{predicted['step_ms']:,.3f} ms: compute {predicted['compute_ms']:,.3f}, "
        f"exposed exchange {predicted['exposed_ms']:,.3f}",
    )
    table.add_row(
        "against one GPU",
        f"{predicted['one_gpu_ms']:,.3f} ms: {predicted['speedup_over_one_gpu']:.2f} times faster, "
        f"efficiency {predicted['efficiency']:.1%}",
    )
    table.add_row(
        "against flat training on as many GPUs, perfectly shared",
        f"{predicted['flat_ms']:,.3f} ms: {predicted['speedup_over_flat']:.2f} times faster",
    )
    memory, layers = predicted["memory_gib"], predicted["recompute_layers"]
    recompute = predicted["recompute"] if layers is None else f"{predicted['recompute']} in the first {layers}"
    parts = ", ".join(f"{name} {value:.1f}" for name, value in memory.items() if name != "total")
    fits = "" if memory["total"] <= predicted["device_memory_gib"] else ": does NOT fit"
    table.add_row(
        f"memory of the fullest GPU, {predicted['engine']}, recompute {recompute}",
        f"{memory['total']:.1f} of {predicted['device_memory_gib']:.0f} GiB{fits} ({parts}); forward peak "
        f"{predicted['forward_peak_gib']:.1f}, backward {predicted['backward_peak_gib']:.1f}",
    )
    return table


def print_sweep(rows: list[ScalingRow], settings: PlanSettings) -> None:
    """Print predicted scaling, strong and weak, and what limits each row."""
    console = _console()
    machine = settings.machine
    scaled = "" if machine.measured else ", scaled from the H200"
    for scaling, what in (("strong", "one forest"), ("weak", f"about {WEAK_TOKENS:,} tree tokens a rank")):
        table = _table("cp", "hosts", "tree tokens", "exchange", *SWEEP_COLUMNS, *LIMITS, "limit")
        chosen = [row for row in rows if row.scaling == scaling]
        for row in chosen:
            table.add_row(*_sweep_cells(row))
        title = (
            f"{scaling} scaling, {what}: {settings.model.name} on {machine.name}{scaled}, hosts of "
            f"{machine.gpus_per_node}, {settings.layout} layout"
        )
        refused = [f"{row.exchange} cannot run at cp {row.cp}: {row.refused}" for row in chosen if row.refused]
        _print(console, title, table, *refused)
    notes = [
        f"GiB: memory of the fullest GPU, which has {machine.memory_bytes / 2**30:.0f}",
        "step: all decoder layers, forward and backward; speed-up and efficiency: over one GPU for the same forest",
    ]
    notes += [f"{name}: percent of the step for {meaning}" for name, meaning in LIMITS.items()]
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)


def _sweep_cells(row: ScalingRow) -> list[str]:
    head = [str(row.cp), str(row.hosts), f"{row.tree_tokens:,}", row.exchange]
    if row.refused is not None:
        return [*head, *["-"] * (len(SWEEP_COLUMNS) + len(LIMITS)), "cannot run"]
    memory = f"{row.memory_gib:,.0f}"
    figures = [memory, f"{row.step_ms:,.1f}", f"{row.exposed_ms:,.1f}", f"{row.speedup:,.1f}", f"{row.efficiency:.1%}"]
    return [*head, *figures, *(f"{100 * row.lost[name]:.1f}" for name in LIMITS), row.limit]


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, FILE_WIDTH))


def _table(*columns: str, first_left: bool = False) -> Table:
    """A table whose columns are numbers, but for the first one with ``first_left``."""
    table = Table(*columns)
    for column in table.columns[first_left:]:
        column.justify = "right"
    return table
