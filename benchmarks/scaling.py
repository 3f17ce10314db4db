"""The tables of docs/scaling.md: predicted scaling of the made batches, as Markdown.

    python -m benchmarks.scaling > tables.md

The same figures as `python -m cp_engine plan --synthetic NAME --model MODEL --sweep cp=1,2,4,...,512`.
"""

from __future__ import annotations

from cp_engine.machines import MACHINES
from cp_engine.model_sizes import model_sizes
from cp_engine.plan_report import PlanSettings
from cp_engine.scaling import SYNTHETIC, ScalingRow, sweep, synthetic_rollouts
from cp_engine.sharding.attention_plan import EXCHANGES
from cp_engine.sharding.cost import PRESETS

COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def main() -> None:
    for name in SYNTHETIC:
        flat = synthetic_rollouts(name)
        for model in PRESETS:
            settings = PlanSettings(cp=max(COUNTS), model=model_sizes(model), machine=MACHINES["h200"])
            rows = list(sweep(flat, COUNTS, settings))
            for scaling in ("strong", "weak"):
                print(f"\n### `{name}`, {model}, {scaling}\n")
                _print_table([row for row in rows if row.scaling == scaling])


def _print_table(rows: list[ScalingRow]) -> None:
    print(f"| ranks | tree tokens | {' | '.join(EXCHANGES)} |")
    print("|---" * (2 + len(EXCHANGES)) + "|")
    for cp in COUNTS:
        here = [row for row in rows if row.cp == cp]
        cells = [_cell(here[min(place, len(here) - 1)]) for place in range(len(EXCHANGES))]
        print(f"| {cp} | {here[0].tree_tokens:,} | {' | '.join(cells)} |")


def _cell(row: ScalingRow) -> str:
    """Step, efficiency, and what limits it with its share of the step."""
    if row.refused is not None:
        return "cannot run"
    text = f"{row.step_ms:,.0f} ms, {row.efficiency:.0%}"
    return text if row.limit == "none" else f"{text} ({row.limit} {row.lost[row.limit]:.0%})"


if __name__ == "__main__":
    main()
