"""Replayed routes in the MoE layers of `transformers`: routers keep their probabilities, and take the given experts.

Shapes: n local rows, M MoE layers, E experts, k experts of a token.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from cp_engine.models.routers import routers
from cp_engine.pack import PACK_KEYWORD

_HANDED_OVER = "_tree_pack"


def hook_routers(model: nn.Module) -> None:
    """Make every router take the routes of the pack that its decoder layer got, where the pack has any.

    The MoE block gets no keywords, but the attention or GDN module before it does: its pre-hook hands the pack over.
    Both run whenever the layer's forward does, so a recomputed layer sees its own pack; hooks of the layer itself stay
    outside of what newer versions of the library recompute.
    """
    index = 0
    for layer in model.base_model.layers:
        for router in routers(layer):
            in_gdn_run = hasattr(layer, "linear_attn")
            mixer = layer.linear_attn if in_gdn_run else layer.self_attn
            mixer.register_forward_pre_hook(partial(_hand_over, router), with_kwargs=True)
            router.register_forward_hook(partial(_replay, index, in_gdn_run))
            index += 1


def _hand_over(router: nn.Module, mixer: nn.Module, args: tuple, kwargs: dict) -> None:
    router.__dict__[_HANDED_OVER] = kwargs.get(PACK_KEYWORD)


def _replay(index: int, in_gdn_run: bool, router: nn.Module, args: tuple, output: tuple) -> tuple | None:
    """The router's output, logits [n, E], weights [n, k] and experts [n, k], for the given experts."""
    pack = router.__dict__.pop(_HANDED_OVER, None)
    if pack is None or pack.routes is None:
        return None
    logits, chosen = output[0], (pack.gdn_routes if in_gdn_run else pack.routes)[index]
    weights = torch.softmax(logits, -1, dtype=torch.float32).gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Qwen3.5 has no such setting and always does
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen
