"""What a checkpoint remembers of its run: settings and rollouts that a resumed run is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from cp_engine.config import Config
from cp_engine.rollouts import Rollout


def what_is_trained(config: Config, rollouts: str | None) -> dict[str, Any]:
    """What makes a run the run that it is, as JSON values: with another of them something else would be trained.

    Args:
        rollouts: `described` rollouts that all steps are drawn from; None where a program brings its own to each step.
    """
    data = None if config.data is None else config.data.model_dump(mode="json", exclude={"rollouts"})
    return {
        "model": config.model.model_dump(mode="json", exclude={"liger"}),
        "lora": None if config.lora is None else config.lora.model_dump(mode="json"),
        "loss": config.loss.model_dump(mode="json"),
        # A file that was moved or packed is the same, so its contents stand in the place of its name.
        "data": data if rollouts is None else {**(data or {}), "rollouts": rollouts},
        "optimizer": {"name": config.optimizer.name},
        "seed": config.seed,
    }


def how_it_is_trained(config: Config) -> dict[str, Any]:
    """What a user may have reasons to change in the middle of a run, but would want to be told of, as JSON values."""
    optimizer = config.optimizer
    settings = {
        "optimizer": optimizer.model_dump(mode="json", exclude={"name", "on_nonfinite"}),
        "dtype": config.dtype,
    }
    # A longer run at a constant learning rate begins as a shorter one does.
    return settings if optimizer.schedule == "constant" else settings | {"steps": config.steps}


def described(rollouts: Sequence[Rollout]) -> str:
    """Number and digest of rollouts: equal for equal rollouts in the same order."""
    digest = hashlib.blake2b(digest_size=8)
    for rollout in rollouts:
        for field in fields(rollout):
            value = getattr(rollout, field.name)
            if isinstance(value, np.ndarray):
                digest.update(f"{field.name} {value.dtype} {value.shape}".encode())
                digest.update(np.ascontiguousarray(value))
            else:
                digest.update(f"{field.name} {value!r}".encode())
    return f"{len(rollouts)} rollouts with digest {digest.hexdigest()}"


def differences(then: Any, now: Any, name: str = "") -> Iterator[str]:
    """Settings that differ among those that both sides have, each with both values.

    Of a section such as ``loss`` that has another name only the name: other settings follow from it.
    """
    if not isinstance(then, dict) or not isinstance(now, dict):
        if then != now:
            yield f"{name} was {then!r} and is {now!r}"
        return
    keys = ["name"] if then.get("name") != now.get("name") else [key for key in then if key in now]
    for key in keys:
        yield from differences(then.get(key), now.get(key), f"{name}.{key}" if name else key)
