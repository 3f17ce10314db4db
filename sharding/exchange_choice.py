"""Which exchange softmax attention should use for a layout, by predicted time among those that can run.

`ulysses_gather` is not among them: nothing predicts its time yet.

Shapes: P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.cost import ACCUMULATION_BYTES, H200, MIB, Costs, ModelShape
from cp_engine.sharding.layer_time import gather_time, head_groups, head_rows_time, kernel_time, token_time
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.measure import TILE, Figures, Survey, measure, traffic, whole_tiles, windowed_rows

# Passes of a ring round over the output in accumulation dtype: the partial one and the sum so far are read, the sum
# is written.
MERGE_PASSES = 3


@dataclass(frozen=True)
class ExchangeChoice:
    """The exchange to use, and why."""

    exchange: str  # gather, ring or ulysses
    reason: str
    predicted: dict[str, int]  # nanoseconds of one layer, forward and backward, the mean of layers with and without
    # windows, of each exchange that can run
    refused: dict[str, str]  # why an exchange cannot run


def choose_exchange(
    survey: Survey, layout: Layout, *, model: ModelShape, costs: Costs = H200, memory_bytes: int | None = None
) -> ExchangeChoice:
    """Choose how keys and values move.

    Args:
        memory_bytes: most bytes of exchange buffers that a rank may hold in one layer; None for no limit.

    Raises:
        ValueError: if no exchange fits into ``memory_bytes``.
    """
    if layout.world == 1:
        return ExchangeChoice("gather", "one rank: nothing moves", {}, {})
    figures = measure(survey, layout, recurrent=False, window=model.window)
    rows = traffic(survey, layout)
    np.fill_diagonal(rows, 0)
    memory = {"gather": _gather_bytes(figures, model), "ring": _ring_bytes(rows, model)}
    refused = {}
    unequal = _head_problem(model, layout.world)
    if unequal:
        refused["ulysses"] = unequal
    else:
        memory["ulysses"] = _ulysses_bytes(layout, model)
    times = _times(survey, figures, rows, model, costs)
    if figures.windowed is not None:
        windowed = _times(survey, figures.windowed, windowed_rows(rows, figures), model, costs)
        full, layers = model.attention_layers - model.window_layers, model.attention_layers
        times = {name: (full * times[name] + model.window_layers * windowed[name]) // layers for name in times}
    if memory_bytes is not None:
        for name, need in memory.items():
            if need > memory_bytes:
                refused[name] = f"needs {_mib(need)} of buffers, over the budget of {_mib(memory_bytes)}"
    predicted = {name: time for name, time in times.items() if name not in refused}
    if not predicted:
        raise ValueError(
            f"no exchange fits into {_mib(memory_bytes)} of buffers a layer: "
            + "; ".join(f"{name} {why}" for name, why in refused.items())
            + ". Raise the memory budget, use more context-parallel ranks or smaller packs"
        )
    best = min(predicted, key=lambda name: predicted[name])  # gather before ring before ulysses where equal
    return ExchangeChoice(best, _reason(best, predicted, refused), predicted, refused)


def _times(survey: Survey, figures: Figures, rows: np.ndarray, model: ModelShape, costs: Costs) -> dict[str, int]:
    """Nanoseconds of one layer by each exchange that its heads allow."""
    world = len(rows)
    times = {"gather": _gather(figures, model, costs), "ring": _ring(figures, rows, model, costs)}
    if _head_problem(model, world) is None:
        times["ulysses"] = _ulysses(survey, figures, world, model, costs)
    return times


def _reason(best: str, predicted: dict[str, int], refused: dict[str, str]) -> str:
    others = [f"{name} {time / 1e6:.3f} ms" for name, time in predicted.items() if name != best]
    others += [f"{name} cannot run: {why}" for name, why in refused.items()]
    return f"{best} is predicted at {predicted[best] / 1e6:.3f} ms a layer; " + "; ".join(others)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"


def _head_problem(model: ModelShape, world: int) -> str | None:
    """Why heads cannot be dealt to the ranks; the rule of the `ulysses` exchange."""
    if model.query_heads % world:
        return f"{model.query_heads} query heads are not divisible by {world} ranks"
    if model.kv_heads % world and world % model.kv_heads:
        return f"{model.kv_heads} kv heads neither divide {world} ranks nor are divisible by them"
    return None


def _gather(figures: Figures, model: ModelShape, costs: Costs) -> int:
    return sum(int(part.total.max()) for part in gather_time(figures, model, costs))


def _gather_bytes(figures: Figures, model: ModelShape) -> int:
    """Two head groups of all visible rows, and one group of their gradients in backward."""
    rows = int((figures.tokens + figures.rows_in).max())
    return rows * (2 * model.kv_row_bytes + model.kv_gradient_bytes) // head_groups(figures, model)


def _rounds(rows: np.ndarray) -> np.ndarray:
    """int64 [P - 1, P]: rows that each rank receives in each round; round s - 1 reads the rank s before."""
    world = len(rows)
    reader = np.arange(world)
    return np.stack([rows[reader, (reader - step) % world] for step in range(1, world)])


def _ring(figures: Figures, rows: np.ndarray, model: ModelShape, costs: Costs) -> int:
    """Rounds in which one peer's rows are attended to while the next peer's travel; partial results are merged."""
    world = len(rows)
    received = _rounds(rows)
    reader = np.arange(world)
    sent = np.stack([rows[(reader + step) % world, reader] for step in range(1, world)])
    used = received > 0
    query_tiles = -(-figures.tokens // TILE)
    # Half a key tile of each round is empty (predicted).
    tiles = figures.tiles + query_tiles * used.sum(0) // 2
    query_tiles = query_tiles * (1 + used.sum(0))
    kernel = kernel_time(tiles, query_tiles, model.query_heads, model, costs, merged=used.any())
    tokens = token_time(figures.tokens, model.attention_products, model, costs)
    output = figures.tokens * model.query_heads * model.head_dim * max(ACCUMULATION_BYTES, model.element_bytes)
    merge = output * MERGE_PASSES * costs.memory_mib // MIB + costs.launch
    keys = np.maximum(1, figures.tokens + figures.rows_in)
    total = 0
    for alone, work, nbytes in (
        (tokens[0], kernel[0], model.kv_row_bytes),
        (tokens[1], kernel[1], model.kv_row_bytes + model.kv_gradient_bytes),
    ):
        largest = np.maximum(received, sent)
        travel = np.where(largest > 0, largest * nbytes * costs.send_mib // MIB + costs.send_latency, 0)
        during = np.concatenate([[figures.tokens], received[:-1]]) * (work // keys)
        exposed = np.maximum(0, travel - during).sum(0)
        total += int((alone + work + exposed + used.sum(0) * (merge + costs.launch)).max())
    return total


def _ring_bytes(rows: np.ndarray, model: ModelShape) -> int:
    """Rows of two rounds, and the gradients of one."""
    return int(_rounds(rows).max()) * (2 * model.kv_row_bytes + model.kv_gradient_bytes)


def _shard_heads(model: ModelShape, world: int) -> tuple[int, int]:
    """Query and kv heads of one rank; a kv head may stand on several ranks."""
    return model.query_heads // world, max(1, model.kv_heads // world)


def _ulysses(survey: Survey, figures: Figures, world: int, model: ModelShape, costs: Costs) -> int:
    """All tokens for a share of the heads, between two all-to-alls that nothing hides."""
    query, kv = _shard_heads(model, world)
    tiles = whole_tiles(survey, figures)
    kernel = kernel_time(tiles, len(survey.tiles_above) - 1, query, model, costs)
    tokens = token_time(figures.tokens, model.attention_products, model, costs)
    packing, exposed = head_rows_time(figures.tokens, query, kv, world, model, costs)
    return sum(int((alone + packing + exposed).max()) + int(work) for alone, work in zip(tokens, kernel, strict=True))


def _ulysses_bytes(layout: Layout, model: ModelShape) -> int:
    """Queries, keys, values and results of all tokens, with gradients."""
    query, kv = _shard_heads(model, layout.world)
    return 2 * layout.tokens * 2 * (query + kv) * model.head_dim * model.element_bytes
