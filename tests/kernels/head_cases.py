"""Cases of the LM head's log-probs: their float64 truth, and errors against it.

Shapes: n rows, C hidden size, V vocabulary, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from cp_engine.kernels.logprob import edge_logprobs, edge_tables

NAMES = ("log_prob", "entropy", "dhidden", "dweight")


@dataclass(frozen=True, eq=False)
class HeadCase:
    hidden: torch.Tensor  # [n, C]
    weight: torch.Tensor  # [V, C]
    row: np.ndarray  # [M] predictors' rows
    predictor: np.ndarray  # [E]
    target: np.ndarray  # [E]
    dlog_prob: torch.Tensor  # [E]
    dentropy: torch.Tensor  # [E]
    temperature: float = 1.0

    def to(self, device: str, dtype: torch.dtype) -> HeadCase:
        """With hidden states and weight rounded to a dtype."""
        moved = {name: getattr(self, name).to(device) for name in ("dlog_prob", "dentropy")}
        moved |= {name: getattr(self, name).to(device, dtype) for name in ("hidden", "weight")}
        return replace(self, **moved)

    def selected(self, hidden: torch.Tensor) -> torch.Tensor:
        """The predictors' rows [M, C]."""
        return hidden.index_select(0, torch.as_tensor(self.row, device=hidden.device))

    def run(self, backend: str, frozen: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-prob, entropy, and gradients of hidden states and weight (not of a frozen one)."""
        hidden = self.hidden.clone().requires_grad_()
        count, width = self.weight.shape
        head = nn.Linear(width, count, bias=False, device="meta")
        head.weight = nn.Parameter(self.weight.clone(), requires_grad=not frozen)
        tables = edge_tables(len(self.row), self.predictor, self.target, hidden.device)
        made = edge_logprobs(self.selected(hidden), head, tables, count, self.temperature, backend)
        inputs = [hidden] if frozen else [hidden, head.weight]
        given = [x.to(out.dtype) for x, out in zip((self.dlog_prob, self.dentropy), made, strict=True)]
        return *(x.detach() for x in made), *torch.autograd.grad(made, inputs, given)

    def truth(self) -> tuple[torch.Tensor, ...]:
        """In float64, of the same hidden states and weight."""
        return self.to(str(self.hidden.device), torch.float64).run("reference")


def head_case(
    seed: int,
    *,
    vocab: int = 50,
    width: int = 16,
    rows: int = 29,
    predictors: int = 21,
    edges: int = 60,
    size: float = 1.0,
    temperature: float = 1.0,
) -> HeadCase:
    """A random case: every predictor but the second has an edge, the first one many, with a target twice.

    Args:
        edges: of which the first predictor has half, so at least two for each predictor.
        size: standard deviation of logits, about.
    """
    assert edges >= 2 * predictors, "half of the edges are for every predictor one"
    rng, made = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    row = np.sort(rng.choice(rows, predictors, replace=False))
    with_edges = np.array([i for i in range(predictors) if i != 1])
    first = np.zeros(edges // 2, np.int64)
    extra = rng.choice(with_edges, edges - len(with_edges) - len(first)) if len(with_edges) else with_edges
    predictor = np.sort(np.concatenate([with_edges, first, extra]).astype(np.int64))
    target = rng.integers(0, vocab, len(predictor))
    target[-1] = vocab - 1
    target[1:2] = target[:1]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    return HeadCase(
        normal(rows, width),
        normal(vocab, width) * (size / width**0.5),
        row,
        predictor,
        target,
        normal(len(predictor)),
        0.3 * normal(len(predictor)),
        temperature,
    )


def without_edges() -> HeadCase:
    """A rank that scores nothing."""
    empty = np.empty(0, np.int64)
    return replace(
        head_case(0), row=empty, predictor=empty, target=empty, dlog_prob=torch.empty(0), dentropy=torch.empty(0)
    )


def head_errors(found: tuple[torch.Tensor, ...], truth: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Largest difference over the largest value of the truth, at least 1; of gradients over their largest value."""
    errors = {}
    for name, x, true in zip(NAMES, found, truth, strict=False):
        largest = float(true.abs().max()) if true.numel() else 0.0
        off = float((x.double() - true).abs().max()) if true.numel() else 0.0
        errors[name] = off / (max(1.0, largest) if name in NAMES[:2] else max(largest, 1e-30))
    return errors
