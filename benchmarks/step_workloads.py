"""The rollouts that training steps are measured on: the shapes of published papers and the real sets.

Shapes: R rollouts, L tokens of one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.attention_workloads import DATA
from cp_engine.rollouts import Rollout, read_rollouts

# Groups, prompt tokens, and answer tokens of each rollout of a group: a number, or (least, most) to draw from.
PROMPTS = {
    "p8k_r2k_n16": (1, 8192, 16, 2048),
    "p8k_r2k_n32": (1, 8192, 32, 2048),
    "p5k_n16": (5, 5000, 16, (100, 1000)),
    "dualkv_8k_mb16": (1, 8192, 16, 2048),
    "dualkv_16k_mb8": (1, 16_384, 8, 2048),
    "dualkv_32k_mb4": (1, 32_768, 4, 2048),
    "tiny": (2, 24, 4, (3, 9)),
}
# Real sets share inside a group and over groups (the system prompt).
SETS = ("tau_airline", "toolbench_dfs", "gsm8k_solutions")
WORKLOADS = (*PROMPTS, *SETS)


def workload_rollouts(
    name: str, vocab_size: int, copies: int = 1, most_tokens: int | None = None, data: Path = DATA, prompts: int = 1
) -> list[Rollout]:
    """The rollouts of a step, the same at every call.

    Args:
        copies: rollouts of each prompt times this; of real sets ``most_tokens`` times this.
        prompts: prompts times this; of real sets ``most_tokens`` times this.
        most_tokens: of a real set whole groups in file order, until they hold so many flat tokens; None takes all.

    Raises:
        ValueError: for a real set whose file is not in ``data``.
    """
    if name in SETS:
        return _real(name, None if most_tokens is None else most_tokens * copies * prompts, data)
    groups, prompt_tokens, rollouts, answer = PROMPTS[name]
    numbers = np.random.default_rng(0)
    made = []
    for group in range(groups * prompts):
        prompt = numbers.integers(0, vocab_size, prompt_tokens)
        for number in range(rollouts * copies):
            tokens = answer if isinstance(answer, int) else int(numbers.integers(answer[0], answer[1] + 1))
            own = numbers.integers(0, vocab_size, tokens)
            own[0] = number % vocab_size  # rollouts differ from their first own token on
            mask = np.arange(prompt_tokens + tokens) >= prompt_tokens
            ids = np.concatenate([prompt, own])
            made.append(Rollout(ids, mask, str(group), str(number), reward=float(numbers.normal())))
    return made


def _real(name: str, most_tokens: int | None, data: Path) -> list[Rollout]:
    path = data / "tokens" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder that holds tokens/{path.name} with --data")
    rollouts = read_rollouts(path)
    if most_tokens is None:
        return rollouts
    end = np.cumsum([rollout.length for rollout in rollouts])
    last_of_group = [a.group != b.group for a, b in zip(rollouts, rollouts[1:], strict=False)] + [True]
    whole = [place + 1 for place, last in enumerate(last_of_group) if last and end[place] <= most_tokens]
    if not whole:
        raise ValueError(f"the first group of {name} has more than the {most_tokens} tokens that were asked for")
    return rollouts[: whole[-1]]


def unshared(rollouts: list[Rollout]) -> list[Rollout]:
    """The same rollouts, each a row of its own: no two share a token."""
    return [
        replace(rollout, share_key=np.full(rollout.length, number, np.int64)) for number, rollout in enumerate(rollouts)
    ]
