"""The trees that attention is measured on, by name: the shapes of published papers and the real sets.

Shapes: N flat tokens, R rollouts, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from cp_engine.sharding.forest import Forest, build_forest

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@dataclass(frozen=True)
class Workload:
    """A tree and the heads of one layer."""

    tree: str
    query_heads: int = 32
    kv_heads: int = 8
    size: int = 128


WORKLOADS = {
    "grpo_5k16": Workload("grpo_5k16"),
    "dualkv_4k28": Workload("dualkv_4k28"),
    "dualkv_16k28": Workload("dualkv_16k28"),
    "dualkv_32k16": Workload("dualkv_32k16"),
    "d256_16k16": Workload("one_16k16", 16, 2, 256),
    "tau_calls": Workload("tau_airline_calls"),
    "tau_calls_d256": Workload("tau_airline_calls", 16, 2, 256),
    "toolbench": Workload("toolbench_dfs"),
    "game24": Workload("game24_tree"),
    "chain_128k": Workload("chain_128k"),
}
# Trees with a shared prompt: trees, prompt tokens, tokens of each rollout.
PROMPTS = {
    "grpo_5k16": (5, 5000, None),
    "dualkv_4k28": (1, 4096, [2048] * 28),
    "dualkv_16k28": (1, 16384, [2048] * 28),
    "dualkv_32k16": (1, 32768, [2048] * 16),
    "one_16k16": (1, 16384, [2048] * 16),
    "chain_128k": (1, 0, [131072]),
}
GRPO_TOKENS = 30_020  # of the 80 rollouts of `grpo_5k16` after their prompts


@cache
def forest_of(tree: str, data: Path = DATA) -> Forest:
    """The forest of a workload's tree.

    Raises:
        ValueError: for a real set whose file is not in ``data``.
    """
    rows, group = zip(*(_prompted(tree) if tree in PROMPTS else _real(tree, data)), strict=True)
    start = np.cumsum([0] + [len(row) for row in rows])
    return build_forest(np.concatenate(rows), start, np.unique(group, return_inverse=True)[1])


def _prompted(tree: str) -> Iterator[tuple[np.ndarray, str]]:
    trees, prompt, lengths = PROMPTS[tree]
    if lengths is None:
        drawn = np.random.default_rng(0).integers(100, 651, 80)
        lengths = np.diff(np.round(np.append(0, np.cumsum(drawn)) * GRPO_TOKENS / drawn.sum()).astype(np.int64))
        lengths = lengths.reshape(trees, -1)
    else:
        lengths = np.asarray([lengths])
    for number, of_tree in enumerate(lengths):
        for rollout, length in enumerate(of_tree):
            # Rollouts differ from their first own token on.
            yield np.concatenate([np.arange(prompt), np.full(length, 10**6 + rollout)]), str(number)


def _real(tree: str, data: Path) -> Iterator[tuple[np.ndarray, str]]:
    path = data / "tokens" / f"{tree}.jsonl.gz"
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder that holds tokens/{path.name} with --data")
    with gzip.open(path, "rt") as file:
        for line in file:
            record = json.loads(line)
            yield np.asarray(record["input_ids"]), record["group"]
