"""Two SGD steps in float32 by an engine, for comparison with whole weights: rounding shows as it is, which AdamW would
turn into whole steps. Ranks call the head different numbers of times."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from cp_engine.engine import Engine
from cp_engine.kernels.logprob import api as logprob
from tests.distributed.engine_cases import sample, this_rank, tiny_config, weights_of, whole_gradients

BOUND = 2e-6
SGD = {"dtype": "float32", "optimizer": {"name": "sgd", "lr": 0.05, "max_grad_norm": 0.7}}


@dataclass(frozen=True, eq=False)
class TwoSteps:
    figures: list[tuple[float, float]]  # loss and gradient norm before clipping of each step
    gradients: dict[str, torch.Tensor]  # of the first step, before clipping; whole
    weights: dict[str, torch.Tensor]  # after both
    logprobs: list[np.ndarray]  # of the sample's tokens before and after them


def small_chunks():
    """Four predictors a chunk of the head, so that ranks and packs differ in their number of chunks."""
    return mock.patch.object(logprob, "MAX_CHUNK_LOGITS", 4 * 36)


def two_steps(sections: dict) -> TwoSteps:
    with small_chunks():
        engine = Engine(tiny_config(sections), this_rank())
        before = np.concatenate(engine.logprobs(sample()))
        with _gradients_handed_on(engine) as gradients:
            figures = [engine.train_step(sample())]
        figures.append(engine.train_step(sample()))
        after = np.concatenate(engine.logprobs(sample()))
        return TwoSteps([(f["loss"], f["grad_norm"]) for f in figures], gradients, weights_of(engine), [before, after])


def several(cases: list[dict]) -> list[TwoSteps]:
    return [two_steps(case) for case in cases]


@contextlib.contextmanager
def _gradients_handed_on(engine: Engine):
    """Copies of the gradients of a step, as they are handed to the optimizer."""
    seen, update = {}, engine.distributed.update

    def seen_update(lr, max_norm):
        seen.update((name, gradient.clone()) for name, gradient in whole_gradients(engine).items())
        return update(lr, max_norm)

    with mock.patch.object(engine.distributed, "update", seen_update):
        yield seen


def largest_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Max norm of the worst tensor's error, over the tensor's own."""
    assert found.keys() == truth.keys()
    return max(float((found[name] - truth[name]).abs().max() / truth[name].abs().max()) for name in truth)


def assert_close(found: TwoSteps, truth: TwoSteps) -> None:
    """Within the bound; the second step's gradients are those of weights that are a rounding apart, which layers
    amplify, and show in the weights after it."""
    np.testing.assert_allclose(found.figures, truth.figures, rtol=BOUND)
    assert largest_error(found.gradients, truth.gradients) <= BOUND
    assert largest_error(found.weights, truth.weights) <= BOUND
    np.testing.assert_allclose(found.logprobs, truth.logprobs, atol=1e-5)


def assert_moved(truth: TwoSteps) -> None:
    """The steps change what is compared by far more than the bounds, and the first one's gradients are clipped."""
    before, after = truth.logprobs
    assert np.nanmax(np.abs(after - before)) > 1e-2
    assert truth.figures[0][1] > SGD["optimizer"]["max_grad_norm"]
