"""The expert routers of a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class RouterShape:
    """What all MoE layers of a model have in common."""

    layers: int  # MoE layers; others are dense
    experts: int
    top_k: int  # experts of a token
    in_gdn_runs: tuple[bool, ...]  # of each MoE layer: whether it works on the rows of the GDN layers' layout


def routers(model: nn.Module) -> list[nn.Module]:
    """The router of each MoE layer, in order, known by what the router classes of `transformers` hold."""
    return [m for m in model.modules() if all(hasattr(m, name) for name in ("top_k", "num_experts", "weight"))]


def router_shape(model: nn.Module) -> RouterShape | None:
    """None for a model without MoE layers."""
    found = routers(model)
    if not found:
        return None
    sizes = {(router.num_experts, router.top_k) for router in found}
    assert len(sizes) == 1, "all routers of a supported model are alike"
    in_gdn_runs = [hasattr(layer, "linear_attn") for layer in model.base_model.layers for _ in routers(layer)]
    return RouterShape(len(found), *sizes.pop(), tuple(in_gdn_runs))
