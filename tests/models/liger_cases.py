"""Engines with and without Liger's kernels, and what their gradients differ by."""

from __future__ import annotations

import sys

import torch
from torch import nn

from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from tests.distributed.engine_cases import sample, this_rank, tiny_config, whole_gradients

ROLLOUTS = 4


def config_of(model: str, dtype: str, liger: bool = False, **sections):
    path = {"path": model, "vocab_size": 36, "liger": liger}
    return tiny_config({"model": path, "dtype": dtype, "packing": {"max_pack_tokens": None}} | sections)


def engine_of(model: str, dtype: str, liger: bool = False, causal_lm: nn.Module | None = None, **sections) -> Engine:
    return Engine(config_of(model, dtype, liger, **sections), this_rank(), causal_lm)


def gradients_of(engine: Engine) -> dict[str, torch.Tensor]:
    engine.accumulate_gradients(engine._prepare(sample()[:ROLLOUTS]))
    return whole_gradients(engine)


def errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Max norm of each gradient's error over its own maximum, at least a thousandth of the largest gradient's."""
    assert found.keys() == truth.keys()
    largest = max(float(tensor.abs().max()) for tensor in truth.values())
    return {
        name: float((found[name] - tensor).abs().max()) / max(float(tensor.abs().max()), 1e-3 * largest)
        for name, tensor in truth.items()
    }


def library_module(causal_lm: nn.Module):
    """Where `transformers` defines a model and its rotary embedding."""
    return sys.modules[type(causal_lm).__module__]


def step_on_gpu(model: str, dtype: str, liger: bool) -> dict:
    """Metrics of one training step on the first GPU."""
    ranks = Ranks(0, 1, None, torch.device("cuda", 0))
    return Engine(config_of(model, dtype, liger), ranks).train_step(sample()[:ROLLOUTS])
