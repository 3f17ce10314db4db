"""Gated DeltaNet layers of `transformers` models on packed trees: the layer's forward is replaced, its modules are not.

Shapes: n local rows, C hidden size, Hk key heads of size K, HV value heads of size V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType

import torch

from cp_engine.kernels import gates
from cp_engine.layers.gdn import start_gated_delta_rule
from cp_engine.layers.gdn_tables import GdnHeads
from cp_engine.pack import pack_of


def gdn_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The Gated DeltaNet layers of a model, in order, known by the parameters that our forward reads."""
    return (layer for layer in model.modules() if hasattr(layer, "A_log") and (_is_split(layer) or _is_fused(layer)))


def gdn_heads(config) -> GdnHeads | None:
    """Heads of the GDN layers of a text config; None for a model without such layers."""
    if "linear_attention" not in (getattr(config, "layer_types", None) or []):
        return None
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return GdnHeads(*(getattr(config, f"linear_{name}") for name in sizes))


def _is_split(layer: torch.nn.Module) -> bool:
    """Qwen3.5: q, k, v of one projection, and one each for the output gate z, the write strength b and the decay a."""
    return hasattr(layer, "in_proj_qkv")


def _is_fused(layer: torch.nn.Module) -> bool:
    """Qwen3-Next: one projection for q, k, v, z and one for b, a."""
    return hasattr(layer, "in_proj_qkvz")


def parameters_between_exchanges(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those of what a GDN layer computes while states move between ranks.

    Some ranks take states before it that others send after it, so nothing may be gathered there: each would wait for
    the other.
    """
    return list(layer.in_proj_z.parameters()) if _is_split(layer) else []


def patch_gdn_layers(model: torch.nn.Module) -> None:
    """Replace the forward of every GDN layer instance of ``model`` and of its gated norm; classes, modules and weights
    stay as they are."""
    for layer in gdn_layers(model):
        assert layer.conv1d.bias is None, "the tree convolution has no bias"
        layer.forward = MethodType(_tree_forward, layer)
        layer.norm.forward = MethodType(_norm_forward, layer.norm)


# qkv [n, 2 Hk K + HV V], b [n, HV] and a [n, HV] of a layer, and a function for its output gate z [n, HV V].
Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]


def _split_projections(self, hidden_states: torch.Tensor) -> Projections:
    """Of a Qwen3.5 layer."""
    qkv, b, a = (project(hidden_states)[0] for project in (self.in_proj_qkv, self.in_proj_b, self.in_proj_a))
    return qkv, b, a, lambda: self.in_proj_z(hidden_states)[0]


def _fused_projections(self, hidden_states: torch.Tensor) -> Projections:
    """Of a Qwen3-Next layer, whose two projections hold one key head with its value heads after the other:
    q, k, all v, all z of a key head, then the next; b and a alike."""
    rows, heads, values = hidden_states.shape[1], self.num_k_heads, self.num_v_heads // self.num_k_heads
    sizes = [self.head_k_dim, self.head_k_dim, values * self.head_v_dim, values * self.head_v_dim]
    q, k, v, z = self.in_proj_qkvz(hidden_states).view(rows, heads, -1).split(sizes, dim=-1)
    b, a = self.in_proj_ba(hidden_states).view(rows, heads, -1).split([values, values], dim=-1)
    qkv = torch.cat([part.reshape(rows, -1) for part in (q, k, v)], dim=-1)
    return qkv, *(part.reshape(rows, -1) for part in (b, a)), lambda: z.reshape(rows, -1)


def _tree_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
    """``Qwen3_5GatedDeltaNet.forward`` and ``Qwen3NextGatedDeltaNet.forward`` with convolution and recurrence along
    the tree.

    Only what both supported versions of `transformers` name alike is used: the projections and the norm (called as
    modules), ``conv1d.weight``, ``A_log`` and ``dt_bias``.

    Args:
        hidden_states: [1, n, C].
        kwargs: holds the pack; the masks and caches of a plain run are None and ignored.

    Returns:
        [1, n, C].
    """
    pack = pack_of(kwargs, f"GDN layer {self.layer_idx}")
    assert pack.gdn is not None, "the pack was planned without GDN layers: give shard_plan the conv_width"
    projections = _split_projections if _is_split(self) else _fused_projections
    mixed_qkv, b, a, output_gate = projections(self, hidden_states)
    # The only parameters that are read, not called: the convolution's weight, A_log and dt_bias.
    g, beta = gates.input_gates(a, b, self.A_log, self.dt_bias)
    outputs = start_gated_delta_rule(
        mixed_qkv,
        self.conv1d.weight.squeeze(1),
        g,
        beta,
        pack.gdn,
        pack.group,
        GdnHeads(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim),
    )
    z = output_gate()  # while states move between ranks, and so its gradients while theirs do
    out = self.norm(outputs().reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
    return self.out_proj(out.reshape(1, hidden_states.shape[1], -1))


def _norm_forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``Qwen3_5RMSNormGated.forward`` and ``Qwen3NextRMSNormGated.forward``, [n HV, V] each, in one pass over memory.

    The module is still called as one, so hooks that gather its weight see the call.
    """
    if gates.choose(hidden_states) == "reference":
        return type(self).forward(self, hidden_states, gate)
    return gates.gated_norm(hidden_states, gate, self.weight, self.variance_epsilon)
