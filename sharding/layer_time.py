"""Predicted time of a layout: the simulated forward and backward of a model's layers on every rank.

All arithmetic is in integers (nanoseconds), so that every host predicts the same number.

Shapes: P ranks. Times are int64 [P] nanoseconds of one layer unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.cost import ACCUMULATION_BYTES, H200, MIB, Costs, ModelShape
from cp_engine.sharding.hosts import ONE_HOST, Hosts, LinkRows, link_rows, shared_links
from cp_engine.sharding.measure import TILE, Figures, RecurrentFigures, windowed_rows
from cp_engine.sharding.state_time import chunk_time, crossing_time, head_scale

RELAY_LAUNCHES = 5  # kernels that pack and place the rows of one border
MOST_GROUPS = 4  # head groups of `gather`


@dataclass(frozen=True)
class SplitPrices:
    """What a split is judged by: integer nanoseconds of one softmax-attention layer, forward and backward."""

    tile: int  # a thousand attention tiles more on the slower side
    chunk: int  # a thousand recurrent chunks more on the slower side
    row: int  # a thousand remote rows
    piece: int  # a piece more on the side with more of them


@dataclass(frozen=True, eq=False)
class LayerTime:
    """One direction (forward or backward) of one layer on each rank: int64 [P]."""

    compute: np.ndarray
    exposed: np.ndarray  # of the exchange, what no compute hides

    @property
    def total(self) -> np.ndarray:
        return self.compute + self.exposed


@dataclass(frozen=True, eq=False)
class StepTime:
    """Predicted time of all decoder layers. Ranks wait for each other in every layer, so the slowest one counts."""

    attention: tuple[LayerTime, LayerTime]  # forward, backward
    gdn: tuple[LayerTime, LayerTime] | None
    step: int  # nanoseconds of all layers, forward and backward
    window: tuple[LayerTime, LayerTime] | None = None  # of attention layers with a sliding window, where there are any

    @property
    def exposed_share(self) -> float:
        """Exposed exchange of the slowest rank over its time in one attention layer, forward and backward."""
        total = sum(part.total for part in self.attention)
        slowest = int(total.argmax())
        return float(sum(part.exposed[slowest] for part in self.attention) / max(1, total[slowest]))


def best_head_groups(
    rows: int, pairs: int, *, query_heads: int, kv_heads: int, head_dim: int, element_bytes: int
) -> int:
    """In how many groups `gather` works off the kv heads: the rule of the exchange itself, and of every prediction.

    All fetching but a group's is hidden, against what each further group costs. The prices are always those of `H200`,
    since all ranks must come to one number.

    Args:
        rows: most rows that a rank receives or sends.
        pairs: most visible pairs of a rank.
    """
    row = 2 * kv_heads * head_dim
    # Keys and values come twice, their gradients go home once.
    moved = rows * row * (2 * element_bytes + max(element_bytes, ACCUMULATION_BYTES))
    exposed = moved * H200.exposed_mib // MIB
    tile = _by_head_size(H200.tile_forward, head_dim) + _by_head_size(H200.tile_backward, head_dim)
    further = H200.group + pairs // TILE**2 * tile * query_heads // 1000 * H200.group_per_mille // 1000
    times = {
        groups: exposed // groups + (groups - 1) * further
        for groups in range(1, MOST_GROUPS + 1)
        if kv_heads % groups == 0
    }
    return min(times, key=lambda groups: times[groups])


def head_groups(figures: Figures, shape: ModelShape) -> int:
    """Head groups of `gather` under a layout."""
    return _head_groups(figures.busiest_rows, int(figures.pairs.max()), shape)


def _head_groups(rows: int, pairs: int, shape: ModelShape) -> int:
    return best_head_groups(
        rows,
        pairs,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        element_bytes=shape.element_bytes,
    )


def attention_parts(
    full: tuple[LayerTime, LayerTime], window: tuple[LayerTime, LayerTime] | None, shape: ModelShape
) -> list[tuple[int, LayerTime]]:
    """Each direction of attention layers without and with a sliding window, with how many layers there are."""
    windowed = 0 if window is None else shape.window_layers
    return [(shape.attention_layers - windowed, part) for part in full] + [(windowed, part) for part in window or ()]


def step_time(
    figures: Figures, shape: ModelShape, costs: Costs = H200, hosts: Hosts = ONE_HOST, rows: np.ndarray | None = None
) -> StepTime:
    """Simulate one step of a layout under the exchanges ``gather`` and ``affine``.

    Args:
        rows: int64 [P, P] of a layer without a window, as `measure.traffic` counts them, 0 on the diagonal; not needed
            on one host.
    """
    world = len(figures.tokens)
    assert rows is not None or not hosts.several(world), "several hosts without the rows between ranks"
    link = None if rows is None else link_rows(figures, rows, hosts, costs)
    attention, window = gather_time(figures, shape, costs, link), None
    if figures.windowed is not None:
        link = None if rows is None else link_rows(figures.windowed, windowed_rows(rows, figures), hosts, costs)
        window = gather_time(figures.windowed, shape, costs, link)
    gdn = affine_time(figures, shape, shared_links(costs, hosts, world)) if shape.gdn_layers else None
    step = sum(count * int(part.total.max()) for count, part in attention_parts(attention, window, shape))
    if gdn is not None:
        step += sum(int(part.total.max()) for part in gdn) * shape.gdn_layers
    return StepTime(attention, gdn, step, window)


def token_time(tokens: np.ndarray, products: int, shape: ModelShape, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of what each token costs alone: projections, MLP, norms."""
    product = tokens * (2 * products * costs.tera_product // 10**9) // 1000
    row = tokens * shape.hidden * shape.element_bytes * costs.memory_mib // MIB
    return product + row * costs.passes_forward, 2 * product + row * costs.passes_backward


def kernel_time(tiles, query_tiles, heads: int, shape: ModelShape, costs: Costs, merged: bool = False):
    """Forward and backward of an attention kernel over so many touched tiles, for ``heads`` query heads; ``merged`` if
    the results of several calls make up a row's."""
    forward = tiles * _by_head_size(costs.tile_forward, shape.head_dim) + query_tiles * costs.query_tile_forward
    backward = tiles * _by_head_size(costs.tile_backward, shape.head_dim) + query_tiles * costs.query_tile_backward
    if merged:
        forward = forward * _by_head_size(costs.partial_forward_percent, shape.head_dim) // 100
        backward = backward * _by_head_size(costs.partial_backward_percent, shape.head_dim) // 100
    return forward * heads // 1000 + costs.launch, backward * heads // 1000 + costs.launch


def _by_head_size(table: tuple[tuple[int, int], ...], head_dim: int) -> int:
    """The cost at the smallest tabled head size that holds ``head_dim``, larger ones in proportion to the last."""
    for size, cost in table:
        if head_dim <= size:
            return cost
    size, cost = table[-1]
    return cost * head_dim // size


def gather_time(
    figures: Figures, shape: ModelShape, costs: Costs, link: LinkRows | None = None
) -> tuple[LayerTime, LayerTime]:
    """A softmax-attention layer whose head groups are fetched while the group before computes.

    Backward fetches the rows again and returns their gradients. The first fetch and the last return are exposed.

    Args:
        link: what the rows take where links differ; None: those of ``figures``, all inside one host.
    """
    groups = head_groups(figures, shape)
    link = LinkRows(figures.rows_in, figures.rows_out, costs.pull_latency) if link is None else link
    query_tiles = -(-figures.tokens // TILE)
    kernel = kernel_time(figures.tiles, query_tiles, shape.query_heads, shape, costs)
    tokens = token_time(figures.tokens, shape.attention_products, shape, costs)
    rows = np.maximum(link.rows_in, link.rows_out)
    fetch, home = (
        np.where(rows > 0, rows * nbytes // groups * costs.pull_mib // MIB + link.latency, 0)
        for nbytes in (shape.kv_row_bytes, shape.kv_gradient_bytes)
    )
    parts = []
    for work, alone, each, last in (
        (kernel[0], tokens[0], fetch, 0),
        (kernel[1], tokens[1], fetch + home, home),
    ):
        first = fetch
        hidden_at_most = work // groups
        exposed = first + last + (groups - 1) * np.maximum(0, each - hidden_at_most)
        exposed += groups * each * costs.pull_slowdown_percent // 100
        # That kernels over few heads are slower (`group_per_mille`) is within the error of their own fit.
        split = (groups - 1) * costs.group // 2
        parts.append(LayerTime(alone + work + split, exposed))
    return parts[0], parts[1]


def affine_time(figures: Figures, shape: ModelShape, costs: Costs) -> tuple[LayerTime, LayerTime]:
    """`recurrent_time` of a measured layout."""
    assert figures.recurrent is not None, "figures without the counts of recurrent layers"
    return recurrent_time(figures.tokens, figures.recurrent, shape, costs)


def recurrent_time(
    tokens: np.ndarray, counts: RecurrentFigures, shape: ModelShape, costs: Costs
) -> tuple[LayerTime, LayerTime]:
    """A recurrent layer under the exchange ``affine``, whichever way its states cross ranks."""
    alone = recurrent_token_time(tokens, shape, costs)
    parts = []
    for token, chunk, crossing in zip(
        alone,
        (costs.chunk_forward, costs.chunk_backward),
        crossing_time(tokens, counts, shape, costs),
        strict=True,
    ):
        compute = token + chunk_time(counts.chunks, chunk, shape) + crossing.again
        parts.append(LayerTime(compute, crossing.exposed))
    return parts[0], parts[1]


def recurrent_token_time(tokens: np.ndarray, shape: ModelShape, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of what each token costs alone in a recurrent layer: `token_time` and the mixer's own."""
    forward, backward = token_time(tokens, shape.gdn_products, shape, costs)
    row = tokens * shape.gdn_channels * shape.element_bytes * costs.memory_mib // MIB
    return forward + row * costs.mixer_passes_forward, backward + row * costs.mixer_passes_backward


def head_rows_time(tokens, query_heads: int, kv_heads: int, world: int, shape: ModelShape, costs: Costs):
    """One direction of dealing heads out to ``world`` ranks, of which each gets so many: what a rank computes, and the
    all-to-alls, which nothing hides. Queries and results, keys and values of the heads of others move."""
    row = 2 * (query_heads + kv_heads) * (world - 1) * shape.head_dim * shape.element_bytes
    exposed = tokens * row * costs.all_to_all_mib // MIB + 2 * costs.all_to_all_latency
    return tokens * row * costs.head_rows_mib // MIB, exposed


def relay_time(moved: np.ndarray, shape: ModelShape, costs: Costs) -> tuple[LayerTime, LayerTime]:
    """Moving the hidden states of all tokens into another layout before a run of recurrent layers, and back after it.

    Backward moves as many gradients the other way, in the same dtype. Nothing hides an exchange: the next layer needs
    its rows. On top of it rows are read and written once where they are packed and once where they are placed.

    Args:
        moved: int64 [P, P] as `measure.rows_moved` counts them.
    """
    there, back = moved.sum(1), moved.sum(0)
    stays = moved.diagonal()
    largest = np.maximum(there, back) - stays
    passes = 2 * (there + back)  # of both borders: what leaves is packed and what arrives is placed
    memory = passes * shape.hidden_row_bytes * 2 * costs.memory_mib // MIB + 2 * RELAY_LAUNCHES * costs.launch
    wire = largest * shape.hidden_row_bytes * costs.all_to_all_mib // MIB + costs.all_to_all_latency
    both = LayerTime(memory, 2 * wire)
    return both, both


def rank_time(time: StepTime, shape: ModelShape) -> np.ndarray:
    """int64 [P]: each rank's own time of all layers, were it never to wait for the others."""
    total = sum(count * part.total for count, part in attention_parts(time.attention, time.window, shape))
    if time.gdn is not None:
        total = total + sum(part.total for part in time.gdn) * shape.gdn_layers
    return total


def split_prices(pairs: int, tokens: int, shape: ModelShape, costs: Costs = H200) -> SplitPrices:
    """What two sides of a split are judged by before a whole layout is measured, per softmax-attention layer."""
    tile = _by_head_size(costs.tile_forward, shape.head_dim) + _by_head_size(costs.tile_backward, shape.head_dim)
    tile = tile * shape.query_heads  # 1,000 tiles
    groups = _head_groups(tokens, pairs, shape)  # as if a rank held and saw everything
    fetch = shape.kv_row_bytes * 1000 * costs.pull_mib // MIB
    home = shape.kv_gradient_bytes * 1000 * costs.pull_mib // MIB
    row = (2 * fetch + home) // groups + (2 * fetch + home) * costs.pull_slowdown_percent // 100
    # A cut leaves half a query tile empty, and a fragment whose state crosses ranks.
    piece = tile * pairs // max(1, tokens) // (2 * TILE * 1000)
    states = 3 * shape.state_bytes * costs.state_mib // MIB
    piece += states * shape.gdn_layers // max(1, 2 * shape.attention_layers)
    chunk = (costs.chunk_forward + costs.chunk_backward) * head_scale(shape) * shape.gdn_layers
    return SplitPrices(tile=tile, chunk=chunk // max(1, shape.attention_layers), row=row, piece=piece)
