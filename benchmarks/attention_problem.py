"""What an attention benchmark computes, the truth about it, and how far a method's results are from that.

Shapes: T tree tokens, S segments, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.attention_workloads import DATA, Workload, workload_forest
from cp_engine.kernels.attention import Intervals, attention, attention_backward
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout

NAMES = ("out", "dq", "dk", "dv")
# Rounding of bf16 is relative to these sums themselves, also in a segment of one token. In dq and dk of a row that sees
# few keys the terms cancel, so that these are compared as a whole.
BY_SEGMENT = ("out", "dv")
MOST_ERROR = 1e-2  # relative, in the Frobenius norm; bf16 kernels show 0.002 to 0.003


@dataclass(eq=False)
class Problem:
    workload: Workload
    forest: Forest
    intervals: Intervals
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hk, D]
    v: torch.Tensor
    dout: torch.Tensor  # [T, Hq, D]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def scale(self) -> float:
        return self.workload.size**-0.5

    @property
    def forward_flops(self) -> int:
        """Of visible pairs alone; backward has 2.5 times as many."""
        return 4 * self.forest.tree_pairs * self.workload.query_heads * self.workload.size

    @cached_property
    def checked_heads(self) -> dict[str, list[int]]:
        """Heads of each result that are compared: those of the first and the last kv head, all of their rows.

        The heads do not touch each other, and the truth of two of them takes seconds where all would take a minute.
        """
        kv = sorted({0, self.workload.kv_heads - 1})
        share = self.workload.query_heads // self.workload.kv_heads
        query = [head * share + place for head in kv for place in range(share)]
        return {"out": query, "dq": query, "dk": kv, "dv": kv}

    @cached_property
    def truth(self) -> dict[str, torch.Tensor]:
        """The reference kernel in the accumulation dtype on the same inputs: `checked_heads` of each result."""
        heads = self.checked_heads
        inputs = ((self.q, "dq"), (self.k, "dk"), (self.v, "dv"), (self.dout, "out"))
        wide = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        q, k, v, dout = (x[:, heads[name]].to(wide) for x, name in inputs)
        call = {"intervals": self.intervals, "scale": self.scale, "backend": "reference"}
        out, lse = attention(q, k, v, **call)
        return dict(zip(NAMES, (out, *attention_backward(q, k, v, out, lse, dout, **call)), strict=True))

    @cached_property
    def segment_of(self) -> torch.Tensor:
        return torch.as_tensor(self.forest.segment_of, device=self.device)

    def error(self, results: dict[str, torch.Tensor]) -> float | None:
        """Largest relative error of any result, and of any segment's rows where `BY_SEGMENT`; None if not finite.

        Args:
            results: by name, [T, heads, D] of all heads.
        """
        return self.error_of_checked({name: results[name][:, heads] for name, heads in self.checked_heads.items()})

    def error_of_checked(self, results: dict[str, torch.Tensor]) -> float | None:
        """As `error`, of results that hold the checked heads alone."""
        worst = []
        for name, true in self.truth.items():
            wrong = (results[name].to(true.dtype) - true).square().sum((1, 2))
            right = true.square().sum((1, 2))
            worst.append(wrong.sum() / right.sum())
            if name in BY_SEGMENT:
                wrong, right = (self._of_segments(rows) for rows in (wrong, right))
                worst.append((wrong / right).max())
        error = math.sqrt(float(torch.stack(worst).max()))
        return float(f"{error:.3g}") if math.isfinite(error) else None

    def _of_segments(self, rows: torch.Tensor) -> torch.Tensor:
        """[T] -> [S]: sums."""
        return rows.new_zeros(self.forest.segments).index_add_(0, self.segment_of, rows)


def right(record: dict) -> bool:
    """Whether the outputs that a record was measured with are those of the reference."""
    return record["max_err"] is not None and record["max_err"] <= MOST_ERROR


def make_problem(
    workload: Workload,
    copies: int = 1,
    data: Path = DATA,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    forest: Forest | None = None,
) -> Problem:
    """Random inputs for a workload's tree, the same at every call.

    Args:
        copies: how many GPUs the tree is made for, see `workload_forest`.
        forest: the tree, where it is known already.
    """
    forest = workload_forest(workload.tree, copies, data) if forest is None else forest
    made = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn((forest.tokens, heads, workload.size), device=device, dtype=dtype, generator=made)

    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0), device)
    q, k, v, dout = (draw(heads) for heads in (workload.query_heads, *[workload.kv_heads] * 2, workload.query_heads))
    return Problem(workload, forest, intervals, q, k, v, dout)
