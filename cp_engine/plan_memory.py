"""Predicted memory of every rank of a placed pack.

Shapes: P ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cp_engine.memory import Memory, predict_memory
from cp_engine.memory_setup import MemorySetup, Traffic, accumulation
from cp_engine.model_sizes import ModelSizes
from cp_engine.prediction import ExchangeTime, Placement

ENGINES = ("plain", "fsdp2", "zero1", "zero2", "zero3")
_HISTORY_ROWS = 3  # taps of the convolution before the token's own


def memory_setup(engine: str, shards: int, recompute: str, layers: int | None = None) -> MemorySetup:
    """The setup of an engine by the name that the `plan` command gives it."""
    setup = MemorySetup(shards=shards, recompute=recompute, recompute_layers=layers)
    if engine.startswith("zero"):
        return replace(setup, engine="deepspeed", stage=int(engine[-1]))
    return replace(setup, engine=engine)


def rank_memory(placement: Placement, time: ExchangeTime | None, model: ModelSizes, setup: MemorySetup) -> list[Memory]:
    """Each rank's memory [P].

    Args:
        time: of the exchange that is used; None leaves out its buffers.
    """
    figures, own = placement.figures, placement.gdn
    tokens = figures.tokens if own is None else np.maximum(figures.tokens, own.tokens)
    recurrent = figures.recurrent if own is None else own.recurrent
    base = Traffic(
        attention_buffers=0 if time is None else time.buffer_bytes,
        attention_kept=_head_shards(placement, model) if time is not None and time.exchange == "ulysses" else 0,
        crosses=placement.world > 1,
    )
    states = np.zeros(placement.world, np.int64)
    if model.shape.gdn_layers:
        # Entry states, A of all affine maps for a rank's share of the heads, and the rows before each entry.
        channels = 2 * model.shape.gdn_key_heads * model.gdn_key_dim + model.shape.gdn_value_heads * model.gdn_value_dim
        states += recurrent.entries * (model.shape.state_bytes + _HISTORY_ROWS * channels * model.shape.element_bytes)
        states += recurrent.maps * model.shape.state_bytes // placement.world
    return [
        predict_memory(int(rows), model, setup, replace(base, gdn_kept=int(held)))
        for rows, held in zip(tokens, states, strict=True)
    ]


def fullest_rank(placement: Placement, time: ExchangeTime | None, model: ModelSizes, setup: MemorySetup) -> Memory:
    """The memory of the rank whose peak is largest."""
    return max(rank_memory(placement, time, model, setup), key=lambda memory: memory.peak)


def _head_shards(placement: Placement, model: ModelSizes) -> int:
    """Bytes of q, k, v, the output and the log-sum-exp of all tokens for a rank's share of the heads."""
    shape, world = model.shape, placement.world
    query, kv = shape.query_heads // world, max(1, shape.kv_heads // world)
    row = (2 * query + 2 * kv) * shape.head_dim * shape.element_bytes + query * accumulation(shape)
    return placement.layout.tokens * row
