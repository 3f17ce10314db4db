"""The loss that a configuration asks for: a policy term, and what is added to given.

Shapes: O occurrences.
"""

from __future__ import annotations

from dataclasses import replace

from cp_engine.losses.cispo import cispo_loss
from cp_engine.losses.clipped import clipped_loss, log_ratio_to_old, old_or_own
from cp_engine.losses.dpo import dpo_loss
from cp_engine.losses.gspo import gspo_loss
from cp_engine.losses.importance import sampler_weight
from cp_engine.losses.kl import kl_estimate
from cp_engine.losses.occurrences import OccurrenceLoss, Occurrences
from cp_engine.losses.rollout_sums import RolloutSum
from cp_engine.losses.settings import LossConfig
from cp_engine.losses.sft import sft_loss


def occurrence_loss(given: Occurrences, loss: LossConfig, rollout_sum: RolloutSum) -> OccurrenceLoss:
    """Loss of each occurrence: ``w * policy + kl_coef * KL - entropy_coef * H``.

    ``w`` is the truncated importance weight against the sampler, KL an estimate of the divergence to the reference,
    H the entropy of the distribution that predicts the occurrence; each only where the configuration has it.

    Args:
        rollout_sum: sums over a rollout's occurrences on all ranks. gspo and dpo call it once, forward and backward, on
            every rank; the other losses never do.
    """
    result = _policy_loss(given, loss, rollout_sum)
    terms, watched = {"policy_loss": result.loss}, {}
    if loss.sampler_cap is not None:
        weight = sampler_weight(given.log_prob, given.old_logprob, given.sampler_logprob, loss.sampler_cap)
        terms["policy_loss"] = result.loss * weight
    if loss.kl_coef:
        watched["kl_ref"] = kl_estimate(given.log_prob, given.ref_logprob, loss.kl_estimator)
        terms["kl_loss"] = loss.kl_coef * watched["kl_ref"]
    if loss.entropy_coef:
        terms["entropy_loss"] = -loss.entropy_coef * given.entropy
    if loss.name not in ("sft", "dpo"):
        # Tokens were drawn from the old policy, so this is k3 with the two policies in the other order.
        own = given.log_prob.detach()
        watched["kl_old"] = kl_estimate(old_or_own(own, given.old_logprob), own, "k3")
    detached = ({name: value.detach() for name, value in group.items()} for group in (terms, watched))
    return replace(result, loss=sum(terms.values()), **dict(zip(("terms", "watched"), detached, strict=True)))


def _policy_loss(given: Occurrences, loss: LossConfig, rollout_sum: RolloutSum) -> OccurrenceLoss:
    if loss.name == "sft":
        return sft_loss(given.log_prob)
    if loss.name == "dpo":
        return dpo_loss(
            given.log_prob, given.ref_logprob, given.rollout, given.preference, given.pair, rollout_sum, beta=loss.beta
        )
    if loss.name == "cispo":
        return cispo_loss(given.log_prob, given.old_logprob, given.advantage, clip_high=loss.clip_high)
    clip = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if loss.name == "gspo":
        return gspo_loss(
            given.log_prob, given.old_logprob, given.advantage, given.rollout, given.trained, rollout_sum, **clip
        )
    if loss.name == "ppo":
        clip["dual_clip"] = loss.dual_clip
    return clipped_loss(log_ratio_to_old(given.log_prob, given.old_logprob), given.advantage, **clip)
