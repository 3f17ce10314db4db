"""Cases of the Triton GDN backend in Triton's interpreter; `test_gdn_triton.py` runs this file."""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

import importlib
import inspect
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest
import torch

from cp_engine.kernels.gdn import fla_stages
from cp_engine.kernels.gdn import triton as gdn
from cp_engine.kernels.gdn.triton import packing
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import layout_from_cuts
from tests.forests import comb_rows
from tests.gdn_oracle import forest_of_segments, random_forest, relative_errors
from tests.kernels.attention_oracle import poisoned_memory
from tests.kernels.gdn_cases import NAMES, Case, case, rank_plans, whole_plan

BOUND = 1e-5  # float32; see the log for what is seen


@pytest.fixture(autouse=True, scope="module")
def one_configuration():
    single_configurations()


CHAIN_TABLES = importlib.import_module("cp_engine.kernels.gdn.triton.chain_tables")


@pytest.fixture(autouse=True)
def nothing_packed(monkeypatch):
    """Short fragments have chunks of their own here, and all of them are chains; see `interpreted_gdn_packing`."""
    monkeypatch.setattr(packing, "LEAST_SPARED", 2.0)
    monkeypatch.setattr(CHAIN_TABLES, "MOST_TWIGS", 0)


def errors(mine: Case, tables: gdn.ChainTables | None = None) -> dict[str, float]:
    """Largest difference over the largest value, of every result that has elements."""
    with poisoned_memory():
        got = mine.run(tables or mine.tables())
    truth = mine.truth
    assert [x.shape for x in got] == [x.shape for x in truth]
    some = [(name, x, true) for name, x, true in zip(NAMES, got, truth, strict=True) if x.numel()]
    names, got, truth = zip(*some, strict=True)
    return dict(zip(names, relative_errors(got, truth), strict=True))


@pytest.mark.parametrize(
    ("seed", "sizes", "keys", "slow"),
    [
        (0, (1, 2, 32, 32), "low rank", True),
        (1, (1, 1, 20, 48), "random", False),
        (2, (1, 1, 72, 24), "low rank", True),
    ],
    ids=["shared key head", "fast decay", "several key blocks"],
)
def test_equals_the_reference_on_one_rank(seed, sizes, keys, slow):
    mine = case(whole_plan(random_forest(seed, 7)), 0, sizes, keys, slow)
    found = errors(mine)
    assert set(found) == set(NAMES) - {"A", "B", "dentry"}
    assert max(found.values()) <= BOUND, found


def test_equals_the_reference_on_several_ranks():
    for rank, plan in enumerate(rank_plans(random_forest(0, 7), 0)):
        found = errors(case(plan, rank, (1, 1, 32, 32)))
        assert max(found.values()) <= BOUND, (rank, found)


def small_case(rank: int = 1) -> Case:
    """Rank 1 starts inside a trunk: below an entry a chunk of the trunk, two branch points, and one exit (the trunk's
    end, whose last child is on rank 0)."""
    forest = forest_of_segments([(-1, 94), (0, 5), (1, 2), (1, 3), (0, 4), (0, 1)])
    layout = layout_from_cuts(np.array([0, 30, 108, 109]), np.array([0, 1, 0]), 3)
    return case(gdn_plan(forest, layout, rank, "affine", 4), rank, (1, 1, 16, 16))


def test_a_rank_below_an_entry_and_a_rank_without_tokens():
    found = errors(small_case())
    assert set(found) == set(NAMES) and max(found.values()) <= BOUND, found
    idle = errors(small_case(rank=2))
    assert set(idle.values()) == {0.0}, idle


def changed(walk, name: str, tensor: torch.Tensor):
    return replace(walk, **{name: tensor})


def with_wave(tables, name: str, tensor: torch.Tensor):
    (wave,) = tables.waves
    return replace(tables, waves=(changed(wave, name, tensor),))


