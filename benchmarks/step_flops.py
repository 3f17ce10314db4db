"""FLOPs of a training step, from a model's modules and from what goes through them.

A multiply-add is two FLOPs. Counted are dense products, the products of attention over visible pairs, and the
recurrence of the gated delta rule; norms, rotations, activations and the convolution of four taps are not.

Model FLOPs are those that the gradients need: of a product forward one, backward one for its input and, where its
weight is trained, one more. Attention has two products forward (scores, values) and four backward. The first layer's
input gradient is counted too, though a frozen embedding does not need it: one of all layers' products of that layer.
Hardware FLOPs add what is computed again: the layers' forward under activation recompute, the head's, and the scores in
attention's backward.

Shapes: Hq query heads, D head size, HV value heads, K and V their head sizes, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cp_engine import machines
from cp_engine.config import PackingConfig, ParallelConfig
from cp_engine.losses.settings import LossConfig
from cp_engine.placement import place_pack, plan_rank
from cp_engine.rollouts import Rollout
from cp_engine.sharding.cost import ModelShape
from cp_engine.step import prepare_step

PEAK_TFLOPS = float(machines.PEAK_TFLOPS["H200"])
ONE_RANK = ParallelConfig()


@dataclass(frozen=True)
class Work:
    """What goes through the model in one step, over all packs."""

    tokens: int
    pairs: int  # visible (query, key) pairs of one head in one layer
    predictors: int  # rows of logits

    @classmethod
    def of(cls, rollouts: list[Rollout], packing: PackingConfig, loss: LossConfig, shape: ModelShape) -> Work:
        """Of a step of the engine; the same on any number of ranks."""
        packs = prepare_step(rollouts, packing, loss, shape).packs
        plans = [plan_rank(place_pack(pack, ONE_RANK, shape), 0, "affine", None) for pack in packs]
        return cls(
            tokens=sum(pack.forest.tokens for pack in packs),
            pairs=sum(pack.forest.tree_pairs for pack in packs),
            predictors=sum(len(plan.loss.predictor_row) for plan in plans),
        )


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token, one pair over all layers and heads, and one predictor: forward, and all that counts."""

    token_forward: int
    token: int
    pair_forward: int
    predictor_forward: int
    predictor: int

    @classmethod
    def of(cls, causal_lm: nn.Module, shape: ModelShape) -> Flops:
        """Of a model whose weights are trained where they require a gradient; adapters count as products."""
        linear = [m for m in causal_lm.base_model.modules() if isinstance(m, nn.Linear)]
        head = causal_lm.get_output_embeddings()
        recurrence = 6 * shape.gdn_layers * shape.gdn_value_heads * shape.gdn_head_dim**2
        forward = sum(_product(module, 1, 0) for module in linear) + recurrence
        return cls(
            token_forward=forward,
            token=sum(_product(module, 2, 1) for module in linear) + 3 * recurrence,
            pair_forward=4 * shape.attention_layers * shape.query_heads * shape.head_dim,
            predictor_forward=_product(head, 1, 0),
            predictor=_product(head, 2, 1),
        )

    def model(self, work: Work) -> int:
        """FLOPs that the gradients of a step need."""
        return work.tokens * self.token + 3 * work.pairs * self.pair_forward + work.predictors * self.predictor

    def hardware(self, work: Work, recompute: bool) -> int:
        """FLOPs that are executed.

        Args:
            recompute: layers run forward again in backward, their attention too.
        """
        again = work.pairs * self.pair_forward // 2 + work.predictors * self.predictor_forward
        if recompute:
            again += work.tokens * self.token_forward + work.pairs * self.pair_forward
        return self.model(work) + again


def _product(module: nn.Module, always: int, if_trained: int) -> int:
    """FLOPs of one row through a linear module: so many products, and so many more where its weight is trained."""
    return 2 * module.weight.numel() * (always + if_trained * module.weight.requires_grad)
