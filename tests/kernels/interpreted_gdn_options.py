"""The Triton GDN backend under launch options other than the default ones; `test_gdn_triton.py` runs this file."""

import tests.kernels.interpreted  # isort: skip  # noqa: F401  # before anything that imports Triton

import pytest

from cp_engine.kernels.gdn.triton import backward_pass, dqkwg, forward_pass, launch, packing, solve_backward
from cp_engine.kernels.gdn.triton.primitives import Sizes
from tests.gdn_oracle import forest_of_segments, random_forest
from tests.kernels.gdn_cases import NAMES, case, rank_plans, whole_plan
from tests.kernels.interpreted_gdn import (
    BOUND,
    errors,
    lost_exit_gradient,
    missing_branch_sum,
    one_configuration,  # noqa: F401
    small_case,
    swapped_sibling_rows,
)


@pytest.fixture(autouse=True)
def nothing_packed(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_SPARED", 2.0)


@pytest.fixture(autouse=True)
def options(monkeypatch):
    monkeypatch.setattr(dqkwg, "CHUNKS", 3)
    monkeypatch.setattr(launch, "FLOAT32", Sizes(16, 8, 1, tiles=True))
    monkeypatch.setattr(dqkwg, "TILES", True)
    monkeypatch.setattr(dqkwg, "BLOCK_KEYS", 16)
    monkeypatch.setattr(solve_backward, "FROM_SOLUTIONS", True)


@pytest.mark.parametrize(
    ("keys", "spared", "chunks"),
    [("low rank", 0.0, 1), ("low rank", 0.0, 3), ("random", 2.0, 1)],
    ids=["packed, a chunk a program", "packed, chunks a program", "random keys"],
)
def test_equals_the_reference(keys, spared, chunks, monkeypatch):
    monkeypatch.setattr(dqkwg, "CHUNKS", chunks)
    monkeypatch.setattr(packing, "LEAST_SPARED", spared)
    # Chunks that are full, partial, and of several fragments; a root of its own; leaves.
    forest = forest_of_segments([(-1, 130), (0, 64), (0, 5), (2, 1), (2, 3), (0, 9), (-1, 66), (6, 2)])
    found = errors(case(whole_plan(forest), 0, (1, 2, 32, 32), keys))
    assert max(found.values()) <= BOUND, found


def test_equals_the_reference_on_several_ranks():
    for rank, plan in enumerate(rank_plans(random_forest(0, 7), 0)):
        found = errors(case(plan, rank, (1, 1, 32, 16)))
        assert max(found.values()) <= BOUND, (rank, found)


def test_heads_that_no_tile_holds():
    found = errors(case(whole_plan(random_forest(1, 5)), 0, (1, 1, 20, 48)))
    assert max(found.values()) <= BOUND, found


@pytest.mark.parametrize("fault", [swapped_sibling_rows, missing_branch_sum, lost_exit_gradient])
def test_planted_faults_show(fault):
    mine = small_case()
    assert max(errors(mine).values()) <= BOUND
    found = errors(mine, fault(mine.tables()))
    assert max(found[name] for name in NAMES if name in found) > 1e-3, found


def test_the_options_are_taken(monkeypatch):
    def refuses(*_args, **_options):
        raise AssertionError("taken")

    for module, name in (
        (dqkwg, "dqkwg_walk_kernel"),
        (solve_backward, "solve_backward_from_solutions_kernel"),
        (forward_pass, "tile_states"),
        (backward_pass, "tile_states"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, type("Kernel", (), {"__getitem__": refuses, "__call__": refuses})())
            with pytest.raises(AssertionError, match="taken"):
                errors(small_case())
