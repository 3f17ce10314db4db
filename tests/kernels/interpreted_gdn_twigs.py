"""Chains of one chunk that nobody starts from, in Triton's interpreter; `test_gdn_triton.py` runs this file."""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

import pytest

from cp_engine.kernels.gdn.triton import packing
from tests.gdn_oracle import forest_of_segments, random_forest
from tests.kernels.gdn_cases import case, rank_plans, whole_plan
from tests.kernels.gdn_faults import changed, without_last_twig_sum
from tests.kernels.interpreted_gdn import BOUND, CHAIN_TABLES, errors

# Below the trunk, whose heavy path goes on in segment 1: two twigs and a chain of two chunks. Below segment 1, which
# ends the chain's second branch point: twigs alone. Five siblings below another root, which are more than are walked
# one after the other. A root of one chunk.
SEGMENTS = [
    (-1, 66),
    (0, 70),
    (1, 66),
    (1, 9),
    (1, 64),
    (0, 5),
    (0, 3),
    (0, 65),
    (-1, 10),
    *[(8, 8 - i) for i in range(6)],
    (-1, 7),
]


@pytest.fixture(autouse=True, scope="module")
def one_configuration():
    single_configurations()


@pytest.fixture(autouse=True)
def nothing_packed(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_SPARED", 2.0)


def twig_case(sizes=(1, 1, 16, 16)):
    return case(whole_plan(forest_of_segments(SEGMENTS)), 0, sizes)


def test_what_is_a_twig():
    mine = twig_case()
    (wave,) = mine.tables().waves
    start = {chunk: wave.chunks[chunk, 0].item() for chunk in wave.twigs.tolist()}
    row = mine.plan.fragment_row
    # The heaviest child comes first. The root of one chunk stands at no branch point; then the trunk and segment 1.
    assert list(start.values()) == [row[15], row[6], row[7], row[3], row[4]]
    assert wave.twig_ptr.tolist()[-1] == 5 and wave.twig_ptr.tolist()[:2] == [0, 1]
    # Zero, the trunk's end, and that of the root with five siblings; the end of segment 1 has none.
    assert wave.slots == 3 and len(wave.twig_ptr) == len(wave.reader_ptr) == 5
    assert wave.chunks[:, 2].max() == 3 and wave.branch_twigs
    assert int(wave.chains[:, 1].sum()) + len(wave.twigs) == len(wave.members) == len(wave.chunks)
    (whole,) = mine_without_twigs(mine)
    assert len(whole.twigs) == 0 and whole.slots == 4


def mine_without_twigs(mine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHAIN_TABLES, "MOST_TWIGS", 0)
        return mine.tables().waves


def test_equals_the_reference():
    found = errors(twig_case((1, 2, 20, 24)))
    assert max(found.values()) <= BOUND, found


def test_equals_the_reference_on_several_ranks():
    twigs = 0
    for rank, plan in enumerate(rank_plans(random_forest(0, 9), 0)):
        mine = case(plan, rank, (1, 1, 16, 16))
        tables = mine.tables()
        twigs += sum(len(wave.twigs) for wave in tables.waves)
        assert len(tables.summary.twigs) == 0
        found = errors(mine, tables)
        assert max(found.values()) <= BOUND, (rank, found)
    assert twigs


def test_waves_of_trees_and_packed_chunks(monkeypatch):
    monkeypatch.setattr(CHAIN_TABLES, "WAVE", 3)
    monkeypatch.setattr(packing, "LEAST_SPARED", 0.0)
    mine = twig_case()
    tables = mine.tables()
    assert len(tables.waves) == 2 and tables.packed and sum(len(wave.twigs) for wave in tables.waves) > 2
    found = errors(mine, tables)
    assert max(found.values()) <= BOUND, found


def test_nothing_but_twigs():
    mine = case(whole_plan(forest_of_segments([(-1, 5), (-1, 60)])), 0, (1, 1, 16, 16))
    (wave,) = mine.tables().waves
    assert wave.levels == () and len(wave.twigs) == 2 and not wave.branch_twigs
    found = errors(mine)
    assert max(found.values()) <= BOUND, found


def twig_of_another(tables):
    """Twigs read the first row."""
    chunks = tables.waves[0].chunks.clone()
    chunks[tables.waves[0].twigs.long(), 5] = 0
    return changed(tables, chunks=chunks)


@pytest.mark.parametrize(
    ("fault", "shows"),
    [(without_last_twig_sum, {"dk", "dv", "dg", "dbeta"}), (twig_of_another, {"o", "dq", "dk", "dg"})],
)
def test_planted_faults_show(fault, shows):
    mine = twig_case()
    found = errors(mine, fault(mine.tables()))
    assert all(found[name] > 1e-3 for name in shows), found
