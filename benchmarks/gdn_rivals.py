"""Ways to run the gated delta rule on a tree: our kernels, and fla's as other engines call them.

A method has the parts that go through its kernels one after the other, and what runs a part: ``forward()`` and
``backward()``, which are timed, then ``values()``, o, and ``gradients()``, the others of `NAMES`, on the part's rows.

fla refuses its backward on Hopper with Triton 3.4 to 3.7.0, where its values are wrong (fla issue 640). Its time does
not depend on values, so the refusal is lifted here and the record says that it is a timing only.

Shapes: m rows of a part, Hk key heads, H value heads, K and V head sizes, F segments of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gdn_workloads import Part, Problem, flat_parts, plan_of, tree_part
from cp_engine.kernels.gdn import api as gdn
from cp_engine.sharding.forest import Forest, expand_ranges


def tables_of(forest: Forest, device) -> gdn.ChainTables:
    """Tables of our kernels for all of a forest on one rank."""
    p = plan_of(forest)
    arrays = (p.fragment_row, p.fragment_parent, p.fragment_entry, p.chain_fragment, p.chain_level)
    return gdn.chain_tables(*arrays, p.exit_fragment, p.exit_entry, p.entry_level, forest.tokens, device=device)


class Ours:
    """Our kernels; backward keeps of the forward's stages what the layer keeps."""

    def __init__(self, forest: Forest, inputs: gdn.Inputs, dout: torch.Tensor):
        self.inputs, self.dout, self.tables = inputs, dout, tables_of(forest, dout.device)
        key_dim, (heads, value_dim) = inputs.k.shape[2], inputs.v.shape[1:]
        self.no_states = torch.empty((0, heads, key_dim, value_dim), dtype=torch.float32, device=dout.device)

    def forward(self) -> None:
        stages = gdn.chunk_stages(self.inputs, self.tables)
        self.kept = gdn.kept_tensors(stages)
        rest = gdn.forward(self.inputs, stages, self.tables)
        rest.run(0, None)
        self.out = rest.outputs()

    def backward(self) -> None:
        stages = gdn.chunk_stages(self.inputs, self.tables, self.kept)
        back = gdn.backward_stages(self.inputs, stages, self.dout, self.tables)
        rest = gdn.backward(self.inputs, stages, back, self.no_states, self.tables)
        self.grads = rest.gradients(lambda: self.no_states)

    def values(self) -> torch.Tensor:
        return self.out

    def gradients(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.grads)


def fla_rule() -> Callable:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


@dataclass(frozen=True, eq=False)
class _Level:
    rows: torch.Tensor  # int64, rows of the part
    starts: torch.Tensor  # int64 [F + 1]
    parent: torch.Tensor | None  # int64 [F] segment of the level above; None for the roots


def levels_of(forest: Forest, device) -> list[_Level]:
    """Segments by the number of segments above them."""
    level = np.zeros(forest.segments, np.int64)
    for segment, parent in enumerate(forest.parent.tolist()):
        level[segment] = 0 if parent < 0 else level[parent] + 1
    place, levels = np.empty(forest.segments, np.int64), []
    for number in range(int(level.max()) + 1):
        mine = np.flatnonzero(level == number)
        place[mine] = np.arange(len(mine))
        length = forest.segment_length[mine]
        arrays = (
            expand_ranges(forest.segment_start[mine], length),
            np.append(0, np.cumsum(length)),
            place[forest.parent[mine]],
        )
        rows, starts, parent = (torch.as_tensor(x, device=device) for x in arrays)
        levels.append(_Level(rows, starts, parent if number else None))
    return levels


class Fla:
    """fla's operator as other engines use it: one varlen call a tree level, states gathered from the level above.

    A forest of roots alone is one call. Rows of a level stand together, so that no time goes into gathering them.
    ``rule`` is called like fla's `chunk_gated_delta_rule`.
    """

    def __init__(self, forest: Forest, inputs: gdn.Inputs, dout: torch.Tensor, rule: Callable | None = None):
        self.rule = rule or fla_rule()
        self.levels = levels_of(forest, dout.device)
        self.leaves = [[x[level.rows][None].requires_grad_() for x in inputs] for level in self.levels]
        self.dout = dout

    def forward(self) -> None:
        self.outs, state = [], None
        for number, (level, leaves) in enumerate(zip(self.levels, self.leaves, strict=True)):
            # index_select: the gradient of plain indexing sorts.
            above = None if level.parent is None else state.index_select(0, level.parent)
            out, state = self.rule(
                *leaves,
                initial_state=above,
                output_final_state=number + 1 < len(self.levels),
                cu_seqlens=level.starts,
            )
            self.outs.append(out)

    @property
    def dout(self) -> list[torch.Tensor]:
        return self._dout

    @dout.setter
    def dout(self, rows: torch.Tensor) -> None:
        self._dout = [rows[level.rows][None] for level in self.levels]

    def backward(self) -> None:
        leaves = [leaf for level in self.leaves for leaf in level]
        self.grads = torch.autograd.grad(self.outs, leaves, self.dout, retain_graph=True)

    def values(self) -> torch.Tensor:
        return self._in_order(self.outs)

    def gradients(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._in_order(self.grads[place::5]) for place in range(5))

    def _in_order(self, of_levels) -> torch.Tensor:
        rows = torch.cat([level.rows for level in self.levels])
        whole = torch.cat([x[0].detach() for x in of_levels])
        return torch.empty_like(whole).index_copy_(0, rows, whole)


@contextmanager
def fla_refusal_lifted() -> Iterator[None]:
    """Let fla's backward run where it refuses."""
    from fla.ops.common import chunk_o

    hopper = chunk_o.IS_NVIDIA_HOPPER
    chunk_o.IS_NVIDIA_HOPPER = False
    try:
        yield
    finally:
        chunk_o.IS_NVIDIA_HOPPER = hopper


def fla_refuses() -> bool:
    """Whether fla's backward has wrong values here, by its own test."""
    from fla.ops.common import chunk_o

    return bool(chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1)


@dataclass(frozen=True)
class Method:
    run: type
    flat: bool = False  # every rollout alone

    @property
    def fla(self) -> bool:
        return self.run is Fla

    def parts(self, problem: Problem) -> Iterator[Part]:
        return flat_parts(problem.forest) if self.flat else iter([tree_part(problem.forest)])

    def made(self, problem: Problem):
        """The method for a whole tree."""
        return run_part(self, tree_part(problem.forest), problem)


def run_part(method: Method, part: Part, problem: Problem):
    """A method made for one part."""
    token = torch.as_tensor(part.token, device=problem.dout.device)
    return method.run(part.forest, gdn.Inputs(*(x[token] for x in problem.inputs)), problem.dout[token])


METHODS = {
    "tree": Method(Ours),
    "flat": Method(Ours, flat=True),
    "straight": Method(Ours),
    "fla_levels": Method(Fla),
    "fla_flat": Method(Fla, flat=True),
    "fla_straight": Method(Fla),
}
STRAIGHT = ("straight", "fla_straight")  # on one sequence of the tree's tokens
