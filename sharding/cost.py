"""Predicted time of a layout: constants, the shape of a model, and the simulated forward and backward of its layers.

All arithmetic is in integers (nanoseconds), so that every host predicts the same number.

Shapes: P ranks. Times are int64 [P] nanoseconds of one layer unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.measure import CHUNK, TILE, Figures, RecurrentFigures

MIB = 1 << 20
RELAY_LAUNCHES = 5  # kernels that pack and place the rows of one border
ACCUMULATION_BYTES = 4  # states and returned gradients travel in float32
MOST_GROUPS = 4  # head groups of `gather`


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one thing costs, in integer nanoseconds of the unit in the field's comment.

    "anchors" are the recorded measurements of one or two H200s in bf16; "predicted" means that nobody measured it yet.
    """

    # One query head x 1,000 touched 128 x 128 tiles, by head size. D 128 and 256: fitted on the H200 times of `auto` in
    # benchmarks/results.jsonl (measured 2026-11-30, commit a9e328f; seven trees of D 128, one of D 256): each of the
    # sixteen within 7 %, forward and backward together within 5 %. Backward at D 256 has been faster since: 59.5 ms on
    # that tree with 5 GiB of stored scores (measured 2026-11-30), 1 % more with 3 (predicted). D 64: dense rates
    # (anchors). Others by FLOPs.
    tile_forward: tuple[tuple[int, int], ...] = ((64, 8_470), (128, 12_680), (256, 23_660))
    tile_backward: tuple[tuple[int, int], ...] = ((64, 20_480), (128, 35_780), (256, 86_000))
    # One query head x 1,000 query tiles, whatever they see; the second coefficient of the same fit.
    query_tile_forward: int = 30_800
    query_tile_backward: int = 122_500
    # One recurrent value head (K = V = 128) x 1,000 chunks of 64 tokens: between the H200 times of one chain (141 and
    # 315 us) and of trees (117 to 119 and 305 to 306; measured 2026-11-30, commit 003e032). Both together within 5 %.
    chunk_forward: int = 126_000
    chunk_backward: int = 310_000
    # Extra share, in percent, on tokens between an entry and an exit (predicted from operation counts).
    through_forward_percent: int = 75
    through_backward_percent: int = 24
    # 10**12 operations of dense products: 8192 x 8192 x 8192 in bf16 at 781 TFLOP/s (anchors). Backward is twice that.
    tera_product: int = 1_280_000
    # One MiB read or written by element-wise code: device copy at 4.28 TB/s (anchors).
    memory_mib: int = 245
    # Passes over a [tokens, hidden] activation by norms, rotary, residuals and activations of a layer (predicted).
    passes_forward: int = 24
    passes_backward: int = 48
    # Rows pulled by copy engines on one host: 16, 64 and 256 MiB at 298, 353 and 366 GB/s (anchors, links).
    pull_mib: int = 2_830
    pull_latency: int = 10_000
    # NCCL all-to-all between two GPUs, per MiB sent: 16 and 256 MiB in 54 and 471 us (anchors, links).
    all_to_all_mib: int = 3_475
    all_to_all_latency: int = 22_000
    # NCCL send/recv: 16 and 256 MiB in 85 and 881 us (anchors, links).
    send_mib: int = 3_320
    send_latency: int = 32_000
    # How much longer attention takes while rows are pulled, in percent of the pull: +2.6 to +5.3 % (anchors).
    pull_slowdown_percent: int = 5
    # One more head group of `gather`: launches, forward and backward (predicted), and what it adds, in per mille of the
    # kernels' time. Measured 2026-11-30 (commit 003e032, `art_5k16x100`, spread over two H200s, 12.2 ms of kernels): a
    # layer took 14.8, 16.2 and 16.8 ms in one, two and four groups.
    group: int = 5_000
    group_per_mille: int = 30
    # One kernel launch (predicted).
    launch: int = 5_000


