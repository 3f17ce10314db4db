"""The layouts that `balanced_layout` is compared with: those of other engines, and the chord without a search."""

from __future__ import annotations

from cp_engine.sharding.chord import chord_layout
from cp_engine.sharding.cost import ModelShape
from cp_engine.sharding.layer_time import split_prices
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.measure import Survey
from cp_engine.sharding.simple_layouts import simple_layouts


def baseline_layouts(survey: Survey, world: int, model: ModelShape) -> dict[str, Layout]:
    prices = split_prices(survey.forest.tree_pairs, survey.forest.tokens, model)
    return simple_layouts(survey, world) | {"chord": chord_layout(survey, world, prices)}
