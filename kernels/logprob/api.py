"""Edge log-probs without ever holding the logits of all predictors.

Shapes: n local rows, C hidden size, V vocabulary, M predictors, E edges (sorted by predictor).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from cp_engine.kernels.logprob.reference import logits_to_edges

# Logits elements of one chunk: 2**26 are 256 MiB in float32, 441 rows of a 151,936 vocabulary. Larger chunks make the
# head's matrix products no faster; forward and backward hold about four arrays of this size.
MAX_CHUNK_LOGITS = 2**26


@dataclass(frozen=True, eq=False)
class EdgeTables:
    """Which rows predict which tokens. One logits row per predictor serves all its edges."""

    predictor_row: torch.Tensor  # int64 [M] rows of the hidden states
    edge_predictor: torch.Tensor  # int64 [E] index into predictor_row, ascending
    edge_target: torch.Tensor  # int64 [E] token id
    edge_start: np.ndarray  # int64 [M + 1] first edge of each predictor; on the host, so cutting chunks needs no sync

    @property
    def predictors(self) -> int:
        return len(self.edge_start) - 1


def edge_tables(
    predictor_row: np.ndarray, edge_predictor: np.ndarray, edge_target: np.ndarray, device: torch.device | str = "cpu"
) -> EdgeTables:
    """Put the index arrays of the edges (int64 [M], [E] ascending, [E]) on a device."""
    assert (np.diff(edge_predictor) >= 0).all(), "edges must be sorted by predictor"
    row, predictor, target = (
        torch.as_tensor(array, dtype=torch.int64, device=device)
        for array in (predictor_row, edge_predictor, edge_target)
    )
    return EdgeTables(row, predictor, target, np.searchsorted(edge_predictor, np.arange(len(predictor_row) + 1)))


def edge_logprobs(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    edges: EdgeTables,
    vocab_size: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every edge, and the entropy of its predictor's distribution (`reference.logits_to_edges`).

    Goes over the predictors in chunks of at most `MAX_CHUNK_LOGITS` logits; backward recomputes each chunk's logits.
    Without predictors the head still runs, on zero rows, so that ``hidden`` and the head's parameters get zero
    gradients and every rank's backward is the same.

    Args:
        hidden: [n, C] final hidden states of the local rows.
        head: the language-model head, [m, C] -> [m, V]. It is called as a module, because adapters and sharded
            parameters live in its forward.
        vocab_size: V.
        temperature: the sampling temperature that logits are divided by.

    Returns:
        log_prob [E] and entropy [E] in nats, in the accumulation dtype, both differentiable.

    Raises:
        ValueError: for a temperature that is not a positive number.
    """
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a positive number, got {temperature}")
    rows = max(1, MAX_CHUNK_LOGITS // vocab_size)

    def chunk(selected: torch.Tensor, predictor: torch.Tensor, target: torch.Tensor):
        return logits_to_edges(head(selected), predictor, target, temperature)

    log_probs, entropies = [], []
    # Selected once and then split: each chunk's own selection would hand back a gradient of all n rows.
    for index, selected in enumerate(hidden.index_select(0, edges.predictor_row).split(rows)):
        first, last = index * rows, min((index + 1) * rows, edges.predictors)
        part = slice(int(edges.edge_start[first]), int(edges.edge_start[last]))
        log_prob, entropy = checkpoint(
            chunk, selected, edges.edge_predictor[part] - first, edges.edge_target[part], use_reentrant=False
        )
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.cat(log_probs), torch.cat(entropies)
