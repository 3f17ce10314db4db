"""One rank's share of the gated delta rule on random forests, for tests of the Triton backend.

Truth is the reference backend in float64 on the same numbers, whose own truth is the token recurrence (`test_gdn.py`).

Shapes: n rows, Hk key heads, H value heads, K and V head sizes, Y entries, X exits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from cp_engine.kernels.conv.reference import l2_normalise
from cp_engine.kernels.gdn import api
from cp_engine.kernels.gdn import triton as gdn
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_plan import GdnPlan, gdn_plan
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import random_layout

NAMES = ("o", "B", "A", "dentry", "dq", "dk", "dv", "dg", "dbeta")


@dataclass(frozen=True, eq=False)
class Case:
    """One rank's rows, the states that reach it, and the gradients that come back."""

    plan: GdnPlan
    entries: int
    inputs: api.Inputs
    dout: torch.Tensor  # [n, H, V]
    entry_states: torch.Tensor  # [Y, H, K, V]
    dexit: torch.Tensor  # [X, H, K, V]

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """Rows in another dtype; decays, beta and states stay float32."""
        x = self.inputs
        rows = (part.to(device, dtype) for part in (x.q, x.k, x.v))
        inputs = api.Inputs(*rows, x.g.to(device), x.beta.to(device))
        states = (part.to(device) for part in (self.entry_states, self.dexit))
        return Case(self.plan, self.entries, inputs, self.dout.to(device, dtype), *states)

    def tables(self) -> gdn.ChainTables:
        p = self.plan
        arrays = (p.fragment_row, p.fragment_parent, p.fragment_entry, p.chain_fragment, p.chain_level)
        crossing = (p.exit_fragment, p.exit_entry, 0 * p.entry_level)  # all states arrive at once
        return gdn.chain_tables(*arrays, *crossing, len(self.dout), device=self.dout.device)

    def _true(self):
        """Reference tables, float64 inputs, and the stages of forward and backward."""
        p, x = self.plan, api.Inputs(*(part.double() for part in self.inputs))
        tables = api.chunk_tables(
            p.fragment_row, p.fragment_parent, p.fragment_entry, p.exit_fragment, p.exit_entry, 0 * p.entry_level,
            len(self.dout), device=self.dout.device,
        )  # fmt: skip
        stages = api.chunk_stages(x, tables)
        return tables, x, stages, api.backward_stages(x, stages, self.dout.double(), tables)

    def true_stages(self):
        """Stages of forward and of backward, float64, and the chunks of each."""
        tables, _, stages, back = self._true()
        return stages, back, tables.groups

    @cached_property
    def truth(self) -> list[torch.Tensor]:
        """Float64 tensors in the order of `NAMES`."""
        tables, x, stages, back = self._true()
        entry_states, dexit = self.entry_states.double(), self.dexit.double()
        return [
            run_forward(api.forward(x, stages, tables), entry_states),
            *api.exit_summary(x, stages, tables),
            api.begin_backward(x, stages, back, entry_states, tables)[0],
            *api.backward(x, stages, back, entry_states, tables).gradients(lambda: dexit),
        ]

    def run(self, tables: gdn.ChainTables) -> list[torch.Tensor]:
        """The Triton backend, in the order of `NAMES`."""
        x = self.inputs
        stages = gdn.chunk_stages(x, tables)
        o = run_forward(gdn.forward(x, stages, tables), self.entry_states)
        summary = gdn.exit_summary(x, stages, tables)
        back = gdn.backward_stages(x, stages, self.dout, tables)
        dentry, begun = gdn.begin_backward(x, stages, self.dout, back, self.entry_states, tables)
        rest = gdn.backward(x, stages, self.dout, back, self.entry_states, tables, begun)
        return [o, *summary, dentry, *rest.gradients(lambda: self.dexit)]


def run_forward(rest: api.Forward, entry_states: torch.Tensor) -> torch.Tensor:
    rest.run(0, None)
    rest.run(1, entry_states)
    return rest.outputs()


def case(plan: GdnPlan, rank: int, sizes=(1, 2, 32, 32), keys: str = "low rank", slow: bool = True) -> Case:
    """alpha between 0.97 and 0.9999 and keys of two directions, else wrong states hide; half of the heads beta ~ 0."""
    key_heads, heads, key_dim, value_dim = sizes
    rows, rng = max(1, int(plan.fragment_row[-1])) + (rank % 2), torch.Generator().manual_seed(rank)
    entries, exits = int(plan.fold.entry_counts[rank]), len(plan.exit_fragment)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    k = normal(rows, key_heads, 2) @ normal(2, key_dim) if keys == "low rank" else normal(rows, key_heads, key_dim)
    g = torch.rand(rows, heads, generator=rng)
    g = torch.log(0.97 + 0.0299 * g) if slow else -2.0 * g
    beta = torch.rand(rows, heads, generator=rng) * torch.where(torch.arange(heads) % 2 == 0, 1.0, 1e-3)
    q = l2_normalise(normal(rows, key_heads, key_dim))
    inputs = api.Inputs(q, l2_normalise(k), normal(rows, heads, value_dim), g, beta)
    state = (heads, key_dim, value_dim)
    return Case(plan, entries, inputs, normal(rows, heads, value_dim), normal(entries, *state), normal(exits, *state))


def whole_plan(forest: Forest) -> GdnPlan:
    """All of a forest on one rank."""
    return gdn_plan(forest, contiguous_layout(forest, 1), 0, "affine", 4)


def rank_plans(forest: Forest, seed: int, world: int = 3) -> list[GdnPlan]:
    """A forest cut at random into pieces on several ranks: entries, exits, and ranks without tokens."""
    layout = random_layout(forest, seed, world)
    return [gdn_plan(forest, layout, rank, "affine", 4) for rank in range(world)]
