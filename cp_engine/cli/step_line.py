"""One line a step for the console."""

from __future__ import annotations

import math
from typing import Any

from rich.text import Text


def step_line(metrics: dict[str, Any]) -> Text:
    """What is worth watching of a step's metrics; the console drops the colours where it is no terminal."""
    line = Text.assemble(
        (f"step {metrics['step']}", "bold"), ": ", (f"loss {metrics['loss']:.4f}", "cyan"),
        f", grad norm {metrics['grad_norm']:.3f}, lr {metrics['lr']:.3g}",
    )  # fmt: skip
    for name, label in (("kl_ref", "KL"), ("entropy", "entropy")):
        if name in metrics:
            line.append(f", {label} {metrics[name]:.3f}")
    clipped = metrics["clipped_high"] + metrics["clipped_low"]
    if clipped:
        line.append(f", {clipped:.1%} clipped", "yellow")
    line.append(f", {metrics['tree_tokens']:,} of {metrics['flat_tokens']:,} tokens computed")
    line.append(f", {metrics['flat_tokens_per_s']:,.0f} tokens/s as flat", "green")
    if metrics["mfu"] is not None:
        line.append(f", MFU {metrics['mfu']:.1%} ({metrics['mfu_flat']:.1%} as flat)", "green")
    if metrics["peak_gib"] is not None:
        line.append(f", {metrics['peak_gib']:.1f} GiB")
    line.append(f", {metrics['seconds']:.2f} s")
    if metrics["skipped"]:
        zero = math.isfinite(metrics["grad_norm"])
        line.append(f", skipped: {'all rollouts are overlong' if zero else 'a gradient is not finite'}", "bold red")
    return line
