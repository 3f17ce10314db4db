"""Runs of Gated DeltaNet layers of `transformers` models in a layout of their own.

A run is a maximal sequence of consecutive decoder layers with a GDN mixer. Where a pack's plan has a second layout,
hidden states move into it before the first layer of a run and back after its last one, so that whole decoder layers
work in it: norms and MLPs go by rows, and only attention layers read the position embeddings of the other layout.

Shapes: n local rows, m local rows in the layout of the GDN layers, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from cp_engine.pack import DevicePack, pack_of
from cp_engine.sharding.exchange.relay import RelayTables, relay_rows


def gdn_runs(config) -> Iterator[tuple[int, int]]:
    """First and last layer of each run of GDN layers of a text config."""
    kinds = [*(getattr(config, "layer_types", None) or []), None]
    first = None
    for index, kind in enumerate(kinds):
        if kind == "linear_attention":
            first = index if first is None else first
        elif first is not None:
            yield first, index - 1
            first = None


def patch_gdn_runs(model: torch.nn.Module) -> None:
    """Wrap the forward of the first and the last layer instance of every run; calling it again changes nothing.

    The layer's own forward is called inside, with whatever `transformers` wraps around it, so the moves stay outside
    activation checkpoints where these are taken around forward (5.24; 5.17 takes them around the call).
    """
    layers = model.base_model.layers
    for first, last in gdn_runs(model.config.get_text_config()):
        for index in {first, last}:
            layer = layers[index]
            layer.forward = partial(_bordering_forward, layer, index, index == first, index == last)


def _bordering_forward(layer, index: int, enters: bool, leaves: bool, hidden_states: torch.Tensor, *args, **kwargs):
    """Forward of a decoder layer, [1, n, C] -> [1, n, C], between the moves that its place in a run asks for."""
    pack = pack_of(kwargs, f"GDN layer {index}")
    if enters and pack.relay is not None:
        hidden_states = _moved(hidden_states, pack.relay, pack)
    hidden_states = type(layer).forward(layer, hidden_states, *args, **kwargs)
    if leaves and pack.relay is not None:
        hidden_states = _moved(hidden_states, pack.relay.back, pack)
    return hidden_states


def _moved(hidden_states: torch.Tensor, tables: RelayTables, pack: DevicePack) -> torch.Tensor:
    return relay_rows(hidden_states[0], tables, pack.group)[None]
