"""The drawn values of a policy loss, and how errors are measured."""

import json

import numpy as np
import torch

from cp_engine.trackers import strict_json
from cp_engine.verify.compare import gradient_error
from cp_engine.verify.flat import spread_units
from cp_engine.verify.values import draw_values


def test_drawn_values_clip_on_both_sides_and_stay_off_the_kinks():
    drawn = draw_values(20_000, 0.2, 0.2, seed=3)
    ratio = np.exp(-drawn.old_offset)
    high, low = (ratio > 1.2) & (drawn.advantage > 0), (ratio < 0.8) & (drawn.advantage < 0)
    for share in (high.mean(), low.mean()):
        assert 0.2 < share < 0.6
    # Unclipped although out of range: the other branch of the minimum.
    assert ((ratio > 1.2) & (drawn.advantage < 0)).mean() > 0.02
    assert ((ratio < 0.8) & (drawn.advantage > 0)).mean() > 0.02
    for kink in (0.8, 1.2):
        assert np.abs(-drawn.old_offset - np.log(kink)).min() > 0.0099
    again = draw_values(20_000, 0.2, 0.2, seed=3)
    assert (again.advantage == drawn.advantage).all() and (again.old_offset == drawn.old_offset).all()


def linear(weight, bias):
    model = torch.nn.Linear(1, 2)
    model.weight.grad = None if weight is None else torch.tensor(weight)
    model.bias.grad = None if bias is None else torch.tensor(bias)
    return model


def test_gradient_error_is_a_max_norm_with_a_floor():
    flat = {"weight": torch.tensor([[100.0], [1.0]]), "bias": torch.tensor([1e-3, 0.0])}
    exact = gradient_error(linear([[100.0], [1.0]], [1e-3, 0.0]), flat)
    assert exact.error == 0.0
    # One wrong element of a small tensor is measured against 1e-3 of the largest gradient, not against itself.
    off = gradient_error(linear([[100.0], [1.0]], [2e-3, 0.0]), flat)
    assert (off.tensor, round(off.error, 6)) == ("bias", 0.01)
    off = gradient_error(linear([[100.0], [2.0]], [1e-3, 0.0]), flat)
    assert (off.tensor, round(off.error, 6)) == ("weight", 0.01)


def test_missing_and_nan_gradients_are_infinitely_wrong():
    flat = {"weight": torch.tensor([[1.0], [1.0]]), "bias": torch.tensor([1.0, 1.0])}
    assert gradient_error(linear([[1.0], [1.0]], None), flat).error == float("inf")
    assert gradient_error(linear([[1.0], [float("nan")]], [1.0, 1.0]), flat).error == float("inf")
    extra = gradient_error(linear([[1.0], [1.0]], [1.0, 1.0]), {"weight": flat["weight"]})
    assert (extra.error, extra.tensor) == (float("inf"), "bias")


def test_units_are_spread_once_each_and_evenly():
    length = np.array([10_000, 10, 9_000, 20, 8_000, 30])
    spread = spread_units([[row] for row in range(6)], length, 3)
    assert sorted(row for units in spread for unit in units for row in unit) == list(range(6))
    assert {frozenset(row for (row,) in units if length[row] > 100) for units in spread} == {
        frozenset({0}),
        frozenset({2}),
        frozenset({4}),
    }
    pairs = [[0, 1], [2, 3], [4, 5]]
    assert sorted(unit for units in spread_units(pairs, length, 2) for unit in units) == pairs


def test_figures_that_are_not_finite_are_null_in_json():
    text = strict_json({"loss": float("nan"), "max_grad_err": float("inf"), "edges": 3, "worst_tensor": "w"})
    assert json.loads(text) == {"loss": None, "max_grad_err": None, "edges": 3, "worst_tensor": "w"}
