"""Where the tokens of a pack go and how its attention crosses ranks: decided once per pack, equal on every rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from cp_engine.config import ParallelConfig
from cp_engine.sharding.cost import MIB, ModelShape
from cp_engine.sharding.exchange_choice import choose_exchange
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_layout import place_layers
from cp_engine.sharding.hosts import ONE_HOST, Hosts
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.measure import Survey
from cp_engine.sharding.packing import Pack
from cp_engine.sharding.plan import ShardPlan, shard_plan

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PlacedPack:
    """A pack whose forest stands in the order that its layout cuts."""

    pack: Pack
    layout: Layout
    gdn_layout: Layout | None  # of the GDN layers, where it is another one
    exchange: str  # gather, ring, ulysses, or ulysses_gather:U
    reason: str  # why this exchange


def place_pack(pack: Pack, parallel: ParallelConfig, shape: ModelShape, hosts: Hosts = ONE_HOST) -> PlacedPack:
    """Choose the layouts and the exchange of a pack.

    Args:
        hosts: where the context-parallel ranks stand.

    Raises:
        ValueError: if no exchange keeps to ``parallel.max_exchange_mib``, or ``parallel.gdn_layout`` is own and the
            model has no GDN layers.
    """
    forest, layout, gdn_layout = choose_layout(pack.forest, parallel, shape, hosts)
    placed = replace(pack, forest=forest)
    if parallel.exchange != "auto":
        team = f":{parallel.ulysses_ranks}" if parallel.ulysses_ranks is not None else ""
        return PlacedPack(placed, layout, gdn_layout, parallel.exchange + team, "set by parallel.exchange")
    if not forest.tokens:
        return PlacedPack(placed, layout, gdn_layout, "gather", "a pack without tokens moves nothing")
    budget = None if parallel.max_exchange_mib is None else parallel.max_exchange_mib * MIB
    choice = choose_exchange(Survey(forest), layout, model=shape, hosts=hosts, memory_bytes=budget)
    _LOG.info("pack of %d tokens on %d ranks: %s", forest.tokens, parallel.cp, choice.reason)
    return PlacedPack(placed, layout, gdn_layout, choice.exchange, choice.reason)


def choose_layout(
    forest: Forest, parallel: ParallelConfig, shape: ModelShape, hosts: Hosts = ONE_HOST
) -> tuple[Forest, Layout, Layout | None]:
    """The forest, its subtrees perhaps in another order, the owners of its tokens, and those in GDN layers where they
    are others."""
    if parallel.cp == 1 or not forest.tokens:
        return forest, contiguous_layout(forest, parallel.cp), None
    # Head shards run the whole forest whatever the layout.
    gdn_layout = "same" if parallel.gdn_exchange == "ulysses" else parallel.gdn_layout
    balanced = parallel.layout == "balanced"
    placed = place_layers(forest, parallel.cp, model=shape, hosts=hosts, balanced=balanced, gdn_layout=gdn_layout)
    if shape.gdn_layers:
        _LOG.info("GDN layers of a pack of %d tokens: %s", forest.tokens, placed.reason)
    return placed.forest, placed.layout, placed.gdn_layout


def plan_rank(
    placed: PlacedPack, rank: int, gdn_exchange: str, conv_width: int | None, window: int | None = None
) -> ShardPlan:
    """One rank's plan of a placed pack."""
    return shard_plan(
        placed.pack.forest,
        placed.layout,
        rank,
        placed.pack.loss_mask,
        exchange=placed.exchange,
        gdn_exchange=gdn_exchange,
        conv_width=conv_width,
        window=window,
        gdn_layout=placed.gdn_layout,
    )
