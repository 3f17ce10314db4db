"""Predicted time of a placed forest under each exchange, on hosts with links inside and between them.

The numbers are those by which `sharding/exchange_choice.py` chooses and `sharding/search.py` compares layouts.

Shapes: P ranks. Times are int64 nanoseconds, [P] inside a `LayerTime`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_engine.machines import Machine
from cp_engine.sharding.attention_plan import EXCHANGES
from cp_engine.sharding.cost import Costs, ModelShape
from cp_engine.sharding.exchange_choice import choose_exchange
from cp_engine.sharding.exchange_time import Directions, exchange_times, gather
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_layout import GdnLayout, place_layers
from cp_engine.sharding.hosts import shared_links
from cp_engine.sharding.layer_time import (
    LayerTime,
    affine_time,
    attention_parts,
    gather_time,
    recurrent_time,
    relay_time,
)
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.measure import (
    CHUNK,
    TILE,
    Figures,
    Survey,
    between_ranks,
    measure,
    window_pairs,
    window_tiles,
    windowed_rows,
)
from cp_engine.sharding.recurrent_figures import RecurrentFigures

EXCHANGE_CHOICES = ("auto", *EXCHANGES)
LAYOUT_CHOICES = ("balanced", "contiguous")


@dataclass(frozen=True, eq=False)
class Placement:
    """A forest in the order of subtrees that its layout wants, who owns it, and the counts of that."""

    forest: Forest
    survey: Survey
    layout: Layout
    method: str
    figures: Figures
    gdn: GdnLayout | None = None  # the layout of the recurrent layers, where it is another one
    gdn_reason: str = ""  # why it is, or is not

    @property
    def most_tokens(self) -> int:
        """Of any rank in any layer."""
        most = int(self.figures.tokens.max())
        return most if self.gdn is None else max(most, int(self.gdn.tokens.max()))

    @property
    def world(self) -> int:
        return self.layout.world


def place(
    forest: Forest, cp: int, layout: str, model: ModelShape, machine: Machine, gdn_layout: str = "auto"
) -> Placement:
    """Place a forest that has tokens; ``layout`` is one of `LAYOUT_CHOICES`, ``gdn_layout`` of `GDN_LAYOUTS`.

    Raises:
        ValueError: for ``own`` layouts of GDN layers in a model without any.
    """
    where = {"costs": machine.costs, "hosts": machine.links}
    placed = place_layers(forest, cp, model=model, **where, balanced=layout == "balanced", gdn_layout=gdn_layout)
    return Placement(
        placed.forest, placed.survey, placed.layout, placed.method, placed.figures, placed.own, placed.reason
    )


@dataclass(frozen=True, eq=False)
class ExchangeTime:
    """What all decoder layers take under one exchange of the softmax-attention layers."""

    exchange: str
    shape: ModelShape
    attention: Directions
    window: Directions | None  # of attention layers with a sliding window, where there are any
    gdn: Directions | None
    relay: Directions | None  # hidden states into the layout of one run of recurrent layers and back
    buffer_bytes: int  # of the exchange, most on any rank, one layer at a time

    def layers(self) -> list[tuple[int, LayerTime]]:
        """Each direction of each type of layer, with how many layers there are."""
        found = attention_parts(self.attention, self.window, self.shape)
        found += [(self.shape.gdn_layers, part) for part in self.gdn or ()]
        return found + [(self.shape.gdn_runs, part) for part in self.relay or ()]

    @property
    def step(self) -> int:
        """All layers, forward and backward; ranks wait for each other in every layer."""
        return sum(count * int(part.total.max()) for count, part in self.layers())

    @property
    def exposed(self) -> int:
        """The part of ``step`` in which the slowest rank of a layer waits for its exchange."""
        return sum(count * int(part.exposed[part.total.argmax()]) for count, part in self.layers())

    @property
    def mean_compute(self) -> int:
        return sum(count * int(part.compute.sum()) // len(part.compute) for count, part in self.layers())


class Predictor:
    """Predicts one placement; what does not depend on the machine is counted once."""

    def __init__(self, placement: Placement, model: ModelShape):
        self.placement, self.model = placement, model
        self.rows = between_ranks(placement.survey, placement.layout)
        choice = choose_exchange(placement.survey, placement.layout, model=model)
        self.refused = choice.refused  # head counts do not depend on the machine

    def times(self, machine: Machine) -> dict[str, ExchangeTime]:
        """Each exchange that can run; on one rank they are the same, since nothing moves."""
        gdn, relay = self._recurrent(shared_links(machine.costs, machine.links, self.placement.world))
        figures = self.placement.figures
        full, window = self._attention(machine, figures, self.rows), {}
        if figures.windowed is not None:
            window = self._attention(machine, figures.windowed, windowed_rows(self.rows, figures))
        return {
            name: ExchangeTime(name, self.model, time, window[name][0] if window else None, gdn, relay, held)
            for name, (time, held) in full.items()
        }

    def _attention(self, machine: Machine, figures: Figures, rows: np.ndarray) -> dict[str, tuple[Directions, int]]:
        """One softmax-attention layer by each exchange, and the bytes of its buffers."""
        costs, hosts = machine.costs, machine.links
        if self.placement.world == 1:
            return dict.fromkeys(EXCHANGES, gather(figures, rows, self.model, costs, hosts))
        return exchange_times(self.placement.survey, figures, rows, self.model, costs, hosts)

    def _recurrent(self, costs: Costs) -> tuple[Directions | None, Directions | None]:
        """One recurrent layer, and the moves around a run of them."""
        own = self.placement.gdn
        if not self.model.gdn_layers:
            return None, None
        if own is None:
            return affine_time(self.placement.figures, self.model, costs), None
        time = recurrent_time(own.tokens, own.recurrent, self.model, costs)
        return time, relay_time(own.moved, self.model, costs)


def one_gpu_time(forest: Forest, model: ModelShape, machine: Machine) -> int:
    """Nanoseconds of all layers for the whole forest on one GPU, were its memory large enough."""
    survey, layout = Survey(forest), contiguous_layout(forest, 1)
    return _step_alone(measure(survey, layout, window=model.window), model, machine)


def flat_time(length: np.ndarray, model: ModelShape, machine: Machine) -> int:
    """Nanoseconds of all layers for rollouts of these lengths, each computed as a row of its own on one GPU."""
    blocks = -(-length // TILE)
    one = [int(length.sum()), int((length * (length + 1) // 2).sum()), int((blocks * (blocks + 1) // 2).sum())]
    tokens, pairs, tiles, chunks, nothing = (
        np.array([value], np.int64) for value in (*one, int((-(-length // CHUNK)).sum()), 0)
    )
    figures = Figures(
        tokens=tokens,
        pieces=nothing,
        pairs=pairs,
        tiles=tiles,
        rows_in=nothing,
        rows_out=nothing,
        recurrent=RecurrentFigures(chunks),
    )
    if model.window is not None:
        seen = window_pairs(length, model.window).sum(keepdims=True)
        tiles = window_tiles(tiles, tokens, pairs, seen)
        figures = replace(figures, windowed=replace(figures, pairs=seen, tiles=tiles))
    return _step_alone(figures, model, machine)


def _step_alone(figures: Figures, model: ModelShape, machine: Machine) -> int:
    gdn = affine_time(figures, model, machine.costs) if model.gdn_layers else None
    full, window = (
        None if found is None else gather_time(found, model, machine.costs) for found in (figures, figures.windowed)
    )
    return ExchangeTime("gather", model, full, window, gdn, None, 0).step
