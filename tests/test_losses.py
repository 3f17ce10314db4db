"""Losses of single occurrences, aggregation weights and advantages, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_engine.losses.advantages import centred_rewards, normalised_rewards
from cp_engine.losses.choose import occurrence_loss
from cp_engine.losses.cispo import cispo_loss
from cp_engine.losses.clipped import clipped_loss, log_ratio_to_old
from cp_engine.losses.dpo import dpo_loss
from cp_engine.losses.gspo import gspo_loss
from cp_engine.losses.importance import sampler_weight
from cp_engine.losses.kl import kl_estimate
from cp_engine.losses.occurrences import Occurrences
from cp_engine.losses.rollout_sums import rollout_sum, rollout_sum_over
from cp_engine.losses.settings import AGGREGATIONS, LossConfig
from cp_engine.losses.sft import sft_loss
from cp_engine.losses.weights import rollout_weights
from tests.ranks import run_ranks

NAN = math.nan


def f64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(*numbers: float) -> torch.Tensor:
    return f64(*numbers).requires_grad_()


def log_prob_with_ratios(*ratios: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of -1, and the old log-probs that make these ratios."""
    return leaf(*[-1.0] * len(ratios)), -1.0 - f64(*ratios).log()


def assert_loss_and_gradient(loss, log_prob, values, gradient):
    (got,) = torch.autograd.grad(loss.sum(), log_prob)
    np.testing.assert_allclose(loss.detach(), values, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(got, gradient, rtol=1e-13, atol=1e-15)


def test_sft_is_the_negative_log_prob():
    log_prob = leaf(-1.5, -0.25)
    result = sft_loss(log_prob)
    assert_loss_and_gradient(result.loss, log_prob, [1.5, 0.25], [-1.0, -1.0])
    assert not result.clipped_high.any() and not result.clipped_low.any()


def test_clipping_happens_only_where_it_lowers_the_objective():
    # clipped above, free (A < 0), clipped below (A < 0), free (A > 0), inside
    log_prob, old = log_prob_with_ratios(2.0, 2.0, 0.5, 0.5, 1.1)
    result = clipped_loss(log_ratio_to_old(log_prob, old), f64(3.0, -3.0, -3.0, 3.0, 3.0), clip_low=0.2, clip_high=0.2)
    assert_loss_and_gradient(result.loss, log_prob, [-3.6, 6.0, 2.4, -1.5, -3.3], [0.0, 6.0, 0.0, -1.5, -3.3])
    assert result.clipped_high.tolist() == [True, False, False, False, False]
    assert result.clipped_low.tolist() == [False, False, True, False, False]


def test_clip_higher_and_clip_low_are_apart():
    log_prob, old = log_prob_with_ratios(1.25, 1.25, 0.75, 0.75)
    ratio = log_ratio_to_old(log_prob, old)
    result = clipped_loss(ratio, f64(1.0, 1.0, -1.0, -1.0), clip_low=0.3, clip_high=0.2)
    assert_loss_and_gradient(result.loss, log_prob, [-1.2, -1.2, 0.75, 0.75], [0.0, 0.0, 0.75, 0.75])
    result = clipped_loss(ratio, f64(1.0, 1.0, -1.0, -1.0), clip_low=0.2, clip_high=0.28)
    assert_loss_and_gradient(result.loss, log_prob, [-1.25, -1.25, 0.8, 0.8], [-1.25, -1.25, 0.0, 0.0])


def test_the_dual_clip_caps_the_ratio_of_negative_advantages():
    log_prob, old = log_prob_with_ratios(5.0, 2.0, 5.0, 0.5)
    advantage = f64(-1.0, -1.0, 1.0, -1.0)
    ratio = log_ratio_to_old(log_prob, old)
    result = clipped_loss(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert_loss_and_gradient(result.loss, log_prob, [3.0, 2.0, -1.2, 0.8], [0.0, 2.0, 0.0, 0.0])
    assert result.clipped_high.tolist() == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratios_that_overflow_are_clipped(dtype):
    log_prob = torch.full((3,), -0.1, dtype=dtype, requires_grad=True)
    old = torch.tensor([-9999.0, -9999.0, 9999.0], dtype=dtype)
    advantage = torch.tensor([2.0, 0.0, -2.0], dtype=dtype)
    result = clipped_loss(log_ratio_to_old(log_prob, old), advantage, clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-2.4, 0.0, 1.6], rel=1e-6)
    assert log_prob.grad.tolist() == [0.0, 0.0, 0.0]
    assert result.clipped_high.tolist() == [True, False, False]
    assert result.clipped_low.tolist() == [False, False, True]
    held = cispo_loss(log_prob, old, advantage, clip_high=1.0).loss
    assert held.tolist() == pytest.approx([0.4, 0.0, 0.0], rel=1e-6)


def test_without_old_log_probs_the_step_is_on_policy():
    log_prob = leaf(-2.0)
    ratio = log_ratio_to_old(log_prob, f64(NAN))
    result = clipped_loss(ratio, f64(0.7), clip_low=0.2, clip_high=0.2)
    assert_loss_and_gradient(result.loss, log_prob, [-0.7], [-0.7])
    assert sampler_weight(log_prob, f64(NAN), f64(-2.0 - math.log(1.5)), 2.0).item() == pytest.approx(1.5)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    log_prob, old = log_prob_with_ratios(3.0, 0.5, 3.0)
    result = cispo_loss(log_prob, old, f64(2.0, 2.0, -2.0), clip_high=0.5)
    # -min(r, 1.5) A log p with log p = -1
    assert_loss_and_gradient(result.loss, log_prob, [3.0, 1.0, -3.0], [-3.0, -1.0, 3.0])
    assert result.clipped_high.tolist() == [True, False, True] and not result.clipped_low.any()


def test_gspo_has_one_ratio_a_rollout():
    # Rollout 0: ratios 4 and 1, so s = 2, clipped where A > 0. Rollout 2: s = sqrt(1.5 * 0.5) = 0.866, inside.
    log_prob, old = log_prob_with_ratios(4.0, 1.0, 1.5, 0.5)
    rollout, trained = torch.tensor([0, 0, 2, 2]), f64(2, 0, 2)
    advantage = f64(1.0, -1.0, 1.0, -2.0)
    result = gspo_loss(log_prob, old, advantage, rollout, trained, rollout_sum, clip_low=0.2, clip_high=0.2)
    s = math.sqrt(0.75)
    # Gradient of a token: s / n times the sum of -A over its rollout's unclipped occurrences.
    gradient = [2.0 / 2, 2.0 / 2, s / 2, s / 2]
    assert_loss_and_gradient(result.loss, log_prob, [-1.2, 2.0, -s, 2 * s], gradient)
    assert result.clipped_high.tolist() == [True, False, False, False]


def test_dpo_gives_each_occurrence_its_pairs_loss():
    # Pair 0: rollouts 0 (rejected) and 2 (chosen); pair 1: rollouts 1 (chosen) and 3 (rejected).
    log_prob, ref = leaf(-1.0, -2.0, -0.5, -0.5, -1.0), f64(-1.5, -2.0, -1.5, -0.5, -2.0)
    rollout, preference, pair = torch.tensor([0, 1, 2, 2, 3]), f64(-1, 1, 1, -1), torch.tensor([0, 1, 0, 1])
    result = dpo_loss(log_prob, ref, rollout, preference, pair, rollout_sum, beta=0.4)
    margin = [1.0 - 0.5, 0.0 - 1.0]
    loss = [math.log1p(math.exp(-0.4 * m)) for m in margin]
    slope = [-0.4 / (1 + math.exp(0.4 * m)) for m in margin]
    # Three occurrences carry the loss of pair 0, two that of pair 1.
    gradient = [-3 * slope[0], 2 * slope[1], 3 * slope[0], 3 * slope[0], -2 * slope[1]]
    expected = [loss[0], loss[1], loss[0], loss[0], loss[1]]
    assert_loss_and_gradient(result.loss, log_prob, expected, gradient)
    # seq-mean-token-mean makes it the mean over pairs.
    weight = rollout_weights(np.array([1, 1, 2, 1]), "seq-mean-token-mean")
    assert float((weight[rollout] * result.loss.detach().numpy()).sum()) == pytest.approx(sum(loss) / 2, rel=1e-15)


def test_kl_estimators():
    log_prob, ref = leaf(-1.0), f64(-0.5)
    assert_loss_and_gradient(kl_estimate(log_prob, ref, "k1"), log_prob, [-0.5], [1.0])
    assert_loss_and_gradient(kl_estimate(log_prob, ref, "k2"), log_prob, [0.125], [-0.5])
    k3 = kl_estimate(log_prob, ref, "k3")
    assert_loss_and_gradient(k3, log_prob, [math.exp(0.5) - 0.5 - 1], [1 - math.exp(0.5)])
    with pytest.raises(ValueError, match="must be k1, k2 or k3, got 'k4'"):
        kl_estimate(log_prob, ref, "k4")


def test_the_sampler_correction_is_capped_and_has_no_gradient():
    log_prob, old = leaf(-1.0, -1.0), f64(-1.0, -1.0)
    weight = sampler_weight(log_prob, old, old - f64(1.5, 3.0).log(), 2.0)
    np.testing.assert_allclose(weight, [1.5, 2.0], rtol=1e-14)
    assert not weight.requires_grad


def one_occurrence(log_prob, entropy) -> Occurrences:
    """Ratio 1.1, advantage 2, importance weight 1.5, one nat below the reference."""
    old = f64(-1.0 - math.log(1.1))
    index = torch.tensor([0])
    sampler = old - math.log(1.5)
    return Occurrences(log_prob, entropy, f64(2.0), old, f64(0.0), sampler, index, f64(1.0), f64(NAN), index)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo"])
def test_a_loss_is_the_sum_of_its_parts(name):
    log_prob, entropy = leaf(-1.0), leaf(0.8)
    clip = {"clip_high": 0.2} if name == "cispo" else {"clip_low": 0.2, "clip_high": 0.2}
    kl = {} if name == "dapo" else {"kl_coef": 0.3, "kl_estimator": "k1"}
    config = LossConfig(name=name, sampler_cap=4.0, entropy_coef=0.25, **clip, **kl)
    result = occurrence_loss(one_occurrence(log_prob, entropy), config, rollout_sum)
    policy = 2.2 if name == "cispo" else -2.2  # -r A log p, else -r A
    expected = 1.5 * policy - 0.25 * 0.8 + (0.3 * -1.0 if kl else 0.0)
    gradient = 1.5 * -2.2 + (0.3 if kl else 0.0)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(expected, rel=1e-14)
    assert (log_prob.grad.item(), entropy.grad.item()) == pytest.approx((gradient, -0.25), rel=1e-14)


def summed_over_ranks() -> tuple[list, list]:
    """Rank 1 has no occurrences; the others hold parts of rollouts 0 and 1 of three."""
    rank = dist.get_rank()
    values = {0: leaf(1.0, 2.0), 1: leaf(), 2: leaf(4.0)}[rank]
    rollout = torch.tensor({0: [0, 1], 1: [], 2: [0]}[rank], dtype=torch.int64)
    sums = rollout_sum_over(dist.group.WORLD)(values, rollout, 3)
    (sums.square()[rollout]).sum().backward()
    return sums.tolist(), values.grad.tolist()


def test_a_rollouts_sum_goes_over_all_ranks_forward_and_backward():
    results = run_ranks(3, summed_over_ranks)
    assert all(sums == [5.0, 2.0, 0.0] for sums, _ in results)
    # The loss of all ranks is 2 * 5**2 + 2**2: two occurrences square the first sum.
    assert [gradient for _, gradient in results] == [[20.0, 4.0], [], [20.0]]


def test_weights_make_the_loss_a_weighted_sum():
    trained = np.array([4, 0, 1])
    expected = {
        "token-mean": [1 / 5, 0.0, 1 / 5],
        "seq-mean-token-mean": [1 / 8, 0.0, 1 / 2],
        "seq-mean-token-sum": [1 / 2, 0.0, 1 / 2],
        "seq-mean-token-sum-norm": [1 / 8, 0.0, 1 / 8],
    }
    assert tuple(expected) == AGGREGATIONS
    for aggregation, weights in expected.items():
        np.testing.assert_allclose(rollout_weights(trained, aggregation), weights, rtol=1e-15)
    np.testing.assert_allclose(rollout_weights(trained, "seq-mean-token-sum-norm", 10.0), [0.05, 0.0, 0.05])
    with pytest.raises(ValueError, match="aggregation must be one of token-mean, seq-mean-token-mean, .* got 'sum'"):
        rollout_weights(trained, "sum")
    for aggregation in AGGREGATIONS:
        assert rollout_weights(np.zeros(2, int), aggregation).tolist() == [0.0, 0.0]


def test_advantages_are_relative_inside_each_group():
    reward = np.array([1.0, 5.0, 0.0, 3.0, 2.0])
    group = np.array([0, 1, 0, 1, 2])
    centred = [0.5, 1.0, -0.5, -1.0, 0.0]
    np.testing.assert_allclose(centred_rewards(reward, group), centred, rtol=1e-14)
    std = np.array([math.sqrt(0.5), math.sqrt(2.0), math.sqrt(0.5), math.sqrt(2.0), 0.0])
    np.testing.assert_allclose(normalised_rewards(reward, group), centred / (std + 1e-6), rtol=1e-14)
