"""The layouts that other engines use, on a forest: what `balanced_layout` is compared with."""

from __future__ import annotations

import numpy as np

from cp_engine.sharding.chord import chord_layout
from cp_engine.sharding.cost import ModelShape, split_prices
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.measure import Survey


def zigzag_layout(forest: Forest, world: int) -> Layout:
    """Rank r owns part r from the front and part r from the back of 2P equal parts: balanced for one causal row."""
    cuts = forest.tokens * np.arange(2 * world + 1) // (2 * world)
    return layout_from_cuts(cuts, np.concatenate([np.arange(world), np.arange(world)[::-1]]), world)


def snake_layout(forest: Forest, world: int, chunk: int = 128) -> Layout:
    """Chunks of the axis sorted by visible pairs, dealt to ranks to and fro (PyTorch's PTRR)."""
    cuts = np.append(np.arange(0, forest.tokens, chunk), forest.tokens)
    order = np.argsort(-np.diff(Survey(forest).pairs_before(cuts)), kind="stable")
    lap, place = np.divmod(np.arange(len(order)), world)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.where(lap % 2, world - 1 - place, place)
    return layout_from_cuts(cuts, rank, world)


def baseline_layouts(survey: Survey, world: int, model: ModelShape) -> dict[str, Layout]:
    forest = survey.forest
    prices = split_prices(forest.tree_pairs, forest.tokens, model)
    return {
        "contiguous": contiguous_layout(forest, world),
        "zigzag": zigzag_layout(forest, world),
        "snake": snake_layout(forest, world),
        "chord": chord_layout(survey, world, prices),
    }
