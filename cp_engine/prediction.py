"""Predicted time of a placed forest under each exchange, on hosts with links inside and between them.

On one host the numbers are those by which `sharding/exchange_choice.py` chooses. Between hosts a row costs more: it is
counted as that many more rows of the link inside a host.

Shapes: P ranks. Times are int64 nanoseconds, [P] inside a `LayerTime`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_engine.machines import Machine
from cp_engine.sharding.attention_plan import EXCHANGES
from cp_engine.sharding.cost import ACCUMULATION_BYTES, MIB, Costs, ModelShape
from cp_engine.sharding.exchange_choice import MERGE_PASSES, choose_exchange
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_layout import GdnLayout, place_layers
from cp_engine.sharding.layer_time import (
    LayerTime,
    affine_time,
    attention_parts,
    gather_time,
    head_groups,
    head_rows_time,
    kernel_time,
    recurrent_time,
    relay_time,
    token_time,
)
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.measure import (
    CHUNK,
    TILE,
    Figures,
    Survey,
    measure,
    traffic,
    whole_tiles,
    window_pairs,
    window_tiles,
    windowed_rows,
)
from cp_engine.sharding.recurrent_figures import RecurrentFigures

EXCHANGE_CHOICES = ("auto", *EXCHANGES)
LAYOUT_CHOICES = ("balanced", "contiguous")

Directions = tuple[LayerTime, LayerTime]  # forward, backward


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
    costs = _shared_link(machine, cp).costs
    balanced = layout == "balanced"
    placed = place_layers(forest, cp, model=model, costs=costs, balanced=balanced, gdn_layout=gdn_layout)
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
        self.rows = traffic(placement.survey, placement.layout)
        np.fill_diagonal(self.rows, 0)
        choice = choose_exchange(placement.survey, placement.layout, model=model)
        self.refused = choice.refused  # head counts do not depend on the machine

    def times(self, machine: Machine) -> dict[str, ExchangeTime]:
        """Each exchange that can run; on one rank they are the same, since nothing moves."""
        gdn, relay = self._recurrent(_shared_link(machine, self.placement.world).costs)
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
        world = self.placement.world
        if world == 1:
            return dict.fromkeys(EXCHANGES, self._gather(machine, figures, rows))
        found = {"gather": self._gather(machine, figures, rows), "ring": self._ring(machine, figures, rows)}
        if "ulysses" not in self.refused:
            found["ulysses"] = self._ulysses(_shared_link(machine, world), figures)
        return found

    def _recurrent(self, costs: Costs) -> tuple[Directions | None, Directions | None]:
        """One recurrent layer, and the moves around a run of them."""
        own = self.placement.gdn
        if not self.model.gdn_layers:
            return None, None
        if own is None:
            return affine_time(self.placement.figures, self.model, costs), None
        time = recurrent_time(own.tokens, own.recurrent, self.model, costs)
        return time, relay_time(own.moved, self.model, costs)

    def _gather(self, machine: Machine, figures: Figures, rows: np.ndarray) -> tuple[Directions, int]:
        model, costs = self.model, machine.costs
        held = int((figures.tokens + figures.rows_in).max())
        groups = head_groups(figures, model)
        held = held * (2 * model.kv_row_bytes + model.kv_gradient_bytes) // groups
        far = np.where(_crosses(machine, self.placement.world), rows, 0)
        if far.any():
            near = rows - far
            near_mib = max(1, costs.pull_mib)  # links that cost nothing have a price of 0
            rows_in = np.maximum(near.sum(1), far.sum(1) * machine.between_mib // near_mib)
            rows_out = np.maximum(near.sum(0), far.sum(0) * machine.between_mib // near_mib)
            peers = int(max((far > 0).sum(0).max(), (far > 0).sum(1).max()))
            latency = max(costs.pull_latency, machine.between_latency + machine.peer_latency * peers)
            figures, costs = replace(figures, rows_in=rows_in, rows_out=rows_out), replace(costs, pull_latency=latency)
        return gather_time(figures, model, costs, groups), held

    def _ring(self, machine: Machine, figures: Figures, rows: np.ndarray) -> tuple[Directions, int]:
        """Rounds in which one peer's rows are attended to while the next peer's travel; partial results are merged."""
        model, costs, world = self.model, machine.costs, len(rows)
        crosses = _crosses(machine, world)
        received = _rounds(rows)
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
        mib = np.where(crosses, machine.between_mib, costs.send_mib)
        latency = np.where(crosses, machine.between_latency, costs.send_latency)
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

    def _ulysses(self, machine: Machine, figures: Figures) -> tuple[Directions, int]:
        """All tokens for a share of the heads, between two all-to-alls that nothing hides."""
        model, costs, world = self.model, machine.costs, self.placement.world
        query, kv = model.query_heads // world, max(1, model.kv_heads // world)
        survey = self.placement.survey
        kernel = kernel_time(whole_tiles(survey, figures), len(survey.tiles_above) - 1, query, model, costs)
        alone = token_time(figures.tokens, model.attention_products, model, costs)
        packing, exposed = head_rows_time(figures.tokens, query, kv, world, model, costs)
        forward, backward = (
            LayerTime(token + packing + work, exposed) for token, work in zip(alone, kernel, strict=True)
        )
        held = 2 * self.placement.layout.tokens * 2 * (query + kv) * model.head_dim * model.element_bytes
        return (forward, backward), held


def _crosses(machine: Machine, world: int) -> np.ndarray:
    """bool [P, P]: whether two ranks stand on different hosts."""
    host = np.arange(world) // machine.gpus_per_node
    return host[:, None] != host


def _shared_link(machine: Machine, world: int) -> Machine:
    """The machine with the all-to-all of so many ranks, each of which sends every other one the same."""
    far = world - machine.gpus_per_node
    if far <= 0:
        return machine
    costs, mib, latency = machine.costs, machine.between_mib * far // world, machine.between_latency
    latency += machine.peer_latency * far
    costs = replace(
        costs,
        all_to_all_mib=max(costs.all_to_all_mib, mib),
        all_to_all_latency=max(costs.all_to_all_latency, latency),
        state_mib=max(costs.state_mib, mib),
        state_latency=costs.state_latency + 2 * latency,
        history_latency=costs.history_latency + latency,
        round_latency=costs.round_latency + latency,
    )
    return replace(machine, costs=costs)


def _rounds(rows: np.ndarray, back: bool = False) -> np.ndarray:
    """[P - 1, P]: what each rank has to do with the rank s before it, or s after it with ``back``, in round s - 1."""
    world = len(rows)
    rank, step = np.arange(world), np.arange(1, world)[:, None]
    return rows[rank, (rank + step if back else rank - step) % world]


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
