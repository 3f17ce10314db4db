"""Whether a method's results are right: float64 truth on some rollouts of a tree, segment by segment.

Shapes: as in `gdn_workloads`.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gdn_rivals import METHODS, Method, fla_refuses, run_part
from benchmarks.gdn_workloads import NAMES, Problem

# Relative root mean square that fla allows its own operator in bf16.
BOUNDS = dict(zip(NAMES, (5e-3, 8e-3, 8e-3, 8e-3, 2e-2, 2e-2), strict=True))
# The worst segment (largest difference over largest value) may be this many times as wrong as it is when our kernels
# run the same rollouts alone, or this wrong where that is little. A wrong entry state gives about 1.
SEGMENT_FACTOR, SEGMENT_ERROR = 1.5, 2e-2


def sample_results(method: Method, problem: Problem, values_only: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """A method's results on the sample, and whether a token outside it has a gradient that is not zero (or not finite).

    Gradients of copies of a token are summed. With ``values_only`` no backward runs.
    """
    found = {name: torch.zeros_like(true) for name, true in problem.truth.items()}
    outside = False
    for part in method.parts(problem):
        token = torch.as_tensor(part.token, device=problem.dout.device)
        row = problem.sample_row[token]
        mine = row >= 0
        if not mine.any():
            continue
        run = run_part(method, part, problem)
        first = mine & torch.as_tensor(part.owner, device=row.device)
        run.dout = problem.dout[token] * first[:, None, None]
        run.forward()
        found["o"][row[mine]] = run.values()[mine].double()
        if values_only:
            continue
        run.backward()
        for name, grad in zip(NAMES[1:], run.gradients(), strict=True):
            found[name].index_add_(0, row[mine], grad[mine].double())
            outside |= bool((grad.flatten(1).abs().amax(1) * ~mine).count_nonzero())
    return ({"o": found["o"]} if values_only else found), outside


def errors(found: dict[str, torch.Tensor], problem: Problem) -> tuple[dict[str, float], dict[str, float]]:
    """Of each result: relative root mean square, and the worst segment's largest difference over its largest value."""
    segment = torch.as_tensor(problem.sample.segment_of, device=problem.dout.device)
    square, worst = {}, {}
    for name, got in found.items():
        true = problem.truth[name]
        square[name] = float((got - true).square().mean().sqrt() / true.square().mean().sqrt())
        zero = true.new_zeros(problem.sample.segments)
        apart, size = (zero.scatter_reduce(0, segment, x.abs().flatten(1).amax(1), "amax") for x in (got - true, true))
        worst[name] = float((apart / size.clamp_min(1e-3 * size.max())).max())
    return square, worst


def floor_of(problem: Problem) -> dict[str, float]:
    """How wrong the worst segment is when our kernels run every rollout of the sample alone."""
    inputs, dout = problem.on_sample()
    alone = Problem(problem.sample, problem.heads, inputs, dout)
    alone.truth, alone.sample_row = problem.truth, torch.arange(len(dout), device=dout.device)  # the sample is all
    found, _ = sample_results(METHODS["flat"], alone, values_only=False)
    return errors(found, problem)[1]


def check(method: Method, problem: Problem, floor: dict[str, float]) -> dict:
    """Errors of a method on the sample, and whether they are those of rounding."""
    values_only = method.fla and fla_refuses()
    found, outside = sample_results(method, problem, values_only)
    square, worst = errors(found, problem)
    right = not outside and all(
        square[name] <= BOUNDS[name] and worst[name] <= max(SEGMENT_FACTOR * floor[name], SEGMENT_ERROR)
        for name in square
    )
    return {
        "right": bool(right),
        "timing_only": values_only,
        "max_err": float(f"{np.max(list(square.values())):.3g}"),
        "segment_err": float(f"{np.max(list(worst.values())):.3g}"),
        "errors": {name: [float(f"{x:.3g}") for x in (square[name], worst[name], floor[name])] for name in square},
    }
