"""Where the tokens of a pack go and how its attention crosses ranks: decided once per pack, equal on every rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from cp_engine.config import ParallelConfig
from cp_engine.sharding.cost import MIB, ModelShape
from cp_engine.sharding.exchange_choice import choose_exchange
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.measure import Survey
from cp_engine.sharding.packing import Pack
from cp_engine.sharding.plan import ShardPlan, shard_plan
from cp_engine.sharding.search import balanced_layout

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PlacedPack:
    """A pack whose forest stands in the order that its layout cuts."""

    pack: Pack
    layout: Layout
    exchange: str  # gather, ring, ulysses, or ulysses_gather:U
    reason: str  # why this exchange


def place_pack(pack: Pack, parallel: ParallelConfig, shape: ModelShape) -> PlacedPack:
    """Choose the layout and the exchange of a pack.

    Raises:
        ValueError: if no exchange keeps to ``parallel.max_exchange_mib``.
    """
    forest, layout = choose_layout(pack.forest, parallel, shape)
    placed = replace(pack, forest=forest)
    if parallel.exchange != "auto":
        team = f":{parallel.ulysses_ranks}" if parallel.ulysses_ranks is not None else ""
        return PlacedPack(placed, layout, parallel.exchange + team, "set by parallel.exchange")
    if not forest.tokens:
        return PlacedPack(placed, layout, "gather", "a pack without tokens moves nothing")
    budget = None if parallel.max_exchange_mib is None else parallel.max_exchange_mib * MIB
    choice = choose_exchange(Survey(forest), layout, model=shape, memory_bytes=budget)
    _LOG.info("pack of %d tokens on %d ranks: %s", forest.tokens, parallel.cp, choice.reason)
    return PlacedPack(placed, layout, choice.exchange, choice.reason)


def choose_layout(forest: Forest, parallel: ParallelConfig, shape: ModelShape) -> tuple[Forest, Layout]:
    """The forest, its subtrees perhaps in another order, and the owners of its tokens."""
    if parallel.layout == "contiguous" or parallel.cp == 1 or not forest.tokens:
        return forest, contiguous_layout(forest, parallel.cp)
    placed = balanced_layout(forest, parallel.cp, model=shape)
    return placed.forest, placed.layout


def plan_rank(placed: PlacedPack, rank: int, gdn_exchange: str, conv_width: int | None) -> ShardPlan:
    """One rank's plan of a placed pack."""
    return shard_plan(
        placed.pack.forest,
        placed.layout,
        rank,
        placed.pack.loss_mask,
        exchange=placed.exchange,
        gdn_exchange=gdn_exchange,
        conv_width=conv_width,
    )
