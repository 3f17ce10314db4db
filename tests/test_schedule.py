"""Learning rates of a run."""

import math

import pytest

from cp_engine.config import OptimizerConfig
from cp_engine.schedule import learning_rate


def rates(count: int, total: int, **fields) -> list[float]:
    optimizer = OptimizerConfig(lr=8.0, **fields)
    return [learning_rate(step, optimizer, total) for step in range(count)]


def test_constant_after_a_warm_up():
    assert rates(6, 6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(3, 1) == [8.0] * 3


def test_linear_ends_at_the_last_step_and_stays():
    assert rates(7, 6, schedule="linear", warmup_steps=2, final_lr=4.0) == [4.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    assert rates(3, 3, schedule="linear") == [8.0, 4.0, 0.0]


def test_cosine():
    expected = [4.0 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates(5, 5, schedule="cosine") == pytest.approx(expected, abs=1e-15)
