"""The fa4 backend's planning and gradients: FA4 itself is replaced by a dense float64 stand-in."""

import dataclasses

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward, fa4, rectangles
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import comb_rows, random_layout, random_rows, random_variety
from tests.kernels import dense_fa4
from tests.kernels.attention_oracle import (
    Tensors,
    blind,
    dense_attention,
    partly_blind,
    poisoned_memory,
    random_tensors,
    relative_error,
    visible,
)

NAMES = ("dq", "dk", "dv")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(fa4, "why_not", lambda q: None)
    monkeypatch.setattr(fa4, "variable_length_backward", lambda: dense_fa4.backward)


def whole(forest) -> Intervals:
    return Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0))


def run(x: Tensors, keys: Tensors, intervals: Intervals, backend: str = "fa4") -> dict[str, torch.Tensor]:
    """Gradients for the out and lse of the reference."""
    out, lse = attention(x.q, keys.k, keys.v, intervals, scale=x.scale, backend="reference")
    with poisoned_memory():
        grads = attention_backward(
            x.q,
            keys.k,
            keys.v,
            out,
            lse,
            x.dout,
            intervals,
            scale=x.scale,
            backend=backend,
            accumulate_q=True,
            accumulate_kv=True,
        )
    return dict(zip(NAMES, grads, strict=True))


def worst_error(got: dict, truth: dict) -> float:
    assert all(got[name].isfinite().all() for name in NAMES)
    return max(relative_error(got[name], truth[name]) for name in NAMES)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
def test_equals_dense_attention(heads):
    for seed in range(16):
        forest = random_variety(seed).forest
        x = random_tensors(forest.tokens, heads, 8, seed, key_rank=2 if seed % 3 == 1 else None)
        assert worst_error(run(x, x, whole(forest)), dense_attention(visible(forest), x)) < 1e-12, seed


def test_a_comb_whose_every_row_has_another_prefix(monkeypatch):
    """Key rows repeat within a call as often as there are branch points; lists are cut at three sequences."""
    monkeypatch.setattr(rectangles, "MOST_SEQUENCES", 3)
    forest = comb_rows(12).forest
    intervals = whole(forest)
    assert max(len(call.sums) for call in rectangles.call_list(intervals)) == 3
    x = random_tensors(forest.tokens, (2, 1), 4, 0)
    assert worst_error(run(x, x, intervals), dense_attention(visible(forest), x)) < 1e-12


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_keys_of_an_exchange(exchange):
    for seed in (3, 7, 10):
        forest = random_variety(seed).forest
        layout = random_layout(forest, seed, 3)
        for rank in range(3):
            plan = attention_plan(forest, layout, rank, exchange)
            for part in [plan.gather.intervals] if plan.gather else plan.ring.intervals:
                intervals = Intervals.from_arrays(part)
                x = random_tensors(part.rows, (4, 2), 8, rank)
                keys = random_tensors(intervals.key_end + 3, (4, 2), 8, 9)
                truth = run(x, keys, intervals, "reference")
                assert worst_error(run(x, keys, intervals), truth) < 1e-12, (seed, rank)


def test_rows_that_see_nothing_and_a_diagonal_that_starts_empty():
    intervals = Intervals.from_arrays(partly_blind()[0])
    x, keys = random_tensors(8, (4, 2), 8, 0), random_tensors(9, (4, 2), 8, 1)
    assert worst_error(run(x, keys, intervals), run(x, keys, intervals, "reference")) < 1e-12


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_zero_rows(queries, keys):
    intervals = Intervals.from_arrays(blind(queries))
    got = run(random_tensors(queries, (4, 2), 8, 0), random_tensors(keys, (4, 2), 8, 0), intervals)
    assert not any(got[name].any() for name in NAMES)


def trunk_and_leaves(trunk: int, leaves: int, length: int):
    """One trunk whose leaves start with different tokens."""
    rows = [np.concatenate([np.zeros(trunk), np.full(length, leaf + 1)]) for leaf in range(leaves)]
    return build_forest(np.concatenate(rows).astype(np.int64), np.arange(leaves + 1) * (trunk + length))


def test_leaves_of_a_trunk_are_one_rectangle_and_copy_nothing():
    """The first leaf continues the trunk's diagonal; all others share one rectangle. All rows taken are ranges."""
    made = rectangles.call_list(whole(trunk_and_leaves(40, 5, 8)))
    diagonals, rectangle = made
    assert diagonals.causal and diagonals.rows == diagonals.keys == slice(0, 80) and len(diagonals.row_ends) == 6
    assert not rectangle.causal and rectangle.rows == slice(48, 80) and rectangle.keys == slice(0, 40)
    assert [call.sums for call in made] == [((slice(0, 80), slice(0, 80)),), ((slice(0, 40), slice(0, 40)),)]
    assert pairs_of(made) == 48 * 49 // 2 + 4 * 8 * 9 // 2 + 32 * 40


def pairs_of(calls: tuple[rectangles.Call, ...]) -> int:
    """Visible pairs."""
    found = 0
    for call in calls:
        rows, keys = (np.diff(ends.numpy()) for ends in (call.row_ends, call.key_ends))
        found += int((rows * keys - call.causal * rows * (rows - 1) // 2).sum())
    return found


def test_planned_pairs_are_the_visible_ones():
    for seed in range(8):
        forest = random_rows(seed, rows=20, longest=20).forest
        assert pairs_of(rectangles.call_list(whole(forest))) == forest.tree_pairs


def _faulty(fault: str, monkeypatch) -> None:
    if fault == "last call only":
        monkeypatch.setattr(fa4, "_add", lambda total, rows, part: total.__setitem__(rows, part))
    if fault == "full diagonal":
        original = fa4._options
        monkeypatch.setattr(fa4, "_options", lambda call, scale: original(call, scale) | {"causal": False})
    if fault == "only the last of repeated keys":
        build = rectangles._call
        lose = lambda *made: dataclasses.replace(call := build(*made), sums=call.sums[-1:])  # noqa: E731
        monkeypatch.setattr(rectangles, "_call", lose)
    if fault == "first level only":
        levels = rectangles._levels
        monkeypatch.setattr(rectangles, "_levels", lambda intervals: levels(intervals)[:1])


@pytest.mark.parametrize(
    "fault", ["last call only", "full diagonal", "only the last of repeated keys", "first level only"]
)
def test_planted_faults_show(fault, monkeypatch):
    rows = comb_rows(12) if fault == "only the last of repeated keys" else random_rows(0, rows=25, longest=20)
    _faulty(fault, monkeypatch)
    x = random_tensors(rows.forest.tokens, (2, 1), 8, 0)
    got = run(x, x, whole(rows.forest))
    truth = dense_attention(visible(rows.forest), x)
    assert max(relative_error(got[name], truth[name]) for name in NAMES) > 1e-2


def test_a_refusal_names_the_remedy(monkeypatch):
    forest = random_rows(0).forest
    x = random_tensors(forest.tokens, (2, 1), 8, 0)
    with pytest.raises(ValueError, match="fa4 computes gradients only. Use auto, cudnn or triton for attention"):
        attention(x.q, x.k, x.v, whole(forest), scale=1.0, backend="fa4")
    windowed = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0, 3))
    with pytest.raises(ValueError, match="attention backend fa4 computes no sliding window. Use cudnn or triton"):
        run(x, x, windowed)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="attention backend fa4 computes bfloat16 and float16; got torch.float64"):
        run(x, x, whole(forest))
    half = x.to(torch.bfloat16)
    with pytest.raises(ValueError, match="attention backend fa4 needs a GPU; q is on cpu"):
        run(half, half, whole(forest))
