"""FLOPs of a training step beyond what the model's equations ask for (`cp_engine.flops`)."""

from __future__ import annotations

from cp_engine import machines
from cp_engine.config import PackingConfig, ParallelConfig
from cp_engine.flops import Work, training_flops
from cp_engine.losses.settings import LossConfig
from cp_engine.memory import first_layers
from cp_engine.placement import place_pack, plan_rank
from cp_engine.rollouts import Rollout
from cp_engine.sharding.cost import ModelShape
from cp_engine.step import prepare_step

PEAK_TFLOPS = float(machines.PEAK_TFLOPS["H200"])
ONE_RANK = ParallelConfig()


def step_work(rollouts: list[Rollout], packing: PackingConfig, loss: LossConfig, shape: ModelShape) -> Work:
    """What goes through the model in one step of the engine, over all packs; the same on any number of ranks."""
    packs = prepare_step(rollouts, packing, loss, shape).packs
    plans = [plan_rank(place_pack(pack, ONE_RANK, shape), 0, "affine", None) for pack in packs]
    return Work(
        tokens=sum(pack.forest.tokens for pack in packs),
        pairs=sum(pack.forest.tree_pairs for pack in packs),
        predictors=sum(plan.loss.predictors for plan in plans),
    )


def hardware_flops(
    work: Work, shape: ModelShape, vocab_size: int, frozen: bool, recompute: str, layers: int | None = None
) -> int:
    """Model FLOPs and what is computed again: the head forward, the scores in attention's backward (half of attention
    forward), and what of the layers forward ``memory.recompute`` of the configuration says.

    Args:
        layers: recomputed are only so many; None: all.
    """
    head = 2 * work.predictors * shape.hidden * vocab_size
    attention = 4 * work.pairs * shape.query_heads * shape.head_dim * shape.attention_layers
    again = head + attention // 2
    softmax, gdn = (0, 0) if recompute == "none" else first_layers(shape, layers)
    again += 2 * work.tokens * (shape.attention_products * softmax + shape.gdn_products * gdn)
    if recompute == "layers":
        again += work.tokens * 6 * shape.gdn_value_heads * shape.gdn_head_dim**2 * gdn
        again += 4 * work.pairs * shape.query_heads * shape.head_dim * softmax
    return training_flops(work, shape, vocab_size, frozen) + again
