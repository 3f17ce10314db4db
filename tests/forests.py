"""Random forests, rollouts and layouts for tests, and the naive definitions that plans are compared with.

A naive trie numbers its nodes by dictionaries over whole prefixes, and shares no code with `cp_engine.sharding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_engine.rollouts import Rollout
from cp_engine.sharding.forest import Forest, build_forest
from cp_engine.sharding.layout import Layout, layout_from_cuts

# The closed form of the first issue: 23 row tokens, 9 unique, 30 visible pairs.
CLOSED_FORM_ROWS = (
    (11, 12, 13, 14, 15),
    (11, 12, 13, 14, 21, 22),
    (11, 12, 31),
    (11, 12, 13, 14, 15),
    (11, 12, 13),
    (41,),
)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rollouts as plain lists, and the forest built from them."""

    rows: list[list[int]]
    groups: list[int]
    share: str = "batch"
    keys: list[list[int]] | None = None

    @property
    def token(self) -> np.ndarray:
        return np.array([t for row in self.rows for t in row], np.int64)

    @property
    def row_start(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([len(row) for row in self.rows])]).astype(np.int64)

    @property
    def group(self) -> np.ndarray:
        return np.array(self.groups, np.int64)

    @property
    def share_key(self) -> np.ndarray | None:
        return None if self.keys is None else np.array([k for row in self.keys for k in row], np.int64)

    @cached_property
    def forest(self) -> Forest:
        group = self.group if self.share == "group" else None
        return build_forest(self.token, self.row_start, group, self.share_key)

    def prefix(self, rollout: int, position: int) -> tuple:
        """What two (rollout, position) share exactly when they are one tree token."""
        head = self.groups[rollout] if self.share == "group" else 0
        keys = () if self.keys is None else tuple(self.keys[rollout][: position + 1])
        return head, tuple(self.rows[rollout][: position + 1]), keys

    @cached_property
    def node_of(self) -> list[list[int]]:
        """The tree token of every (rollout, position), by the forest's own numbering, checked to be consistent."""
        flat, start = self.forest.flat_to_tree(), self.row_start
        return [flat[start[r] : start[r + 1]].tolist() for r in range(len(self.rows))]

    @cached_property
    def paths(self) -> list[list[int]]:
        """Ancestors of each tree token, root first, the token itself last: from the rows alone."""
        paths: list[list[int] | None] = [None] * self.forest.tokens
        for nodes in self.node_of:
            for position, node in enumerate(nodes):
                paths[node] = nodes[: position + 1]
        assert all(path is not None for path in paths), "a tree token that no rollout visits"
        return paths

    def mask(self, seed: int, share: float = 0.7) -> np.ndarray:
        return np.random.default_rng(seed).random(len(self.token)) < share

    def rollouts(self, seed: int = 0) -> list[Rollout]:
        """As `Rollout` objects with random masks, rewards of both signs and log-probs."""
        rng = np.random.default_rng(seed)
        made = []
        for index, (row, group) in enumerate(zip(self.rows, self.groups, strict=True)):
            logprob = {
                name: -rng.exponential(1.0, len(row)) for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
            }
            made.append(
                Rollout(
                    input_ids=row,
                    loss_mask=rng.random(len(row)) < 0.7,
                    group=group,
                    rollout=index,
                    reward=float(rng.normal()),
                    share_key=None if self.keys is None else self.keys[index],
                    **logprob,
                )
            )
        return made


def closed_form_rows() -> Rows:
    return Rows([list(row) for row in CLOSED_FORM_ROWS], [0] * len(CLOSED_FORM_ROWS))


def random_rows(
    seed: int, rows: int = 12, longest: int = 14, vocabulary: int = 3, share: str = "batch", keyed: bool = False
) -> Rows:
    """Rows that share heavily: duplicates, strict prefixes, one-token rows and continuations are all common."""
    rng = np.random.default_rng(seed)
    made: list[list[int]] = []
    for _ in range(int(rng.integers(1, rows + 1))):
        fresh = rng.integers(0, vocabulary, int(rng.integers(1, longest + 1))).tolist()
        kind = rng.random()
        if not made or kind < 0.3:
            made.append(fresh)
            continue
        base = made[int(rng.integers(len(made)))]
        if kind < 0.4:
            made.append(list(base))
        elif kind < 0.5:
            made.append(base[: int(rng.integers(1, len(base) + 1))])
        elif kind < 0.55:
            made.append(fresh[:1])
        else:
            made.append(base[: int(rng.integers(1, len(base) + 1))] + fresh[: int(rng.integers(1, len(fresh) + 1))])
    groups = rng.integers(0, 3, len(made)).tolist()
    keys = [(rng.random(len(row)) < 0.1).astype(int).tolist() for row in made] if keyed else None
    return Rows(made, groups, share, keys)


def random_variety(seed: int) -> Rows:
    """`random_rows` with the sharing, the vocabulary and the keys drawn as well."""
    return random_rows(
        seed,
        rows=(4, 12, 25)[seed % 3],
        longest=(3, 14, 30)[seed // 3 % 3],
        vocabulary=2 + seed % 2,
        share="group" if seed % 4 == 3 else "batch",
        keyed=seed % 5 == 4,
    )


def random_layout(forest: Forest, seed: int, world: int | None = None) -> Layout:
    """Several pieces in a random order of ranks; ranks without tokens and more ranks than tokens are common."""
    rng = np.random.default_rng(seed)
    world = int(rng.integers(1, 7)) if world is None else world
    pieces = int(rng.integers(1, 3 * world + 1))
    cuts = np.sort(rng.integers(0, forest.tokens + 1, pieces - 1))
    return layout_from_cuts(np.concatenate([[0], cuts, [forest.tokens]]), rng.integers(0, world, pieces), world)


def chain_forest(segments: int) -> Forest:
    """One path of one-token segments, each of which ends a rollout."""
    index = np.arange(segments)
    return Forest(
        token=index % 7,
        segment_start=np.arange(segments + 1),
        parent=index - 1,
        depth=index,
        subtree_end=np.full(segments, segments),
        end_segment=index,
    )


def comb_rows(depth: int) -> Rows:
    """A trunk of ``depth`` tokens with one leaf token at every depth: every branch point nests in the one above."""
    return Rows([[0] * (i + 1) + [1] for i in range(depth)], [0] * depth)
