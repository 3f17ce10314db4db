"""Estimators of the KL divergence to the reference policy.

Shapes: O occurrences.
"""

from __future__ import annotations

import torch


def kl_estimate(log_prob: torch.Tensor, ref_logprob: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(p || p_ref) estimated at tokens drawn from p, with ``d = log p - log p_ref`` [O]:

    ``k1 = d`` (unbiased, of both signs), ``k2 = d**2 / 2`` (biased, but its gradient is the KL's in expectation),
    ``k3 = exp(-d) - 1 + d`` (unbiased, never negative; the choice of GRPO).

    Schulman 2020, "Approximating KL divergence". As a loss, k1's gradient is 0 in expectation: it is for those who
    know why they want it.

    Raises:
        ValueError: for another estimator.
    """
    difference = log_prob - ref_logprob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return (-difference).exp() - 1 + difference
    raise ValueError(f"the KL estimator must be k1, k2 or k3, got {estimator!r}")
