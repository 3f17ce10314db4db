"""The half of the reverse pass that comes before gradients cross ranks, in Triton's interpreter: what is final is
computed once. `test_gdn_triton.py` runs this file."""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_engine.kernels.gdn import triton as gdn
from cp_engine.kernels.gdn.triton import backward_pass, forward_pass, packing
from cp_engine.kernels.gdn.triton import walks as walks_module
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import layout_from_cuts
from tests.gdn_oracle import forest_of_segments, random_forest
from tests.kernels.gdn_cases import Case, case, rank_plans
from tests.kernels.interpreted_gdn import BOUND, CHAIN_TABLES, errors


@pytest.fixture(autouse=True, scope="module")
def one_configuration():
    single_configurations()


@pytest.fixture(autouse=True)
def nothing_packed(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_SPARED", 2.0)
    monkeypatch.setattr(CHAIN_TABLES, "MOST_TWIGS", 0)


def leaves_case() -> Case:
    """Rank 1 has three leaves below one entry, of one chunk, of two, and of a chunk with two children."""
    forest = forest_of_segments([(-1, 30), (0, 40), (0, 70), (0, 20), (3, 5), (3, 3)])
    layout = layout_from_cuts(np.array([0, 30, forest.tokens]), np.array([0, 1]), 2)
    return case(gdn_plan(forest, layout, 1, "affine", 4), 1, (1, 2, 16, 16))


def trunk_case() -> Case:
    """Rank 1 has the second half of a trunk, which leads to an exit, and two of its leaves; the third is on rank 0."""
    forest = forest_of_segments([(-1, 150), (0, 70), (0, 66), (0, 80)])
    start = forest.segment_start
    layout = layout_from_cuts(np.array([0, 64, int(start[3]), forest.tokens]), np.array([0, 1, 0]), 2)
    return case(gdn_plan(forest, layout, 1, "affine", 4), 1, (1, 2, 16, 16))


@pytest.fixture
def walks(monkeypatch) -> list[tuple[int, int]]:
    """Chains that each launch of the reverse pass walks, and those of them that keep what they compute."""
    seen, launch = [], backward_pass._launch

    def recorded(tensors, below, starts, drows, first_kept, walk, number, end, *rest, **options):
        begin = walk.levels[number].begin
        if end > begin:
            seen.append((end - begin, 0 if drows is None else end - first_kept))
        return launch(tensors, below, starts, drows, first_kept, walk, number, end, *rest, **options)

    monkeypatch.setattr(backward_pass, "_launch", recorded)
    return seen


def test_leaves_below_an_entry_are_walked_once(walks):
    mine = leaves_case()
    (wave,) = mine.tables().waves
    assert wave.below and not wave.exits and len(wave.levels) == 2
    found = errors(mine)
    assert max(found.values()) <= BOUND, found
    assert walks == [(end - begin, end - begin) for begin, _, end in reversed(wave.levels)]


def test_only_chains_that_lead_to_an_exit_are_walked_again(walks):
    mine = trunk_case()
    (wave,) = mine.tables().waves
    assert wave.below and wave.exits and [tuple(level) for level in wave.levels] == [(0, 1, 1), (1, 1, 2)]
    found = errors(mine)
    assert max(found.values()) <= BOUND, found
    assert walks == [(1, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("make", [leaves_case, trunk_case])
def test_what_is_not_kept_is_walked_again(make, walks, monkeypatch):
    mine, kept = make(), make().run(make().tables())
    monkeypatch.setattr(walks_module, "KEPT_ROWS", 0)
    walks.clear()
    again = mine.run(mine.tables())
    chains = len(mine.tables().waves[0].chains)
    assert sum(count for count, _ in walks) == 2 * chains and sum(keeping for _, keeping in walks) == chains
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


@pytest.mark.parametrize("room", [0, 8])
def test_waves_with_and_without_room_equal_the_reference(room, monkeypatch):
    monkeypatch.setattr(walks_module, "KEPT_ROWS", room)
    monkeypatch.setattr(CHAIN_TABLES, "WAVE", 3)
    waves = 0
    for rank, plan in enumerate(rank_plans(random_forest(0, 9), 0)):
        mine = case(plan, rank, (1, 1, 16, 16))
        waves = max(waves, sum(wave.below for wave in mine.tables().waves))
        found = errors(mine)
        assert max(found.values()) <= BOUND, (rank, found)
    assert waves > 1


def test_without_its_first_half_the_pass_is_whole():
    mine = trunk_case()
    x, tables = mine.inputs, mine.tables()
    stages = gdn.chunk_stages(x, tables)
    back = gdn.backward_stages(x, stages, mine.dout, tables)
    found = gdn.backward(x, stages, mine.dout, back, mine.entry_states, tables).gradients(lambda: mine.dexit)
    assert all(torch.equal(one, other) for one, other in zip(found, mine.run(tables)[-5:], strict=True))


def test_gradients_of_entry_states_are_held_once(monkeypatch):
    mine, made, exact = trunk_case(), [], walks_module.no_entry_gradients
    monkeypatch.setattr(walks_module, "no_entry_gradients", lambda *of: made.append(of) or exact(*of))
    mine.run(mine.tables())
    assert len(made) == 1


def test_a_wave_without_room_leaves_it_to_smaller_ones(monkeypatch):
    monkeypatch.setattr(walks_module, "KEPT_ROWS", 8)
    monkeypatch.setattr(CHAIN_TABLES, "WAVE", 1)
    forest = forest_of_segments([(-1, 30), (0, 400), (0, 70), (0, 66)])
    layout = layout_from_cuts(np.array([0, 30, forest.tokens]), np.array([0, 1]), 2)
    mine = case(gdn_plan(forest, layout, 1, "affine", 4), 1, (1, 1, 16, 16))
    x, tables = mine.inputs, mine.tables()
    stages = gdn.chunk_stages(x, tables)
    back = gdn.backward_stages(x, stages, mine.dout, tables)
    _, begun = gdn.begin_backward(x, stages, mine.dout, back, mine.entry_states, tables)
    assert [wave.rows for wave in tables.waves] == [7, 2, 2]
    assert [wave is not None for wave in begun.waves] == [False, True, True]


@pytest.mark.parametrize("kept", [0, 4096])
def test_states_of_a_wave_go_before_the_next_ones_are_made(kept, monkeypatch):
    monkeypatch.setattr(walks_module, "KEPT_ROWS", kept)
    monkeypatch.setattr(CHAIN_TABLES, "WAVE", 1)
    forest = forest_of_segments([(-1, 30), (0, 80), (0, 70), (0, 66)])
    layout = layout_from_cuts(np.array([0, 30, forest.tokens]), np.array([0, 1]), 2)
    mine = case(gdn_plan(forest, layout, 1, "affine", 4), 1, (1, 1, 16, 16))
    tables = mine.tables()
    assert len(tables.waves) == 3
    made, slots, held, exact_states, exact_gradients = [], [], [], forward_pass.States.empty, walks_module.dqkwg

    def count() -> None:
        gc.collect()  # the interpreter's own objects hold on to the arguments of its last kernel
        held.append(sum(rows() is not None for rows in made))

    def states(*arguments):
        count()
        assert not any(each() is not None for each in slots)
        new = exact_states(*arguments)
        made.append(weakref.ref(new.rows))
        slots.append(weakref.ref(new.slots))
        return new

    def gradients(*arguments):
        count()
        return exact_gradients(*arguments)

    monkeypatch.setattr(forward_pass.States, "empty", states)
    monkeypatch.setattr(walks_module, "dqkwg", gradients)
    mine.run(tables)
    assert held == ([0] * 3 + [0, 1, 2] + [3, 2, 1] if kept else [0] * 3 + [0, 1] * 3)


def lost_share_of_an_entry(tables):
    """In the gradient of the entry one of the chains that start from it stands for another."""
    (wave,) = tables.waves
    first, end = wave.reader_ptr[1:3].tolist()
    reader = wave.reader.clone()
    reader[end - 1] = reader[first]
    return replace(tables, waves=(replace(wave, reader=reader),))


def stale_chain(tables):
    """A chain that leads to an exit counts as final."""
    (wave,) = tables.waves
    levels = tuple(level._replace(open_end=level.begin) for level in wave.levels)
    return replace(tables, waves=(replace(wave, levels=levels),))


@pytest.mark.parametrize(
    ("make", "fault", "shows"),
    [
        (leaves_case, lost_share_of_an_entry, {"dentry"}),
        (trunk_case, stale_chain, {"dk", "dv", "dg", "dbeta"}),
    ],
)
def test_planted_faults_show(make, fault, shows):
    mine = make()
    found = errors(mine, fault(mine.tables()))
    assert all(found[name] > 1e-3 for name in shows), found