H200 = Costs()


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that a layer's time depends on. A model without recurrent layers has ``gdn_layers`` and ``gdn_runs`` 0."""

    hidden: int
    mlp_width: int  # summed widths of the gated MLPs that a token goes through: all active experts of an MoE
    attention_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    window_layers: int = 0  # attention layers with a sliding window
    window: int | None = None  # tokens that a row of these sees, itself included
    gdn_layers: int = 0
    gdn_runs: int = 0  # runs of consecutive recurrent layers
    gdn_key_heads: int = 0
    gdn_value_heads: int = 0
    gdn_head_dim: int = 128
    element_bytes: int = 2

    @property
    def hidden_row_bytes(self) -> int:
        """Hidden state of one token."""
        return self.hidden * self.element_bytes

    @property
    def kv_row_bytes(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def kv_gradient_bytes(self) -> int:
        """Gradient of one key and value row on its way home."""
        return 2 * self.kv_heads * self.head_dim * max(self.element_bytes, ACCUMULATION_BYTES)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of all value heads, or the affine part of a summary."""
        return self.gdn_value_heads * self.gdn_head_dim**2 * ACCUMULATION_BYTES

    @property
    def attention_products(self) -> int:
        """Multiply-adds of one token's projections and MLP in a softmax-attention layer."""
        heads = 2 * self.query_heads + 2 * self.kv_heads
        return self.hidden * (heads * self.head_dim + 3 * self.mlp_width)

    @property
    def gdn_products(self) -> int:
        """Multiply-adds of one token's projections and MLP in a recurrent layer."""
        heads = 2 * self.gdn_key_heads + 3 * self.gdn_value_heads  # q, k; v, output gate, output
        return self.hidden * (heads * self.gdn_head_dim + 3 * self.mlp_width)


# Shapes of released models, for predictions without a configuration file.
PRESETS = {
    "qwen3-8b": ModelShape(hidden=4096, mlp_width=12288, attention_layers=36, query_heads=32, kv_heads=8, head_dim=128),
    "llama-3.1-8b": ModelShape(
        hidden=4096, mlp_width=14336, attention_layers=32, query_heads=32, kv_heads=8, head_dim=128
    ),
    "qwen3-30b-a3b": ModelShape(
        hidden=2048, mlp_width=8 * 768, attention_layers=48, query_heads=32, kv_heads=4, head_dim=128
    ),
    "qwen3.5-35b-a3b": ModelShape(
        hidden=2048,
        mlp_width=9 * 512,
        attention_layers=10,
        query_heads=16,
        kv_heads=2,
        head_dim=256,
        gdn_layers=30,
        gdn_runs=10,
        gdn_key_heads=16,
        gdn_value_heads=32,
    ),
    "qwen3-next-80b-a3b": ModelShape(
        hidden=2048,
        mlp_width=11 * 512,
        attention_layers=12,
        query_heads=16,
        kv_heads=2,
        head_dim=256,
        gdn_layers=36,
        gdn_runs=12,
        gdn_key_heads=16,
        gdn_value_heads=32,
    ),
}


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
    rows: int, tokens: int, pairs: int, *, query_heads: int, kv_heads: int, head_dim: int, element_bytes: int
) -> int:
    """In how many groups `gather` works off the kv heads: the rule of the exchange itself, and of every prediction.

    All fetching but a group's is hidden, against what each further group costs and joining the groups' results. The
    prices are always those of `H200`, since all ranks must come to one number.

    Args:
        rows: most rows that a rank receives or sends.
        tokens, pairs: most tokens and visible pairs of a rank.
    """
    row = 2 * kv_heads * head_dim
    # Keys and values come twice, their gradients go home once.
    fetch = rows * row * (2 * element_bytes + max(element_bytes, ACCUMULATION_BYTES)) * H200.pull_mib // MIB
    joined = 4 * tokens * query_heads * head_dim * element_bytes * H200.memory_mib // MIB  # out and dq
    tile = _by_head_size(H200.tile_forward, head_dim) + _by_head_size(H200.tile_backward, head_dim)
    further = H200.group + pairs // TILE**2 * tile * query_heads // 1000 * H200.group_per_mille // 1000
    times = {
        groups: fetch // groups + (joined if groups > 1 else 0) + (groups - 1) * further
        for groups in range(1, MOST_GROUPS + 1)
        if kv_heads % groups == 0
    }
    return min(times, key=lambda groups: times[groups])


