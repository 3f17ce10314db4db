"""The oracle: every rollout alone through the unmodified Hugging Face model, forward and backward."""

from __future__ import annotations

import numpy as np
import torch

from cp_engine.config import LossConfig
from cp_engine.losses.policy import OccurrenceValues, grpo_loss, sft_loss
from cp_engine.step import StepData
from cp_engine.verify.values import DrawnValues


def spread_rows(length: np.ndarray, world: int) -> list[list[int]]:
    """Rows of each rank, longest first to the rank with least work (attention grows with the square)."""
    cost = length.astype(np.float64) * (length + 4000)
    load, rows = np.zeros(world), [[] for _ in range(world)]
    for row in np.argsort(-cost, kind="stable").tolist():
        rank = int(load.argmin())
        load[rank] += cost[row]
        rows[rank].append(row)
    return rows


def run_rows(
    model, step: StepData, rows: list[int], loss: LossConfig, drawn: DrawnValues | None, device: torch.device
) -> tuple[np.ndarray, float]:
    """Accumulate the gradients of this rank's rows in ``model``.

    Returns:
        log-probs float64 [N] of the rows' trained tokens (0 elsewhere), and the rows' part of the loss.
    """
    flat, total = step.flat, 0.0
    log_probs = np.zeros(len(flat.token))
    for row in rows:
        start, end = int(flat.row_start[row]), int(flat.row_start[row + 1])
        target = 1 + np.flatnonzero(flat.loss_mask[start + 1 : end])
        if not len(target):
            continue
        ids = torch.as_tensor(flat.token[start:end], device=device)
        logits = model(
            input_ids=ids[None, : int(target[-1])],
            use_cache=False,
            logits_to_keep=torch.as_tensor(target - 1, device=device),
        ).logits[0]
        log_prob = torch.log_softmax(logits / loss.temperature, dim=-1)
        log_prob = log_prob.gather(1, ids[torch.as_tensor(target, device=device), None])[:, 0]
        row_loss = float(step.weight[row]) * _row_loss(log_prob, drawn, start + target, loss)
        row_loss.backward()
        total += float(row_loss.detach())
        log_probs[start + target] = log_prob.detach().double().cpu().numpy()
    return log_probs, total


def _row_loss(log_prob: torch.Tensor, drawn: DrawnValues | None, index: np.ndarray, loss: LossConfig) -> torch.Tensor:
    if drawn is None:
        return sft_loss(log_prob).loss.sum()
    own = log_prob.detach()

    def around(offset: np.ndarray) -> torch.Tensor:
        return own + torch.as_tensor(offset[index], dtype=own.dtype, device=own.device)

    values = OccurrenceValues(
        advantage=torch.as_tensor(drawn.advantage[index], dtype=own.dtype, device=own.device),
        old_logprob=around(drawn.old_offset),
        ref_logprob=around(drawn.ref_offset),
        sampler_logprob=around(drawn.sampler_offset),
    )
    result = grpo_loss(log_prob, values, clip=loss.clip, kl_coef=loss.kl_coef, sampler_cap=loss.sampler_cap)
    return result.loss.sum()
