"""The gated delta rule over a forest of fragments, as stages that a layer interleaves with its exchange.

Forward: `chunk_stages`, `exit_summary`, (states move), `outputs`. Backward: `chunk_stages`, `backward_stages`,
`entry_cotangents`, (gradients of states move), `input_gradients`. States, summaries and their gradients are in the
dtype of `Inputs`: float32, or float64 for float64. The reference module states equations and shapes.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.gdn.chunks import ChunkTables, chunk_tables
from cp_engine.kernels.gdn.reference import (
    Inputs,
    backward_stages,
    chunk_stages,
    entry_cotangents,
    exit_summary,
    input_gradients,
    outputs,
)

__all__ = [
    "ChunkTables",
    "Inputs",
    "backward_stages",
    "chunk_stages",
    "chunk_tables",
    "entry_cotangents",
    "exit_summary",
    "input_gradients",
    "l2_normalise",
    "outputs",
]


def l2_normalise(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, as the models of `transformers` normalise q and k."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
