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
    "art_5k16x100": Workload("art_5k16x100", 32, 4),
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
# Families of OpenPipe/ART: prompt tokens, rollouts, tokens of each; tree tokens for each GPU.
ART_PROMPT, ART_ROLLOUTS, ART_LENGTH, ART_TOKENS = 5000, 16, 100, 40_960


@cache
def workload_forest(tree: str, copies: int = 1, data: Path = DATA) -> Forest:
    """The forest of a workload's tree, for as many GPUs as ``copies``.

    The pairs of a GPU are to stay the same. A tree is therefore repeated without sharing anything; `art_5k16x100` gets
    more families. `chain_128k` is the same chain on any number: a chain of ``1 / sqrt(GPUs)`` of its tokens has the
    pairs of one of them (`one_gpu_forest`).

    Raises:
        ValueError: for a real set whose file is not in ``data``.
    """
    if tree == "art_5k16x100":
        return _build(list(_art(copies)))
    if tree == "chain_128k":
        return _build(list(_prompted(tree)))
    once = list(_prompted(tree) if tree in PROMPTS else _real(tree, data))
    return _build([(row, f"{copy} {group}") for copy in range(copies) for row, group in once])


def one_gpu_forest(tree: str, gpus: int, data: Path = DATA) -> Forest:
    """What one of so many GPUs would do without the others: a forest with its share of the pairs, or nearly so."""
    if tree == "chain_128k":
        return _build([(np.arange(round(PROMPTS[tree][2][0] / gpus**0.5)), "")])
    return workload_forest(tree, 1, data)


def _build(rows_of_groups: list[tuple[np.ndarray, str]]) -> Forest:
    rows, group = zip(*rows_of_groups, strict=True)
    start = np.cumsum([0] + [len(row) for row in rows])
    return build_forest(np.concatenate(rows), start, np.unique(group, return_inverse=True)[1])


def _art(gpus: int) -> Iterator[tuple[np.ndarray, str]]:
    """Whole families, and of a last one what is left: all of its rollouts that fit, and a shorter prompt."""
    left = ART_TOKENS * gpus
    for family in range(left // (ART_PROMPT + ART_ROLLOUTS * ART_LENGTH) + 1):
        rollouts = min(ART_ROLLOUTS, (left - 1) // ART_LENGTH)
        prompt = min(ART_PROMPT, left - rollouts * ART_LENGTH)
        left -= prompt + rollouts * ART_LENGTH
        for rollout in range(rollouts):
            yield np.concatenate([np.arange(prompt), np.full(ART_LENGTH, 10**6 + rollout)]), str(family)


def _prompted(tree: str) -> Iterator[tuple[np.ndarray, str]]:
    trees, prompt, lengths = PROMPTS[tree]
    if lengths is None:
        drawn = np.random.default_rng(0).integers(100, 651, 80)
        lengths = np.diff(np.round(np.append(0, np.cumsum(drawn)) * GRPO_TOKENS / drawn.sum()).astype(np.int64))
        lengths = lengths.reshape(trees, -1)
    else:
        lengths = np.tile(lengths, (trees, 1))
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
