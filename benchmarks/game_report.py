"""The section of docs/benchmarks.md about the coin game."""

from __future__ import annotations

GAME = """`launch/play.py`: GRPO from random weights on CPU ranks. Each step plays fresh games (8 cabinets, 8 games of
each) with plain `transformers` generate on the engine's weights and takes one optimizer step on them. Start and end:
mean reward of the greedy policy on 64 fixed cabinets that no step trains on, before the first and after the last step;
the target is a gain of 0.3, the best policy earns 0.875 where the coin lies anywhere equally often. Parts: mean reward
of the sampled games in each quarter of the run. Gap: largest difference of log-probs between generate and the engine,
on the last step's rollouts. The two cores were shared with much other work: seconds say little, processor seconds of
the first rank (playing included) more.
"""


def game_rows(records: list[dict]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Head and rows of the table, one row a run."""
    head = ("level", "model", "seed", "ranks", "steps", "start", "end", "gain", "parts", "tokens, flat / tree", "gap")
    rows = []
    for r in records:
        quarter = -(-len(r["rewards"]) // 4)
        parts = [r["rewards"][i : i + quarter] for i in range(0, len(r["rewards"]), quarter)]
        rows.append(
            [r["workload"].removeprefix("level "), r["model"], str(r["seed"]), str(r["P"]), str(r["steps"])]
            + [f"{r['start']:.3f}", f"{r['end']:.3f}", f"{r['end'] - r['start']:.3f}"]
            + [", ".join(f"{sum(part) / len(part):.2f}" for part in parts)]
            + [f"{r['flat_over_tree']:.2f}", f"{r['sampler_gap']:.1e}"]
            + [f"{r[key]:.0f}" for key in ("seconds", "cpu_seconds")]
        )
    return (*head, "seconds", "processor seconds"), rows
