"""Gated DeltaNet layers of `transformers` models on packed trees: the layer's forward is replaced, its modules are not.

Shapes: n local rows, C hidden size, Hk key heads of size K, HV value heads of size V.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType

import torch
import torch.nn.functional as F

from cp_engine.layers.gdn import GdnHeads, tree_gated_delta_rule
from cp_engine.pack import pack_of


def gdn_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The Gated DeltaNet layers of a model, in order, known by the parameters that our forward reads."""
    return (layer for layer in model.modules() if hasattr(layer, "A_log") and hasattr(layer, "in_proj_qkv"))


def patch_gdn_layers(model: torch.nn.Module) -> None:
    """Replace the forward of every GDN layer instance of ``model``; its class, modules and weights stay as they are."""
    for layer in gdn_layers(model):
        assert layer.conv1d.bias is None, "the tree convolution has no bias"
        layer.forward = MethodType(_tree_forward, layer)


def _tree_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
    """``Qwen3_5GatedDeltaNet.forward`` with convolution and recurrence along the tree.

    Only what both supported versions of `transformers` name alike is used: the projections and the norm (called as
    modules), ``conv1d.weight``, ``A_log`` and ``dt_bias``. ``g = -exp(A_log) * softplus(a + dt_bias)`` in
    float32 and ``beta = sigmoid(b)``, as there.

    Args:
        hidden_states: [1, n, C].
        kwargs: holds the pack; the masks and caches of a plain run are None and ignored.

    Returns:
        [1, n, C].
    """
    pack = pack_of(kwargs, f"GDN layer {self.layer_idx}")
    assert pack.gdn is not None, "the pack was planned without GDN layers: give shard_plan the conv_width"
    mixed_qkv = self.in_proj_qkv(hidden_states)
    z = self.in_proj_z(hidden_states)
    beta = self.in_proj_b(hidden_states).sigmoid()
    a = self.in_proj_a(hidden_states)
    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
    out = tree_gated_delta_rule(
        mixed_qkv[0],
        self.conv1d.weight.squeeze(1),
        g[0],
        beta[0],
        pack.gdn,
        pack.group,
        GdnHeads(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim),
    )
    out = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
    return self.out_proj(out.reshape(1, hidden_states.shape[1], -1))
