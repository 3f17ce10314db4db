"""Log-probs of edges from logits: the definition.

Shapes: m predictor rows, e edges, V vocabulary.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.shared.dtypes import accumulation_dtype


def logits_to_edges(
    logits: torch.Tensor, predictor: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each edge's target and entropy of its predictor's distribution.

    With z = logits / temperature in the accumulation dtype: ``log_prob = z[target] - logsumexp(z)`` and
    ``entropy = -sum_v p_v log p_v``, in nats, with ``log p = z - logsumexp(z)``.

    Args:
        logits: [m, V].
        predictor: int64 [e] row of ``logits`` of each edge.
        target: int64 [e] token id that each edge leads to.

    Returns:
        log_prob [e] and entropy [e], both differentiable, in the accumulation dtype.
    """
    z = logits.to(accumulation_dtype(logits.dtype))
    if temperature != 1.0:
        z = z / temperature
    log_p = z.log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    # Gathers by indexing: their backward sorts before it adds, so it is deterministic on a GPU too.
    return log_p[predictor, target], entropy[predictor]
