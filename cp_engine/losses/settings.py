"""The `loss` section of a configuration: which settings each loss has, and what they are when left out.

Nothing here imports torch. `docs/losses.md` has the table.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3")

# What every policy loss can add; None and 0 leave it out.
_EXTRAS: dict[str, Any] = {"sampler_cap": None, "entropy_coef": 0.0}
_KL: dict[str, Any] = {"kl_coef": 0.0, "kl_estimator": None}
_CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}

# The settings that each loss reads, with their defaults; `name`, `sum_norm` and `temperature` belong to all.
LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"aggregation": "token-mean"},
    "grpo": {"aggregation": "token-mean", **_CLIP, **_KL, **_EXTRAS},
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm", **_CLIP, **_KL, **_EXTRAS},
    "dapo": {"aggregation": "token-mean", "clip_low": 0.2, "clip_high": 0.28, "overlong_tokens": None, **_EXTRAS},
    "gspo": {"aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4, **_KL, **_EXTRAS},
    "cispo": {"aggregation": "token-mean", "clip_high": 4.0, **_KL, **_EXTRAS},
    "ppo": {"aggregation": "token-mean", **_CLIP, "dual_clip": 3.0, **_KL, **_EXTRAS},
    "dpo": {"aggregation": "seq-mean-token-mean", "beta": 0.1},
}
LOSSES = tuple(LOSS_DEFAULTS)


class LossConfig(BaseModel):
    """Settings that the named loss does not read are refused, and None once the section is resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["sft", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", "dpo"] = "grpo"
    aggregation: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    ) = None
    """How occurrences are averaged; null takes the loss's own."""
    sum_norm: float | None = Field(None, gt=0)
    """seq-mean-token-sum-norm: what a rollout's sum is divided by; null takes the largest number of trained tokens of a
    rollout of the step."""
    clip_low: float | None = Field(None, gt=0, lt=1)
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float | None = Field(None, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    """ppo: cap of the ratio where the advantage is negative."""
    kl_coef: float | None = Field(None, ge=0)
    """Weight of the KL to the rollouts' `ref_logprobs`."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """How that KL is estimated; null takes k3. Only with a positive kl_coef."""
    entropy_coef: float | None = Field(None, ge=0)
    """Weight of the entropy bonus."""
    sampler_cap: float | None = Field(None, gt=0)
    """Cap of the importance weight against the rollouts' `sampler_logprobs`; null leaves it out."""
    overlong_tokens: int | None = Field(None, ge=2)
    """dapo: rollouts of at least so many tokens, prompt included, were cut off by a length limit and weigh nothing."""
    beta: float | None = Field(None, gt=0)
    """dpo: strength of the pull towards the reference."""
    router_aux_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of expert routers, over all tokens of the step."""
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it, as the sampler did."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        """Fill in the loss's defaults and refuse what it does not read."""
        name = given.get("name", "grpo") if isinstance(given, dict) else None
        if name not in LOSSES:
            return given
        given = {key: value for key, value in given.items() if value is not None}
        own = LOSS_DEFAULTS[name]
        optional = {key for settings in LOSS_DEFAULTS.values() for key in settings}
        unused = [key for key in given if key in optional and key not in own]
        if unused:
            raise ValueError(f"{name} does not use {', '.join(unused)}; its settings are {', '.join(own)}")
        resolved = {**own, **given}
        if "sum_norm" in given and resolved["aggregation"] != "seq-mean-token-sum-norm":
            raise ValueError("sum_norm is used by aggregation seq-mean-token-sum-norm only; leave it out")
        if resolved.get("kl_coef"):
            resolved["kl_estimator"] = resolved["kl_estimator"] or "k3"
        elif "kl_estimator" in given:
            raise ValueError("kl_estimator has no effect while kl_coef is 0; set kl_coef or leave it out")
        return resolved
