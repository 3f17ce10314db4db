"""Which exchange softmax attention should use for a layout, by predicted time among those that can run.

`ulysses_gather` is not among them: nothing predicts its time yet.

Shapes: P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_engine.sharding.cost import H200, MIB, Costs, ModelShape
from cp_engine.sharding.exchange_time import exchange_times, head_problem
from cp_engine.sharding.hosts import ONE_HOST, Hosts
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.measure import Survey, between_ranks, measure, windowed_rows


@dataclass(frozen=True)
class ExchangeChoice:
    """The exchange to use, and why."""

    exchange: str  # gather, ring or ulysses
    reason: str
    predicted: dict[str, int]  # nanoseconds of one layer, forward and backward, the mean of layers with and without
    # windows, of each exchange that can run
    refused: dict[str, str]  # why an exchange cannot run


def choose_exchange(
    survey: Survey,
    layout: Layout,
    *,
    model: ModelShape,
    costs: Costs = H200,
    hosts: Hosts = ONE_HOST,
    memory_bytes: int | None = None,
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
    rows = between_ranks(survey, layout)
    refused = {}
    unequal = head_problem(model, layout.world)
    if unequal:
        refused["ulysses"] = unequal
    found = exchange_times(survey, figures, rows, model, costs, hosts)
    times = {name: sum(int(part.total.max()) for part in parts) for name, (parts, _) in found.items()}
    memory = {name: held for name, (_, held) in found.items()}
    if figures.windowed is not None:
        rows = windowed_rows(rows, figures)
        windowed = exchange_times(survey, figures.windowed, rows, model, costs, hosts)
        full, layers = model.attention_layers - model.window_layers, model.attention_layers
        for name, (parts, _) in windowed.items():
            seen = sum(int(part.total.max()) for part in parts)
            times[name] = (full * times[name] + model.window_layers * seen) // layers
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


def _reason(best: str, predicted: dict[str, int], refused: dict[str, str]) -> str:
    others = [f"{name} {time / 1e6:.3f} ms" for name, time in predicted.items() if name != best]
    others += [f"{name} cannot run: {why}" for name, why in refused.items()]
    return f"{best} is predicted at {predicted[best] / 1e6:.3f} ms a layer; " + "; ".join(others)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"