def head_groups(figures: Figures, shape: ModelShape) -> int:
    """Head groups of `gather` under a layout."""
    return _head_groups(figures.busiest_rows, int(figures.tokens.max()), int(figures.pairs.max()), shape)


def _head_groups(rows: int, tokens: int, pairs: int, shape: ModelShape) -> int:
    return best_head_groups(
        rows,
        tokens,
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


def step_time(figures: Figures, shape: ModelShape, costs: Costs = H200) -> StepTime:
    """Simulate one step of a layout under the exchanges ``gather`` and ``affine``."""
    attention = gather_time(figures, shape, costs)
    window = None if figures.windowed is None else gather_time(figures.windowed, shape, costs)
    gdn = affine_time(figures, shape, costs) if shape.gdn_layers else None
    step = sum(count * int(part.total.max()) for count, part in attention_parts(attention, window, shape))
    if gdn is not None:
        step += sum(int(part.total.max()) for part in gdn) * shape.gdn_layers
    return StepTime(attention, gdn, step, window)


def token_time(tokens: np.ndarray, products: int, shape: ModelShape, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of what each token costs alone: projections, MLP, norms."""
    product = tokens * (2 * products * costs.tera_product // 10**9) // 1000
    row = tokens * shape.hidden * shape.element_bytes * costs.memory_mib // MIB
    return product + row * costs.passes_forward, 2 * product + row * costs.passes_backward


def kernel_time(tiles, query_tiles, heads: int, shape: ModelShape, costs: Costs):
    """Forward and backward of an attention kernel over so many touched tiles, for ``heads`` query heads."""
    forward = tiles * _by_head_size(costs.tile_forward, shape.head_dim) + query_tiles * costs.query_tile_forward
    backward = tiles * _by_head_size(costs.tile_backward, shape.head_dim) + query_tiles * costs.query_tile_backward
    return forward * heads // 1000 + costs.launch, backward * heads // 1000 + costs.launch


def _by_head_size(table: tuple[tuple[int, int], ...], head_dim: int) -> int:
    """The cost at the smallest tabled head size that holds ``head_dim``, larger ones in proportion to the last."""
    for size, cost in table:
        if head_dim <= size:
            return cost
    size, cost = table[-1]
    return cost * head_dim // size


def gather_time(
    figures: Figures, shape: ModelShape, costs: Costs, groups: int | None = None
) -> tuple[LayerTime, LayerTime]:
    """A softmax-attention layer whose head groups are fetched while the group before computes.

    Backward fetches the rows again and returns their gradients. The first fetch and the last return are exposed.

    Args:
        groups: head groups; None: `head_groups`.
    """
    groups = head_groups(figures, shape) if groups is None else groups
    query_tiles = -(-figures.tokens // TILE)
    kernel = kernel_time(figures.tiles, query_tiles, shape.query_heads, shape, costs)
    tokens = token_time(figures.tokens, shape.attention_products, shape, costs)
    rows_in, rows_out = figures.rows_in, figures.rows_out
    moves = (rows_in > 0) | (rows_out > 0)
    fetch = _pull(np.maximum(rows_in, rows_out) * shape.kv_row_bytes // groups, moves, costs)
    home = _pull(np.maximum(rows_in, rows_out) * shape.kv_gradient_bytes // groups, moves, costs)
    output = figures.tokens * shape.query_heads * shape.head_dim * shape.element_bytes
    joined = 2 * output * costs.memory_mib // MIB if groups > 1 else 0
    parts = []
    for work, alone, each, last, join in (
        (kernel[0], tokens[0], fetch, 0, joined),
        (kernel[1], tokens[1], fetch + home, home, joined),
    ):
        first = fetch
        hidden_at_most = work // groups
        exposed = first + last + (groups - 1) * np.maximum(0, each - hidden_at_most)
        exposed += groups * each * costs.pull_slowdown_percent // 100
        # That kernels over few heads are slower (`group_per_mille`) is within the error of their own fit.
        split = (groups - 1) * costs.group // 2 + join
        parts.append(LayerTime(alone + work + split, exposed))
    return parts[0], parts[1]


def _pull(nbytes: np.ndarray, moves: np.ndarray, costs: Costs) -> np.ndarray:
    return np.where(moves, nbytes * costs.pull_mib // MIB + costs.pull_latency, 0)


def affine_time(figures: Figures, shape: ModelShape, costs: Costs) -> tuple[LayerTime, LayerTime]:
    """`recurrent_time` of a measured layout."""
    assert figures.recurrent is not None, "figures without the counts of recurrent layers"
    return recurrent_time(figures.tokens, figures.recurrent, shape, costs)


def recurrent_time(
    tokens: np.ndarray, counts: RecurrentFigures, shape: ModelShape, costs: Costs
) -> tuple[LayerTime, LayerTime]:
    """A recurrent layer whose entry states come from one exchange of summaries.

    Two all-to-alls (summaries to the head owners, entry states back) overlap the half of the layer that does not
    depend on the tree. A rank with an affine map sends twice as much in forward; backward sends states only.
    """
    scale = _head_scale(shape)
    by_token = token_time(tokens, shape.gdn_products, shape, costs)
    any_state = bool(counts.entries.any())
    maps = 1 + (counts.through_tokens > 0)
    parts = []
    for alone, chunk, percent, sent in (
        (by_token[0], costs.chunk_forward, costs.through_forward_percent, maps),
        (by_token[1], costs.chunk_backward, costs.through_backward_percent, 1),
    ):
        recurrent = counts.chunks * chunk * scale // 1000
        through = -(-counts.through_tokens // CHUNK) * chunk * scale * percent // 100_000
        nbytes = (counts.exits * sent + counts.entries) * shape.state_bytes
        exchange = nbytes * costs.all_to_all_mib // MIB + 2 * costs.all_to_all_latency * any_state
        parts.append(LayerTime(alone + recurrent + through, np.maximum(0, exchange - recurrent // 2)))
    return parts[0], parts[1]


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


def _head_scale(shape: ModelShape) -> int:
    """Recurrent value heads, in heads of the measured size 128."""
    return -(-shape.gdn_value_heads * shape.gdn_head_dim**2 // 128**2)


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
    groups = _head_groups(tokens, tokens, pairs, shape)  # as if a rank held and saw everything
    fetch = shape.kv_row_bytes * 1000 * costs.pull_mib // MIB
    home = shape.kv_gradient_bytes * 1000 * costs.pull_mib // MIB
    row = (2 * fetch + home) // groups + (2 * fetch + home) * costs.pull_slowdown_percent // 100
    # A cut leaves half a query tile empty, and a fragment whose state crosses ranks.
    piece = tile * pairs // max(1, tokens) // (2 * TILE * 1000)
    states = 3 * shape.state_bytes * costs.all_to_all_mib // MIB
    piece += states * shape.gdn_layers // max(1, 2 * shape.attention_layers)
    chunk = (costs.chunk_forward + costs.chunk_backward) * _head_scale(shape) * shape.gdn_layers
    return SplitPrices(tile=tile, chunk=chunk // max(1, shape.attention_layers), row=row, piece=piece)
