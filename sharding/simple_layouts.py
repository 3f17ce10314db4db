"""Layouts without a search, as other engines use them. `balanced_layout` never returns a slower one than these.

Shapes: T tokens, P ranks.
"""

from __future__ import annotations

import numpy as np

from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.measure import Survey

SNAKE_CHUNK = 128  # tokens


def zigzag_layout(tokens: int, world: int) -> Layout:
    """Rank r owns part r from the front and part r from the back of 2P equal parts: balanced for one causal row."""
    cuts = tokens * np.arange(2 * world + 1) // (2 * world)
    return layout_from_cuts(cuts, np.concatenate([np.arange(world), np.arange(world)[::-1]]), world)


def snake_layout(survey: Survey, world: int) -> Layout:
    """Chunks of the axis sorted by visible pairs, dealt to ranks to and fro (PyTorch's PTRR)."""
    tokens = survey.forest.tokens
    cuts = np.append(np.arange(0, tokens, SNAKE_CHUNK), tokens)
    order = np.argsort(-np.diff(survey.pairs_before(cuts)), kind="stable")
    lap, place = np.divmod(np.arange(len(order)), world)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.where(lap % 2, world - 1 - place, place)
    return layout_from_cuts(cuts, rank, world)


def simple_layouts(survey: Survey, world: int) -> dict[str, Layout]:
    """The three of them by name, on the forest as it stands."""
    return {
        "contiguous": contiguous_layout(survey.forest, world),
        "zigzag": zigzag_layout(survey.forest.tokens, world),
        "snake": snake_layout(survey, world),
    }
