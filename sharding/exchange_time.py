"""Time of one softmax-attention layer by each exchange, rank by rank, and the bytes of its buffers.

Shapes: P ranks. Times are int64 nanoseconds, [P] inside a `LayerTime`.
"""

from __future__ import annotations

import numpy as np

from cp_engine.sharding.cost import ACCUMULATION_BYTES, MIB, Costs, ModelShape
from cp_engine.sharding.hosts import Hosts, link_rows, shared_links
from cp_engine.sharding.layer_time import (
    LayerTime,
    gather_time,
    head_groups,
    head_rows_time,
    kernel_time,
    token_time,
)
from cp_engine.sharding.measure import TILE, Figures, Survey, whole_tiles

# Passes of a ring round over the output in accumulation dtype: the partial one and the sum so far are read, the sum
# is written.
MERGE_PASSES = 3

Directions = tuple[LayerTime, LayerTime]  # forward, backward


def head_problem(model: ModelShape, world: int) -> str | None:
    """Why heads cannot be dealt to the ranks; the rule of the `ulysses` exchange."""
    if model.query_heads % world:
        return f"{model.query_heads} query heads are not divisible by {world} ranks"
    if model.kv_heads % world and world % model.kv_heads:
        return f"{model.kv_heads} kv heads neither divide {world} ranks nor are divisible by them"
    return None


def exchange_times(
    survey: Survey, figures: Figures, rows: np.ndarray, model: ModelShape, costs: Costs, hosts: Hosts
) -> dict[str, tuple[Directions, int]]:
    """Each exchange that the heads allow: forward and backward, and most bytes of its buffers on any rank.

    Args:
        figures: of a layer, with or without a window.
        rows: int64 [P, P] rows of owner (column) that each reader (row) sees in such a layer, 0 on the diagonal.
    """
    world = len(rows)
    found = {"gather": gather(figures, rows, model, costs, hosts), "ring": ring(figures, rows, model, costs, hosts)}
    if head_problem(model, world) is None:
        found["ulysses"] = ulysses(survey, figures, model, shared_links(costs, hosts, world))
    return found


def gather(figures: Figures, rows: np.ndarray, model: ModelShape, costs: Costs, hosts: Hosts) -> tuple[Directions, int]:
    """Buffers: two head groups of all visible rows, and one group of their gradients in backward."""
    held = int((figures.tokens + figures.rows_in).max()) * (2 * model.kv_row_bytes + model.kv_gradient_bytes)
    time = gather_time(figures, model, costs, link_rows(figures, rows, hosts, costs))
    return time, held // head_groups(figures, model)


def ring(figures: Figures, rows: np.ndarray, model: ModelShape, costs: Costs, hosts: Hosts) -> tuple[Directions, int]:
    """Rounds in which one peer's rows are attended to while the next peer's travel; partial results are merged.

    Buffers: rows of two rounds, and the gradients of one.
    """
    crosses, received = hosts.crosses(len(rows)), _rounds(rows)
    used = (received > 0).sum(0)
    query_tiles = -(-figures.tokens // TILE)
    # Half a key tile of each round is empty (predicted).
    tiles = figures.tiles + query_tiles * used // 2
    kernel = kernel_time(tiles, query_tiles * (1 + used), model.query_heads, model, costs, merged=used.any())
    alone = token_time(figures.tokens, model.attention_products, model, costs)
    output = figures.tokens * model.query_heads * model.head_dim * max(ACCUMULATION_BYTES, model.element_bytes)
    merge = output * MERGE_PASSES * costs.memory_mib // MIB + 2 * costs.launch
    keys = np.maximum(1, figures.tokens + figures.rows_in)
    earlier = np.concatenate([figures.tokens[None], received[:-1]])
    mib = np.where(crosses, hosts.mib, costs.send_mib)
    latency = np.where(crosses, hosts.latency, costs.send_latency)
    parts = []
    for token, work, nbytes in (
        (alone[0], kernel[0], model.kv_row_bytes),
        (alone[1], kernel[1], model.kv_row_bytes + model.kv_gradient_bytes),
    ):
        each = np.where(rows > 0, rows * nbytes * mib // MIB + latency, 0)
        travel = np.maximum(_rounds(each), _rounds(each.T, back=True))
        exposed = np.maximum(0, travel - earlier * (work // keys)).sum(0)
        parts.append(LayerTime(token + work + used * merge, exposed))
    held = int(received.max()) * (2 * model.kv_row_bytes + model.kv_gradient_bytes)
    return (parts[0], parts[1]), held


def ulysses(survey: Survey, figures: Figures, model: ModelShape, costs: Costs) -> tuple[Directions, int]:
    """All tokens for a share of the heads, between two all-to-alls that nothing hides; a kv head may stand on several
    ranks. Buffers: queries, keys, values and results of all tokens, with gradients."""
    world = len(figures.tokens)
    query, kv = model.query_heads // world, max(1, model.kv_heads // world)
    kernel = kernel_time(whole_tiles(survey, figures), len(survey.tiles_above) - 1, query, model, costs)
    alone = token_time(figures.tokens, model.attention_products, model, costs)
    packing, exposed = head_rows_time(figures.tokens, query, kv, world, model, costs)
    forward, backward = (LayerTime(token + packing + work, exposed) for token, work in zip(alone, kernel, strict=True))
    held = 2 * survey.forest.tokens * 2 * (query + kv) * model.head_dim * model.element_bytes
    return (forward, backward), held


def _rounds(rows: np.ndarray, back: bool = False) -> np.ndarray:
    """[P - 1, P]: what each rank has to do with the rank s before it, or s after it with ``back``, in round s - 1."""
    world = len(rows)
    rank, step = np.arange(world), np.arange(1, world)[:, None]
    return rows[rank, (rank + step if back else rank - step) % world]
