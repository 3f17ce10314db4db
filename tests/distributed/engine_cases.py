"""Runs of the training engine on a mesh of ranks, for the tests of engines, and their flat oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_engine.config import Config
from cp_engine.distributed.ranks import Ranks
from cp_engine.distributed.zero import ZeroModel
from cp_engine.engine import Engine
from cp_engine.models.precision import keep_float64
from cp_engine.rollouts import Rollout, read_rollouts
from cp_engine.verify.run import FlatRun, VerifyOptions, reindex, run_flat
from cp_engine.verify.values import with_placeholders

SAMPLE = Path(__file__).parent.parent.parent / "launch" / "data" / "sample.jsonl"
# Three packs of uneven size, so that two and four DP groups get empty ones.
ROLLOUTS, PACK_TOKENS = 10, 90


def this_rank(per_node: int | None = None) -> Ranks:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(0, 1, None, torch.device("cpu"), per_node)
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"), per_node)


def sample() -> list[Rollout]:
    """Rollouts whose ids are those in use, numbered from 0."""
    return reindex(read_rollouts(SAMPLE, limit=ROLLOUTS))[0]


def options(**fields) -> VerifyOptions:
    return VerifyOptions(**({"model": "tiny-qwen3.5", "loss": "grpo", "max_pack_tokens": PACK_TOKENS} | fields))


def flat_oracle(**fields) -> FlatRun:
    return run_flat(sample(), options(**fields), Ranks(0, 1, None, torch.device("cpu")))


def case_config(flat: FlatRun, fields: dict, sections: dict) -> Config:
    of_flat = replace(options(**fields), router_aux_coef=flat.router_aux_coef)
    base = of_flat.config(1, flat.vocab_size).model_dump()
    return Config.model_validate(base | sections)


def tiny_config(sections: dict) -> Config:
    """GRPO on the sample in float64, three packs a step."""
    raw = {"model": {"path": "tiny-qwen3.5", "vocab_size": 36}, "packing": {"max_pack_tokens": PACK_TOKENS}}
    return Config.model_validate(raw | {"dtype": "float64", "loss": {"name": "grpo"}} | sections)


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Every weight; collective."""
    return {name: tensor.cpu().clone() for name, tensor in engine.named_full_weights()}


def whole_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Every trained parameter's gradient; collective."""
    found, held = {}, engine.distributed
    for name, parameter in engine.model.causal_lm.named_parameters():
        if parameter.requires_grad:
            gradient = held.utils.safe_get_full_grad(parameter) if isinstance(held, ZeroModel) else parameter.grad
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def gradients(flat: FlatRun, fields: dict, sections: dict, per_node: int | None = None, own_packs: bool = False):
    """Loss of the step (this rank's part), number of empty packs, and all gradients, on a mesh.

    Args:
        own_packs: those that the engine makes for its data-parallel groups, in place of the flat oracle's.
    """
    ranks = this_rank(per_node)
    with keep_float64():
        engine = Engine(case_config(flat, fields, sections), ranks)
        meter = _Losses()
        step = flat.step
        if own_packs:
            step = replace(step, packs=engine._prepare([with_placeholders(r) for r in sample()]).packs)
        engine.accumulate_gradients(step, meter)
    return meter.loss, meter.empty, whole_gradients(engine)


class _Losses:
    """Takes the place of the step meter."""

    def __init__(self):
        self.loss, self.empty = 0.0, 0

    def add(self, placed, plan, result, *seconds):
        self.loss += float(result.loss.detach())
        self.empty += not placed.pack.tokens
