"""Training on flat rows, as users without trees train: the unmodified `transformers` model on one rollout after the
other, torch's AdamW and torch's clipping.

Shapes: L tokens of a row, O trained tokens of a row.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from cp_engine.config import Config
from cp_engine.losses.choose import occurrence_loss
from cp_engine.losses.occurrences import Occurrences
from cp_engine.losses.rollout_sums import rollout_sum
from cp_engine.losses.settings import LossConfig
from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from cp_engine.rollouts import Rollout
from cp_engine.step import StepData, prepare_step
from tests.distributed.engine_cases import sample

STEPS = 10
OPTIMIZER = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "schedule": "cosine",
    "warmup_steps": 2,
    "final_lr": 1e-4,
    "max_grad_norm": 0.3,
}
# Half of the rate, all of it, and from there half a cosine to the last step's.
LEARNING_RATES = [5e-4, *(1e-4 + 4.5e-4 * (1 + math.cos(math.pi * i / 8)) for i in range(9))]


def flat_model(config: Config):
    model = load_model(config.model.path, torch.float64, vocab_size=config.model.vocab_size, seed=config.model.seed)
    make_cpu_runnable(model)
    return model.train()


def scored_sample(config: Config) -> list[Rollout]:
    """The sample with log-probs of an old and a reference policy near the model's, so that some ratios are clipped."""
    model, rng, found = flat_model(config), np.random.default_rng(3), []
    for rollout in sample():
        own = np.full(rollout.length, np.nan)
        with torch.no_grad(), keep_float64():
            log_prob, _ = _scores(model, rollout.input_ids, np.arange(1, rollout.length), config.loss.temperature)
        own[1:] = log_prob.numpy()
        old, ref = (own + rng.normal(0.0, 0.2, rollout.length) for _ in range(2))
        found.append(replace(rollout, old_logprobs=old, ref_logprobs=ref))
    return found


def train_flat(config: Config, rollouts: list[Rollout]) -> tuple[list[tuple], dict[str, torch.Tensor]]:
    """Loss, learning rate and gradient norm before clipping of each step, and the weights after the last one.

    Of this project it uses the functions that define the objective (advantages, weights of rollouts, the loss of an
    occurrence), which have tests of their own.
    """
    with keep_float64():
        model, step, figures = flat_model(config), prepare_step(rollouts, config.packing, config.loss), []
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=OPTIMIZER["weight_decay"])
        for lr in LEARNING_RATES:
            optimizer.zero_grad()
            total = 0.0
            for row in np.flatnonzero(step.trained).tolist():
                loss = _row_loss(model, step, row, config.loss)
                loss.backward()
                total += float(loss.detach())
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["max_grad_norm"])
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            figures.append((total, lr, float(norm)))
    return figures, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _row_loss(model, step: StepData, row: int, loss: LossConfig) -> torch.Tensor:
    """A row's part of the step's loss."""
    start, end = step.flat.row_start[row : row + 2].tolist()
    index = start + np.flatnonzero(step.counted[start:end])
    log_prob, entropy = _scores(model, step.flat.token[start:end], index - start, loss.temperature)
    of_row = {
        "advantage": step.advantage[index],
        "old_logprob": step.old_logprob[index],
        "ref_logprob": step.ref_logprob[index],
        "sampler_logprob": step.sampler_logprob[index],
        "rollout": np.zeros(len(index), np.int64),
        "trained": np.array([float(len(index))]),
        "preference": np.array([np.nan]),
        "pair": np.zeros(1, np.int64),
    }
    given = {name: torch.as_tensor(values) for name, values in of_row.items()}
    occurrences = Occurrences(log_prob=log_prob, entropy=entropy, **given)
    return step.weight[row] * occurrence_loss(occurrences, loss, rollout_sum).loss.sum()


def _scores(model, tokens: np.ndarray, position: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [O] of the tokens at ``position`` of a row [L], and entropies [O] of what predicts them."""
    ids = torch.as_tensor(tokens)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, position - 1]
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, ids[position, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
