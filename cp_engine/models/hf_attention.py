"""Softmax attention of `transformers` models on packed trees, through its attention-interface registry.

Shapes: n local rows, Hq query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from cp_engine.layers.attention import tree_attention
from cp_engine.pack import pack_of

ATTENTION_NAME = "cp_engine"


def cp_engine_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention function in the signature of `transformers`.

    Args:
        query: [1, Hq, n, D], rotated; key, value: [1, Hk, n, D].
        attention_mask: None: the pack's plan says who sees whom.
        scaling: factor of the attention scores.
        kwargs: holds the pack (`pack.PACK_KEYWORD`), and ``sliding_window`` in layers that have one.

    Returns:
        output [1, n, Hq, D], and None for the weights, which are never formed.

    Raises:
        ValueError: if no pack was passed.
    """
    pack = pack_of(kwargs, f"attention layer {module.layer_idx}")
    assert attention_mask is None and dropout == 0.0
    tables = pack.attention if kwargs.get("sliding_window") is None else pack.window_attention
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = tree_attention(q, k, v, tables, pack.group, scaling)
    return out[None], None


def register_attention() -> None:
    """Make the attention known to `transformers` under `ATTENTION_NAME`; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, cp_engine_attention)
