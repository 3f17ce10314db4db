"""Edge log-probs without ever holding the logits of all predictors.

Two backends: `reference` on any device and for any head, and `triton` for linear heads on GPUs.

Shapes: C hidden size, V vocabulary, M predictors, E edges (sorted by predictor).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cp_engine.kernels.logprob import triton
from cp_engine.kernels.logprob.reference import logits_to_edges

BACKENDS = ("auto", "reference", "triton")
# Logits elements of one chunk of the reference: 2**26 are 256 MiB in float32, 441 rows of a 151,936 vocabulary. Larger
# chunks make the head's matrix products no faster; forward and backward hold about four arrays of this size.
MAX_CHUNK_LOGITS = 2**26
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EdgeTables:
    """Which predictors predict which tokens. One logits row per predictor serves all its edges."""

    edge_predictor: torch.Tensor  # int64 [E] index into the M predictors, ascending
    edge_target: torch.Tensor  # int64 [E] token id
    edge_start: np.ndarray  # int64 [M + 1] first edge of each predictor; on the host, so cutting chunks needs no sync
    edge_ptr: torch.Tensor  # the same on the device

    @property
    def predictors(self) -> int:
        return len(self.edge_start) - 1


def edge_tables(
    predictors: int, edge_predictor: np.ndarray, edge_target: np.ndarray, device: torch.device | str = "cpu"
) -> EdgeTables:
    """Put the index arrays of the edges of M predictors (int64 [E] ascending, [E]) on a device."""
    assert (np.diff(edge_predictor) >= 0).all(), "edges must be sorted by predictor"
    start = np.searchsorted(edge_predictor, np.arange(predictors + 1))
    predictor, target, pointer = (
        torch.as_tensor(array, dtype=torch.int64, device=device) for array in (edge_predictor, edge_target, start)
    )
    return EdgeTables(predictor, target, start, pointer)


def choose(backend: str, hidden: torch.Tensor, head: nn.Module) -> str:
    """``reference`` or ``triton`` for hidden states like these [., C] and a head.

    ``auto`` takes ``triton`` wherever it runs on a GPU.

    Raises:
        ValueError: for an unknown backend, and for ``triton`` where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"log-prob backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "reference" or (backend == "auto" and hidden.device.type != "cuda"):
        return "reference"
    reason = triton.why_not(hidden, head)
    if backend == "triton" and reason is not None:
        raise ValueError(f"log-prob backend triton {reason}")
    name = "triton" if reason is None else "reference"
    _log_once(name, str(hidden.dtype), reason)
    return name


@cache
def _log_once(name: str, dtype: str, reason: str | None) -> None:
    told = f"; triton {reason}" if reason else ""
    _LOG.info("log-prob head, %s: backend %s%s", dtype, name, told)


def edge_logprobs(
    hidden: torch.Tensor,
    head: nn.Module,
    edges: EdgeTables,
    vocab_size: int,
    temperature: float = 1.0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every edge, and the entropy of its predictor's distribution (`reference.logits_to_edges`).

    Goes over the predictors in chunks whose logits are computed again in backward. Without predictors ``hidden`` and
    the head's parameters get zero gradients all the same, so that every rank's backward is the same.

    Args:
        hidden: [M, C] final hidden states of the predictors.
        head: the language-model head, [m, C] -> [m, V]. Its hooks are not run: ranks have different numbers of chunks.
        vocab_size: V.
        temperature: the sampling temperature that logits are divided by.
        backend: one of `BACKENDS`, see `choose`.

    Returns:
        log_prob [E] and entropy [E] in nats, in the accumulation dtype, both differentiable.

    Raises:
        ValueError: for a temperature that is not a positive number, and as `choose`.
    """
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a positive number, got {temperature}")
    if choose(backend, hidden, head) == "triton":
        return triton.edge_logprobs(hidden, head.weight, edges.edge_ptr, edges.edge_target, temperature)
    return _reference(hidden, head, edges, vocab_size, temperature)


def _reference(
    selected: torch.Tensor, head: nn.Module, edges: EdgeTables, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`edge_logprobs` of predictors with hidden states [M, C], in chunks of at most `MAX_CHUNK_LOGITS` logits. Without
    predictors the head still runs, on zero rows. Its forward is called, because adapters live there."""
    rows = max(1, MAX_CHUNK_LOGITS // vocab_size)

    def chunk(hidden: torch.Tensor, predictor: torch.Tensor, target: torch.Tensor):
        return logits_to_edges(head.forward(hidden), predictor, target, temperature)

    log_probs, entropies = [], []
    for index, hidden in enumerate(selected.split(rows)):
        first, last = index * rows, min((index + 1) * rows, edges.predictors)
        part = slice(int(edges.edge_start[first]), int(edges.edge_start[last]))
        log_prob, entropy = checkpoint(
            chunk, hidden, edges.edge_predictor[part] - first, edges.edge_target[part], use_reentrant=False
        )
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.cat(log_probs), torch.cat(entropies)
