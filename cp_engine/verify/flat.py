"""The oracle: every rollout alone through the unmodified Hugging Face model, forward and backward.

A unit is what a loss couples: one row, or the two rows of a pair.

Shapes: N flat tokens, R rows.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from cp_engine.config import LossConfig
from cp_engine.losses.choose import occurrence_loss
from cp_engine.losses.occurrences import Occurrences
from cp_engine.losses.rollout_sums import rollout_sum
from cp_engine.step import StepData
from cp_engine.verify.flat_routers import FlatRouters, ForcedRoutes
from cp_engine.verify.values import DrawnValues


def loss_units(step: StepData, loss: LossConfig) -> list[list[int]]:
    """The rows of each unit of the step: groups for a loss over pairs, else single rows."""
    if loss.name != "dpo":
        return [[row] for row in range(len(step.trained))]
    return [np.flatnonzero(step.flat.group == group).tolist() for group in range(step.flat.groups)]


def spread_units(units: list[list[int]], length: np.ndarray, world: int) -> list[list[list[int]]]:
    """Units of each rank, the longest first to the rank with least work (attention grows with the square).

    Args:
        length: int [R] tokens of each row.
    """
    row_cost = length.astype(np.float64) * (length + 4000)
    cost = np.array([row_cost[unit].sum() for unit in units])
    load, spread = np.zeros(world), [[] for _ in range(world)]
    for index in np.argsort(-cost, kind="stable").tolist():
        rank = int(load.argmin())
        load[rank] += cost[index]
        spread[rank].append(units[index])
    return spread


def run_units(
    model,
    step: StepData,
    units: list[list[int]],
    loss: LossConfig,
    drawn: DrawnValues,
    device: torch.device,
    routers: FlatRouters | None = None,
) -> tuple[np.ndarray, float]:
    """Accumulate the gradients of this rank's units in ``model``.

    Args:
        routers: of a model with experts; the gradients of their load-balancing loss are added.

    Returns:
        log-probs float64 [N] of the rows' trained tokens (0 elsewhere), and the units' part of the loss, without that
        of the routers.
    """
    if routers is not None:
        for row in (row for unit in units for row in unit):
            routers.backward_row(model, step, row)
    log_probs, total = np.zeros(len(step.flat.token)), 0.0
    for unit in units:
        rows = [row for row in unit if step.trained[row]]
        if not rows:
            continue
        index = [_trained_tokens(step, row) for row in rows]
        scored = [
            _score_row(model, step, row, at, loss.temperature, device) for row, at in zip(rows, index, strict=True)
        ]
        log_prob, entropy = (torch.cat(parts) for parts in zip(*scored, strict=True))
        index = np.concatenate(index)
        occurrences = _occurrences(log_prob, entropy, step, rows, index, drawn)
        weight = torch.as_tensor(step.weight[rows], dtype=log_prob.dtype, device=device)[occurrences.rollout]
        unit_loss = (weight * occurrence_loss(occurrences, loss, rollout_sum).loss).sum()
        unit_loss.backward()
        total += float(unit_loss.detach())
        log_probs[index] = log_prob.detach().double().cpu().numpy()
    return log_probs, total


def _trained_tokens(step: StepData, row: int) -> np.ndarray:
    """int64 flat indices of a row's trained tokens."""
    start, end = int(step.flat.row_start[row]), int(step.flat.row_start[row + 1])
    return start + 1 + np.flatnonzero(step.flat.loss_mask[start + 1 : end])


def _score_row(
    model, step: StepData, row: int, index: np.ndarray, temperature: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the row's tokens at the flat ``index``, and the entropies that predict them."""
    start = int(step.flat.row_start[row])
    ids = torch.as_tensor(step.flat.token[start : index[-1] + 1], device=device)
    target = torch.as_tensor(index - start, device=device)
    forced = nullcontext()
    if step.flat.routes is not None:
        given = step.flat.routes[start : index[-1]].astype(np.int64)
        forced = ForcedRoutes(torch.as_tensor(given, device=device))
    with forced:
        logits = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=target - 1).logits[0]
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, ids[target, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _occurrences(
    log_prob: torch.Tensor,
    entropy: torch.Tensor,
    step: StepData,
    rows: list[int],
    index: np.ndarray,
    drawn: DrawnValues,
) -> Occurrences:
    own = log_prob.detach()

    def on_device(values: np.ndarray, dtype: torch.dtype = own.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=own.device)

    return Occurrences(
        log_prob=log_prob,
        entropy=entropy,
        advantage=on_device(drawn.advantage[index]),
        old_logprob=own + on_device(drawn.old_offset[index]),
        ref_logprob=own + on_device(drawn.ref_offset[index]),
        sampler_logprob=own + on_device(drawn.sampler_offset[index]),
        rollout=on_device(np.repeat(np.arange(len(rows)), step.trained[rows]), torch.int64),
        trained=on_device(step.trained[rows]),
        preference=on_device(step.preference[rows]),
        pair=on_device(np.zeros(len(rows)), torch.int64),
    )
