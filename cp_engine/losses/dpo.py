"""DPO: two rollouts of a group, the one of higher reward preferred.

Shapes: O occurrences of this rank, r rollouts of the pack, r / 2 pairs.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from cp_engine.losses.occurrences import OccurrenceLoss, unclipped
from cp_engine.losses.rollout_sums import RolloutSum


def dpo_loss(
    log_prob: torch.Tensor,
    ref_logprob: torch.Tensor,
    rollout: torch.Tensor,
    preference: torch.Tensor,
    pair: torch.Tensor,
    rollout_sum: RolloutSum,
    *,
    beta: float,
) -> OccurrenceLoss:
    """Each occurrence carries the loss of its pair, ``-log sigmoid(beta (d_chosen - d_rejected))`` with
    ``d = sum over a rollout's trained tokens of (log p - log p_ref)``.

    Rafailov et al. 2023 ("Direct preference optimization", eq. 7). Averaged by seq-mean-token-mean it is their mean
    over pairs; by the other aggregations a pair counts in proportion to its trained tokens.

    Args:
        rollout: int64 [O].
        preference: [r] 1 for the chosen rollout of a pair, -1 for the rejected one.
        pair: int64 [r].
        rollout_sum: sums [O] to [r] over all ranks.
    """
    difference = rollout_sum(log_prob - ref_logprob, rollout, len(pair))
    signed = preference * difference
    margin = torch.zeros_like(signed).index_put((pair,), signed, accumulate=True)
    return unclipped(-logsigmoid(beta * margin)[pair[rollout]])
