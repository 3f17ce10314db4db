"""The Triton attention backend in the interpreter, against dense float64 attention; refusals and `auto` on a CPU.

The interpreter has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, auto
from cp_engine.kernels.attention.triton import tiles
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import random_variety
from tests.in_interpreter import pass_in_the_interpreter
from tests.kernels.attention_oracle import random_tensors


@pytest.mark.parametrize("cases", ["interpreted_attention", "interpreted_attention_stored"])
def test_in_the_interpreter(cases):
    pass_in_the_interpreter(f"tests/kernels/{cases}.py")


def test_refusals_name_the_remedy():
    rows = torch.zeros(1, 1, 16, dtype=torch.float64)
    forest = build_forest(np.zeros(1, np.int64), np.array([0, 1]))
    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0))
    with pytest.raises(ValueError, match="attention backend triton needs "):
        attention(rows, rows, rows, intervals, scale=1.0, backend="triton")
    with pytest.raises(ValueError, match="attention backend cudnn computes bfloat16 and float16; got torch.float64"):
        attention(rows, rows, rows, intervals, scale=1.0, backend="cudnn")
    with pytest.raises(ValueError, match="attention backend cudnn needs a GPU; q is on cpu"):
        half = rows.bfloat16()
        attention(half, half, half, intervals, scale=1.0, backend="cudnn")


def test_heavy_programs_are_launched_first_and_all_others_as_their_rows_lie():
    light = np.arange(1, 41) % 7  # some have nothing to do
    work = np.concatenate([light, [3000, 10000, 3300, 10000], light[::-1]])
    assert (light * tiles.HEAVY > work.sum()).sum() == 0
    order = tiles.launch_order(work)
    # 3,000 and 3,300 lie within half an octave.
    assert order[:4].tolist() == [41, 43, 40, 42]
    assert order[4:].tolist() == [*range(40), *range(44, 84)]
    assert (
        tiles.launch_order(np.zeros(3, np.int64)).tolist() == [0, 1, 2] and tiles.launch_order(work[:0]).tolist() == []
    )


def test_auto_is_the_reference_on_a_cpu():
    forest = random_variety(4).forest
    arrays = visible_intervals(forest, contiguous_layout(forest, 1), 0)
    intervals = Intervals.from_arrays(arrays)
    x = random_tensors(forest.tokens, (4, 2), 16, 0, torch.bfloat16)
    picked = attention(x.q, x.k, x.v, intervals, scale=x.scale, backend="auto")
    for mine, its in zip(picked, attention(x.q, x.k, x.v, intervals, scale=x.scale), strict=True):
        assert torch.equal(mine, its)
    assert auto.mean_keys(intervals) * arrays.rows == pytest.approx(arrays.pairs())
