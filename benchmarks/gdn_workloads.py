"""What the gated delta rule is measured on: trees, random rows of one layer, and the truth on part of a tree.

Shapes: T tree tokens, N flat tokens, m tokens of a part, t sample tokens, Hk key heads, H value heads, K and V head
sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from benchmarks.attention_workloads import workload_forest
from cp_engine.kernels.conv.reference import l2_normalise
from cp_engine.kernels.gdn import api
from cp_engine.layers.gdn_tables import GdnHeads
from cp_engine.sharding.forest import Forest, build_forest, expand_ranges
from cp_engine.sharding.gdn_plan import GdnPlan, gdn_plan
from cp_engine.sharding.layout import contiguous_layout

HEADS = GdnHeads(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
CONV_WIDTH = 4
# Trees by the name of their workload; real sets share inside a group.
WORKLOADS = {
    "grpo_5k16": "grpo_5k16",
    "tau_calls": "tau_airline_calls",
    "toolbench": "toolbench_dfs",
    "game24": "game24_tree",
    "chain_64k": "chain_64k",
    "chain_128k": "chain_128k",
}
MANY = "grpo_5k16"  # its rollouts, every one alone, give the many-sequence rate: 80 sequences, 430,020 tokens
CHAINS = {"chain_64k": 65_536, "chain_128k": 131_072}
FLAT_TOKENS = 450_000  # of one call on rollouts alone; a call keeps over 100 KiB a token
SAMPLE_TOKENS = 20_000  # flat tokens on which a result is compared with float64
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")


def tree_of(workload: str, data: Path) -> Forest:
    """The forest of a workload.

    Raises:
        ValueError: for a real set whose file is not in ``data``.
    """
    return sequences([CHAINS[workload]]) if workload in CHAINS else workload_forest(WORKLOADS[workload], data=data)


def sequences(lengths) -> Forest:
    """Rollouts that share nothing, in the order given."""
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    each = np.arange(len(lengths))
    return Forest(np.arange(start[-1]), start, np.full(len(lengths), -1), np.zeros_like(each), start[1:], each)


def plan_of(forest: Forest) -> GdnPlan:
    """All of a forest on one rank."""
    return gdn_plan(forest, contiguous_layout(forest, 1), 0, "affine", CONV_WIDTH)


@dataclass(frozen=True, eq=False)
class Part:
    """Rows that go through the kernels at once: tokens of the tree, perhaps several times."""

    forest: Forest  # of the rows
    token: np.ndarray  # int64 [m] tree token of each row
    owner: np.ndarray  # bool [m] false on copies of a token after its first


def tree_part(forest: Forest) -> Part:
    return Part(forest, np.arange(forest.tokens), np.ones(forest.tokens, bool))


def flat_parts(forest: Forest, most: int = FLAT_TOKENS) -> Iterator[Part]:
    """Every rollout alone, in parts of at most ``most`` tokens (or of one rollout)."""
    token, length = forest.flat_to_tree(), forest.rollout_length
    owner = np.zeros(len(token), bool)
    owner[np.unique(token, return_index=True)[1]] = True
    start = np.concatenate([[0], np.cumsum(length)])
    begin = 0
    while begin < len(length):
        end = max(begin + 1, int(np.searchsorted(start, start[begin] + most, side="right")) - 1)
        rows = slice(start[begin], start[end])
        yield Part(sequences(length[begin:end]), token[rows], owner[rows])
        begin = end


def chunk_count(forest: Forest, size: int = 64) -> int:
    """Chunks when they restart at every segment."""
    return int((-(-forest.segment_length // size)).sum())


def draw(tokens: int, heads: GdnHeads, device, dtype: torch.dtype, seed: int = 0) -> tuple[api.Inputs, torch.Tensor]:
    """Random rows and the gradient of their outputs.

    Decay is slow (alpha between 0.97 and 0.9999), keys have a direction in common and half of the heads a small beta,
    so that a wrong entry state shows.
    """
    made = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=made)

    def uniform() -> torch.Tensor:
        return torch.rand((tokens, heads.value_heads), device=device, generator=made)

    q = l2_normalise(normal(tokens, heads.key_heads, heads.key_dim)).to(dtype)
    k = l2_normalise(normal(tokens, heads.key_heads, heads.key_dim) + normal(heads.key_dim)).to(dtype)
    v = normal(tokens, heads.value_heads, heads.value_dim).to(dtype)
    share = torch.where(torch.arange(heads.value_heads, device=device) % 2 == 0, 1.0, 0.1)
    inputs = api.Inputs(q, k, v, torch.log(0.97 + 0.0299 * uniform()), uniform() * share)
    return inputs, normal(tokens, heads.value_heads, heads.value_dim).to(dtype)


@dataclass(eq=False)
class Problem:
    """A tree, rows for it, and what a right method finds on some of its rollouts."""

    forest: Forest
    heads: GdnHeads
    inputs: api.Inputs
    dout: torch.Tensor  # [T, H, V]
    sample_tokens: int = SAMPLE_TOKENS

    @classmethod
    def make(cls, forest: Forest, heads: GdnHeads, device, dtype: torch.dtype, sample_tokens: int = SAMPLE_TOKENS):
        return cls(forest, heads, *draw(forest.tokens, heads, device, dtype), sample_tokens)

    @cached_property
    def sample(self) -> Forest:
        """The forest of some rollouts alone; its ids are tree tokens.

        Outputs on it depend on nothing else, and so do the gradients of an output gradient that is zero elsewhere.
        """
        forest = self.forest
        offered = _offered(forest)
        token, length = forest.flat_to_tree(), np.minimum(forest.rollout_length, self.sample_tokens)
        taken = offered[np.cumsum(length[offered]) <= self.sample_tokens]
        start = (np.cumsum(forest.rollout_length) - forest.rollout_length)[taken]
        return build_forest(token[expand_ranges(start, length[taken])], np.append(0, np.cumsum(length[taken])))

    @cached_property
    def sample_row(self) -> torch.Tensor:
        """int64 [T]: row of each token in the sample, -1 elsewhere."""
        row = np.full(self.forest.tokens, -1)
        row[self.sample.token] = np.arange(self.sample.tokens)
        return torch.as_tensor(row, device=self.dout.device)

    def on_sample(self) -> tuple[api.Inputs, torch.Tensor]:
        token = torch.as_tensor(self.sample.token, device=self.dout.device)
        return api.Inputs(*(x[token] for x in self.inputs)), self.dout[token]

    @cached_property
    def truth(self) -> dict[str, torch.Tensor]:
        """Float64 results on the sample [t, ...], from the reference kernels."""
        inputs, dout = self.on_sample()
        inputs, dout = api.Inputs(*(x.double() for x in inputs)), dout.double()
        p, rows = plan_of(self.sample), len(dout)
        tables = api.chunk_tables(
            p.fragment_row, p.fragment_parent, p.fragment_entry, p.exit_fragment, p.exit_entry, p.entry_level,
            rows, device=dout.device,
        )  # fmt: skip
        stages = api.chunk_stages(inputs, tables)
        back = api.backward_stages(inputs, stages, dout, tables)
        none = inputs.zero_state().new_empty((0, *inputs.zero_state().shape))
        forward, backward = api.forward(inputs, stages, tables), api.backward(inputs, stages, back, none, tables)
        forward.run(0, None)
        return dict(zip(NAMES, (forward.outputs(), *backward.gradients(lambda: none)), strict=True))


def _offered(forest: Forest) -> np.ndarray:
    """Rollouts in the order in which a sample takes them: two neighbours, the deepest, the last, some in between."""
    rollout, _ = forest.path_segments()
    deepest = int(np.bincount(rollout, minlength=forest.rollouts).argmax())
    last = forest.rollouts - 1
    wanted = [0, min(1, last), deepest, last, *np.linspace(0, last, 64).astype(int).tolist()]
    return np.array(list(dict.fromkeys(wanted)))
