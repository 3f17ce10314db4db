"""Model FLOPs of a training step: what the model's equations ask for, whatever is computed again or padded.

Counted are dense products, visible (query, key) pairs and the recurrence; not norms, rotary, router, the short
convolution, adapters and the optimizer. The count follows Chowdhery et al. 2022 ("PaLM", appendix B), with visible
pairs in place of sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_engine.sharding.cost import ModelShape


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step goes through the model with."""

    tokens: int
    pairs: int  # visible (query, key) pairs, a token and itself included
    predictors: int  # rows that the language-model head is applied to
    window_pairs: int = 0  # visible pairs in a layer with a sliding window


def training_flops(work: Work, shape: ModelShape, vocab_size: int, frozen: bool = False, backward: bool = True) -> int:
    """FLOPs of forward and backward, or of forward alone, a multiply-add being two.

    A product of activations and weights costs its forward twice again in backward, once where the weights are
    ``frozen`` (LoRA). Attention is two products over pairs. The recurrence of a Gated DeltaNet head is three over a
    token's state: what it holds for the key, the write, and what the query reads.
    """
    products = shape.attention_products * shape.attention_layers + shape.gdn_products * shape.gdn_layers
    dense = 2 * (work.tokens * products + work.predictors * shape.hidden * vocab_size)
    pairs = work.pairs * (shape.attention_layers - shape.window_layers) + work.window_pairs * shape.window_layers
    attention = 4 * pairs * shape.query_heads * shape.head_dim
    recurrence = 6 * work.tokens * shape.gdn_value_heads * shape.gdn_head_dim**2 * shape.gdn_layers
    if not backward:
        return dense + attention + recurrence
    return (2 if frozen else 3) * dense + 3 * (attention + recurrence)
