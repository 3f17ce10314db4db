"""The summary table of a quick start: what the training did, what sharing saved, and whether the engine was exact.

Usage: python launch/summary.py RUN, a folder with metrics.jsonl (from `train`) and verify.log (from `verify --json`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def last_json_line(path: Path) -> dict:
    """The JSON object on the last line of a command's output; other libraries may have written above it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        raise SystemExit(f"{path} does not end with a JSON object: `verify` failed, see its messages above") from None
    return found


def summary_table(steps: list[dict], check: dict) -> Table:
    """Rows of (what, value) from the metrics of all steps and the result of one `verify`."""
    first, last = steps[0], steps[-1]
    table = Table(title="cp_engine quick start", show_header=False)
    table.add_row("training steps", str(len(steps)))
    table.add_row("loss, first -> last step", f"{first['loss']:.4f} -> {last['loss']:.4f}")
    table.add_row("tokens a step, rollout by rollout", f"{last['flat_tokens']:,}")
    share = last["flat_tokens"] / last["tree_tokens"]
    table.add_row("tokens a step, as a tree", f"{last['tree_tokens']:,} ({share:.1f} times fewer)")
    table.add_row("busiest rank's tokens / mean", f"{last['token_imbalance']:.3f}")
    table.add_row("busiest rank's attention / mean", f"{last['pair_imbalance']:.3f}")
    table.add_section()
    verdict = "[green]exact[/green]" if check["ok"] else "[red]NOT exact[/red]"
    table.add_row("check against the unmodified model", f"{verdict} on {check['occurrences']:,} trained tokens")
    table.add_row("largest log-prob error", f"{check['max_logprob_err']:.1e}")
    table.add_row("loss error", f"{check['loss_err']:.1e}")
    table.add_row("largest gradient error", f"{check['max_grad_err']:.1e} ({check['worst_tensor']})")
    return table


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python launch/summary.py RUN")
    run = Path(sys.argv[1])
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    Console().print(summary_table(steps, last_json_line(run / "verify.log")))


if __name__ == "__main__":
    main()
