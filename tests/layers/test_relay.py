"""Rows of all ranks in another layout: bit for bit, with gradients, padding rows and ranks without tokens."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_engine.sharding.exchange.relay import relay_rows, relay_tables
from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.relayout import relayout
from tests.forests import random_layout, random_variety
from tests.ranks import run_ranks

CHANNELS = 3


def layouts(seed: int, world: int) -> tuple[Layout, Layout]:
    forest = random_variety(seed).forest
    return random_layout(forest, seed, world), random_layout(forest, seed + 50, world)


def rows_of(layout: Layout, rank: int, values: torch.Tensor, padding: float) -> torch.Tensor:
    tokens = layout.rank_tokens(rank)
    return values[torch.as_tensor(tokens)] if len(tokens) else values.new_full((1, CHANNELS), padding)


def poisoned(make):
    def made(*args, **kwargs):
        out = make(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return made


def move_on_rank(seed: int, dtype: str) -> str | None:
    """None, or what is wrong on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    before, after = layouts(seed, world)
    generator = torch.Generator().manual_seed(seed)
    values, grads = (
        torch.randn(before.tokens, CHANNELS, generator=generator).to(getattr(torch, dtype)) for _ in range(2)
    )
    tables = relay_tables(relayout(before, after, rank))
    # What lies in a padding row must not matter, nor what uninitialised memory holds.
    x = rows_of(before, rank, values, float("nan")).clone().requires_grad_()
    with mock.patch.object(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty)):
        y = relay_rows(x, tables, dist.group.WORLD)
        home = relay_rows(y, tables.back, dist.group.WORLD)
        (dx,) = torch.autograd.grad(y, x, rows_of(after, rank, grads, float("nan")))
    wrong = {
        "rows": not torch.equal(y, rows_of(after, rank, values, 0.0)),
        "rows back home": not torch.equal(home, rows_of(before, rank, values, 0.0)),
        "gradient": not torch.equal(dx, rows_of(before, rank, grads, 0.0)),
        "dtype": y.dtype != x.dtype or dx.dtype != x.dtype,
    }
    return next((name for name, is_wrong in wrong.items() if is_wrong), None)


def move_all() -> list:
    cases = [(seed, dtype) for seed in range(12) for dtype in ("float64", "bfloat16")]
    return [(case, wrong) for case in cases if (wrong := move_on_rank(*case)) is not None]


@pytest.mark.parametrize("world", [2, 3])
def test_rows_and_gradients_move_bit_for_bit(world):
    assert run_ranks(world, move_all) == [[]] * world


def test_the_cases_have_ranks_without_tokens_on_both_sides():
    empty = [[bool((layout.rank_token_count == 0).any()) for layout in layouts(seed, 3)] for seed in range(12)]
    assert any(before for before, _ in empty) and any(after for _, after in empty)


def test_rows_of_another_plan_are_noticed():
    forest = random_variety(1).forest
    layout = contiguous_layout(forest, 1)
    tables = relay_tables(relayout(layout, layout, 0))
    with pytest.raises(AssertionError, match="rows where the plan has"):
        relay_rows(torch.zeros(forest.tokens + 1, CHANNELS), tables, None)


def test_one_rank_and_equal_layouts_move_nothing():
    forest = random_variety(4).forest
    whole = layout_from_cuts(np.array([0, forest.tokens]), np.array([0]), 1)
    x = torch.randn(forest.tokens, CHANNELS)
    assert torch.equal(relay_rows(x, relay_tables(relayout(whole, whole, 0)), None), x)