def swapped(column: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """The two values of ``column`` that ``inner`` selects trade places."""
    first, second = column[inner].unique()
    return torch.where(column == first, second, torch.where(column == second, first, column))


def forgotten_entry(tables):
    starts = tables.waves[0].chains.clone()
    starts[starts[:, 2] <= tables.entries, 2] = 0
    return with_wave(tables, "chains", starts)


def swapped_siblings(tables):
    starts = tables.waves[0].chains.clone()
    starts[:, 2] = swapped(starts[:, 2], starts[:, 2] > tables.entries)
    return with_wave(tables, "chains", starts)


def swapped_sibling_rows(tables):
    """Only the stages around the state pass read the wrong states."""
    wave = tables.waves[0]
    chunks, firsts = wave.chunks.clone(), wave.chains[wave.chains[:, 2] > tables.entries, 0].long()
    is_first = torch.zeros(len(chunks), dtype=torch.bool)
    is_first[firsts] = True
    chunks[firsts, 5] = swapped(chunks[:, 5], is_first)[firsts]
    return with_wave(tables, "chunks", chunks)


def without_last_reader(walk):
    ends = walk.reader_ptr.clone()
    ends[-1] -= 1
    return changed(walk, "reader_ptr", ends)


def missing_branch_sum(tables):
    return replace(tables, waves=(without_last_reader(tables.waves[0]),))


def lost_exit_gradient(tables):
    chunks = tables.waves[0].chunks.clone()
    chunks[:, 3] = -1
    return with_wave(tables, "chunks", chunks)


def summary_from_zero(tables):
    starts = tables.summary.chains.clone()
    starts[:, 2] = 0
    return replace(tables, summary=changed(tables.summary, "chains", starts))


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        (forgotten_entry, {"o", "dq", "dk", "dg"}),
        (swapped_siblings, {"o", "dq", "dk"}),
        (swapped_sibling_rows, {"o", "dq", "dk"}),
        (missing_branch_sum, {"dk", "dv", "dg", "dbeta", "dentry"}),
        (lost_exit_gradient, {"dk", "dv", "dg", "dbeta"}),
        (summary_from_zero, {"A"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_faults_show(fault, shows):
    mine = small_case()
    found = errors(mine, fault(mine.tables()))
    assert all(found[name] > 1e-3 for name in shows), found


def test_waves_of_trees_equal_the_reference(monkeypatch):
    monkeypatch.setattr(CHAIN_TABLES, "WAVE", 3)
    forest = forest_of_segments([(-1, 20), (0, 3), (0, 65), (-1, 2), (3, 1), (3, 2), (-1, 70), (-1, 5)])
    mine = case(whole_plan(forest), 0, (1, 2, 16, 16))
    tables = mine.tables()
    assert len(tables.waves) == 3
    assert sorted(torch.cat([wave.members for wave in tables.waves]).tolist()) == list(range(tables.chunks))
    found = errors(mine, tables)
    assert max(found.values()) <= BOUND, found


def test_siblings_share_a_row_and_leaves_have_none():
    # A trunk of two chunks with 50 leaves of one chunk: the trunk's states are all that is kept.
    (wave,) = case(whole_plan(forest_of_segments([(-1, 100)] + [(0, 3)] * 50)), 0, (1, 1, 16, 16)).tables().waves
    assert (wave.rows, wave.slots) == (2, 2)
    assert wave.chunks[:, 5].tolist() == [-1, 0] + [1] * 50
    assert wave.chunks[:, 6].tolist() == [0, 1] + [-1] * 50


def test_launches_follow_the_leaves_not_the_depth():
    comb = comb_rows(70).forest
    for forest in (comb, *(random_forest(seed, 40) for seed in range(5))):
        plan = whole_plan(forest)
        tables = case(plan, 0, (1, 1, 16, 16)).tables()
        leaves = forest.segments - len(set(forest.parent[forest.parent >= 0].tolist()))
        (wave,) = tables.waves
        assert len(wave.levels) <= np.log2(leaves) + 1
        assert len(tables.summary.chains) == 0
        lengths = wave.chains[:, 1]
        assert int(lengths.sum()) == tables.chunks
        assert all((lengths[begin:end].diff() <= 0).all() for begin, _, end in wave.levels)
    assert len(case(whole_plan(comb), 0, (1, 1, 16, 16)).tables().waves[0].levels) == 2


def test_contract_with_fla():
    assert version("fla-core") == fla_stages.VERSION
    for (module, name), parameters in fla_stages.CONTRACT.items():
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        assert set(parameters) <= set(signature.parameters), name
        required = {key for key, value in signature.parameters.items() if value.default is inspect.Parameter.empty}
        assert required - {"kwargs"} <= set(parameters), name


def test_values_of_the_stages_around_the_state_pass():
    """Each stage alone against the float64 reference, by chunk."""
    mine = small_case()
    tables = mine.tables()
    stages = gdn.chunk_stages(mine.inputs, tables)
    dv_local = gdn.backward_stages(mine.inputs, stages, mine.dout, tables)
    true, true_back, groups = mine.true_stages()
    for stage, back, group in zip(true, true_back, groups, strict=True):
        live = group.rows < tables.tokens
        rows = group.rows[live]
        for got, expected in ((stages.w, stage.w), (stages.u, stage.u), (dv_local, back.dv_local)):
            assert relative_errors([got[rows]], [expected.transpose(1, 2)[live]])[0] <= BOUND
        last = group.rows.masked_fill(~live, 0).amax(1)
        assert relative_errors([stages.decay[last].exp2()], [stage.decay])[0] <= BOUND
