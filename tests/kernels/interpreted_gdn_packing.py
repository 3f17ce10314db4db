"""Chunks of several fragments in Triton's interpreter; `test_gdn_triton.py` runs this file."""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_engine.kernels.gdn.triton import inside, packing
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import layout_from_cuts
from tests.gdn_oracle import forest_of_segments, random_forest
from tests.kernels.gdn_cases import case, rank_plans, whole_plan
from tests.kernels.interpreted_gdn import BOUND, errors

# A trunk whose last 6 tokens and small subtrees fit one chunk, short siblings below a long one, two small trees.
SEGMENTS = [
    (-1, 70),
    (0, 5),
    (1, 2),
    (1, 3),
    (0, 4),
    (-1, 66),
    (5, 65),
    (5, 9),
    (7, 2),
    (7, 1),
    (5, 8),
    (-1, 3),
    (-1, 2),
]


@pytest.fixture(autouse=True, scope="module")
def one_configuration():
    single_configurations()


def packed_case(sizes=(1, 2, 16, 16), keys: str = "low rank", slow: bool = True):
    return case(whole_plan(forest_of_segments(SEGMENTS)), 0, sizes, keys, slow)


def test_what_is_packed():
    tables = packed_case().tables()
    chunks = tables.chunk_rows[:, :2].tolist()
    assert tables.packed
    assert chunks == [[0, 64], [64, 20], [84, 64], [148, 2], [150, 64], [214, 1], [215, 20], [235, 5]]
    (wave,) = tables.waves
    leaves = wave.chunks[:, 6]
    assert (leaves[[1, 5, 6, 7]] == -1).all() and (leaves[[0, 2, 3, 4]] >= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_masks_are_the_ancestors_in_the_chunk(seed):
    forest = random_forest(seed, 40)
    for plan in (whole_plan(forest), *rank_plans(forest, seed)):
        tables = case(plan, 0, (1, 1, 16, 16)).tables()
        start, fragment = plan.fragment_row, np.repeat(np.arange(plan.fragments), np.diff(plan.fragment_row))
        above = np.arange(int(start[-1])) - 1
        heads = start[:-1]
        above[heads] = np.where(plan.fragment_parent >= 0, start[1:][plan.fragment_parent] - 1, -1)
        assert len(fragment) == tables.tokens
        covered = 0
        for first, tokens in tables.chunk_rows[:, :2].tolist():
            assert first == covered and 1 <= tokens <= 64
            covered += tokens
            for token in range(first, covered):
                bits, up = 0, token
                while up >= first:
                    bits |= 1 << (up - first)
                    up = int(above[up])
                assert int(tables.ancestors[token]) & (2**64 - 1) == bits
        assert covered == tables.tokens


@pytest.mark.parametrize(
    ("sizes", "keys", "slow"),
    [((1, 2, 16, 16), "low rank", True), ((1, 1, 20, 24), "random", False)],
    ids=["slow decay", "fast decay"],
)
def test_equals_the_reference(sizes, keys, slow):
    found = errors(packed_case(sizes, keys, slow))
    assert max(found.values()) <= BOUND, found


def test_equals_the_reference_below_an_entry_and_above_an_exit():
    forest = forest_of_segments([(-1, 94), (0, 5), (1, 2), (1, 3), (0, 4), (0, 1)])
    layout = layout_from_cuts(np.array([0, 30, 108, 109]), np.array([0, 1, 0]), 3)
    mine = case(gdn_plan(forest, layout, 1, "affine", 4), 1, (1, 1, 16, 16))
    assert mine.tables().packed
    found = errors(mine)
    assert max(found.values()) <= BOUND, found


def with_a_sibling_let_through(tables):
    """The last token of the second chunk sees the whole chunk before it."""
    bits = tables.ancestors.clone()
    first, tokens = tables.chunk_rows[1, :2].tolist()
    bits[first + tokens - 1] = 2**tokens - 1
    return replace(tables, ancestors=bits)


def test_a_sibling_let_through_shows():
    mine = packed_case()
    found = errors(mine, with_a_sibling_let_through(mine.tables()))
    assert all(found[name] > 1e-3 for name in ("o", "dk", "dv")), found


def test_a_decay_along_the_rows_shows(monkeypatch):
    right = inside.cumulative_decay

    def along_the_rows(g, ancestors, chunks, chunk_size):
        straight = ancestors.clone()
        for start, tokens in chunks[:, :2].tolist():
            straight[start : start + tokens] = torch.as_tensor(packing._bits_below(np.arange(1, tokens + 1)))
        return right(g, straight, chunks, chunk_size)

    monkeypatch.setattr(inside, "cumulative_decay", along_the_rows)
    found = errors(packed_case())
    assert all(found[name] > 1e-3 for name in ("o", "dk", "dg")), found
