"""Every exchange with the Triton kernels in the interpreter, on two gloo ranks; `test_attention_triton.py` runs it.

Head sizes above 128 take the backward that stores its scores.
"""

import tests.kernels.interpreted  # noqa: F401  # isort: skip  # before anything that imports Triton

import pytest
import torch

from tests.layers.test_attention import Case, rank_errors, rank_repeats
from tests.ranks import run_ranks

BOUND = 1e-5  # float32
ABOUT = {"dtype": torch.float32, "backend": "triton"}
CASES = [
    Case("gather", 3, size=16, groups=1, **ABOUT),
    Case("gather", 5, heads=(8, 4), size=32, groups=4, **ABOUT),
    Case("gather", 3, size=16, window=9, **ABOUT),
    Case("ring", 3, size=16, **ABOUT),
    Case("ring", 5, key_rank=2, size=64, **ABOUT),
    Case("ring", 0, layout="one", size=16, **ABOUT),
    Case("ulysses", 3, size=16, **ABOUT),
    Case("ulysses", 5, heads=(4, 1), size=16, **ABOUT),
    Case("gather", 3, size=144, **ABOUT),
    Case("ring", 3, size=144, **ABOUT),
]


# Functions of this module, so that ranks import it and with it the interpreter.
def interpreted_errors(cases: list[Case]) -> list[dict[str, float]]:
    return rank_errors(cases)


def interpreted_repeats(cases: list[Case]) -> bool:
    return rank_repeats(cases)


@pytest.fixture(scope="module")
def errors() -> list[list[dict[str, float]]]:
    return run_ranks(2, interpreted_errors, CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{c.exchange}-{c.seed}-D{c.size}" for c in CASES])
def test_exchanges_equal_dense_attention(errors, index):
    for of_rank in errors:
        assert max(of_rank[index].values()) <= BOUND, (CASES[index], of_rank[index])


def test_gradients_repeat_bit_by_bit():
    again = [case for case in CASES if case.seed == 3 and case.size == 16]
    assert all(run_ranks(2, interpreted_repeats, again))
