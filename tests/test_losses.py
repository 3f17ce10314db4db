"""Losses of single occurrences, aggregation weights and advantages, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from cp_engine.losses.policy import OccurrenceValues, grpo_loss, sft_loss
from cp_engine.losses.weights import group_advantages, rollout_weights


def values(log_prob, ratio, advantage, ref=None, sampler=None):
    nan = torch.full_like(log_prob, math.nan)
    old = log_prob.detach() - torch.tensor(ratio, dtype=log_prob.dtype).log()
    return OccurrenceValues(
        torch.tensor(advantage, dtype=log_prob.dtype),
        old,
        nan if ref is None else log_prob.detach() + torch.tensor(ref, dtype=log_prob.dtype),
        nan if sampler is None else old - torch.tensor(sampler, dtype=log_prob.dtype).log(),
    )


def test_sft_is_the_negative_log_prob():
    log_prob = torch.tensor([-1.5, -0.25], dtype=torch.float64, requires_grad=True)
    result = sft_loss(log_prob)
    result.loss.sum().backward()
    assert result.loss.tolist() == [1.5, 0.25]
    assert log_prob.grad.tolist() == [-1.0, -1.0]
    assert not result.clipped_high.any() and not result.clipped_low.any()


def test_grpo_clips_only_where_clipping_lowers_the_objective():
    log_prob = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    # clipped above, free (A < 0), clipped below (A < 0), free (A > 0), inside
    result = grpo_loss(log_prob, values(log_prob, [2.0, 2.0, 0.5, 0.5, 1.1], [3.0, -3.0, -3.0, 3.0, 3.0]), clip=0.2)
    result.loss.sum().backward()
    np.testing.assert_allclose(result.loss.detach(), [-3.6, 6.0, 2.4, -1.5, -3.3], rtol=1e-14)
    np.testing.assert_allclose(log_prob.grad, [0.0, 6.0, 0.0, -1.5, -3.3], rtol=1e-14)
    assert result.clipped_high.tolist() == [True, False, False, False, False]
    assert result.clipped_low.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grpo_clips_ratios_that_overflow(dtype):
    log_prob = torch.full((3,), -0.1, dtype=dtype, requires_grad=True)
    nan = torch.full((3,), math.nan, dtype=dtype)
    given = OccurrenceValues(torch.tensor([2.0, 0.0, -2.0], dtype=dtype), torch.full_like(nan, -9999.0), nan, nan)
    given.old_logprob[2] = 9999.0
    result = grpo_loss(log_prob, given, clip=0.2)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-2.4, 0.0, 1.6], rel=1e-6)
    assert log_prob.grad.tolist() == [0.0, 0.0, 0.0]
    assert result.clipped_high.tolist() == [True, False, False]
    assert result.clipped_low.tolist() == [False, False, True]


def test_grpo_without_old_log_probs_is_on_policy():
    log_prob = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    nan = torch.tensor([math.nan], dtype=torch.float64)
    result = grpo_loss(log_prob, OccurrenceValues(torch.tensor([0.7], dtype=torch.float64), nan, nan, nan), clip=0.2)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(-0.7, rel=1e-15)
    assert log_prob.grad.item() == pytest.approx(-0.7, rel=1e-15)


def test_grpo_kl_is_the_k3_estimator():
    log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    result = grpo_loss(log_prob, values(log_prob, [1.0], [0.0], ref=[0.5]), clip=0.2, kl_coef=0.1)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(0.1 * (math.exp(0.5) - 0.5 - 1), rel=1e-14)
    assert log_prob.grad.item() == pytest.approx(0.1 * (1 - math.exp(0.5)), rel=1e-14)


def test_grpo_caps_the_sampler_correction():
    log_prob = torch.full((2,), -1.0, dtype=torch.float64, requires_grad=True)
    result = grpo_loss(
        log_prob, values(log_prob, [1.0, 1.0], [2.0, 2.0], sampler=[1.5, 3.0]), clip=0.2, sampler_cap=2.0
    )
    np.testing.assert_allclose(result.loss.detach(), [-3.0, -4.0], rtol=1e-14)


def test_weights_make_the_loss_a_weighted_sum():
    trained = np.array([4, 0, 1])
    np.testing.assert_allclose(rollout_weights(trained, "token-mean"), [0.2, 0.0, 0.2])
    np.testing.assert_allclose(rollout_weights(trained, "seq-mean-token-mean"), [1 / 8, 0.0, 1 / 2])
    with pytest.raises(ValueError, match="aggregation must be one of token-mean, seq-mean-token-mean, got 'sum'"):
        rollout_weights(trained, "sum")
    with pytest.raises(ValueError, match="no rollout of the step has a trained token"):
        rollout_weights(np.zeros(2, int), "token-mean")


def test_advantages_are_normalised_inside_each_group():
    reward = np.array([1.0, 5.0, 0.0, 3.0, 2.0])
    group = np.array([0, 1, 0, 1, 2])
    got = group_advantages(reward, group)
    std0, std1 = math.sqrt(0.5), math.sqrt(2.0)
    expected = [0.5 / (std0 + 1e-6), 1 / (std1 + 1e-6), -0.5 / (std0 + 1e-6), -1 / (std1 + 1e-6), 0.0]
    np.testing.assert_allclose(got, expected, rtol=1e-14)
