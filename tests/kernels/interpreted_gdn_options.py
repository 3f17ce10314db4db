"""Both kernels of `dqkwg` with several blocks of keys, in the interpreter; `test_gdn_triton.py` runs this file."""

import tests.kernels.interpreted  # isort: skip  # noqa: F401  # before anything that imports Triton

import pytest

from cp_engine.kernels.gdn.triton import backward_pass, dqkwg, forward_pass, packing
from tests.gdn_oracle import forest_of_segments, random_forest
from tests.kernels.gdn_cases import NAMES, case, rank_plans, whole_plan
from tests.kernels.interpreted_gdn import (
    BOUND,
    CHAIN_TABLES,
    errors,
    lost_exit_gradient,
    one_configuration,  # noqa: F401
    small_case,
    swapped_sibling_rows,
)


@pytest.fixture(autouse=True)
def nothing_packed(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_SPARED", 2.0)
    monkeypatch.setattr(CHAIN_TABLES, "MOST_TWIGS", 0)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(dqkwg, "BLOCK_KEYS", 16)


@pytest.fixture
def without_tiles(monkeypatch):
    for module in (backward_pass, dqkwg, forward_pass):
        monkeypatch.setattr(module, "tiles_fit", lambda *_: False)


@pytest.fixture(params=["tiles", "no tiles"])
def either(request):
    if request.param == "no tiles":
        request.getfixturevalue("without_tiles")


@pytest.mark.parametrize(("keys", "spared"), [("low rank", 0.0), ("random", 2.0)], ids=["packed", "random keys"])
def test_equals_the_reference(keys, spared, either, monkeypatch):
    monkeypatch.setattr(packing, "LEAST_SPARED", spared)
    # Chunks that are full, partial, and of several fragments; a root of its own; leaves.
    forest = forest_of_segments([(-1, 130), (0, 64), (0, 5), (2, 1), (2, 3), (0, 9), (-1, 66), (6, 2)])
    found = errors(case(whole_plan(forest), 0, (1, 2, 32, 32), keys))
    assert max(found.values()) <= BOUND, found


def test_equals_the_reference_on_several_ranks(without_tiles):
    for rank, plan in enumerate(rank_plans(random_forest(0, 7), 0)):
        found = errors(case(plan, rank, (1, 1, 32, 16)))
        assert max(found.values()) <= BOUND, (rank, found)


@pytest.mark.parametrize("fault", [swapped_sibling_rows, lost_exit_gradient])
def test_planted_faults_show_without_tiles(fault, without_tiles):
    mine = small_case()
    found = errors(mine, fault(mine.tables()))
    assert max(found[name] for name in NAMES if name in found) > 1e-3, found


@pytest.mark.parametrize("heads", [(1, 1, 16, 16), (1, 1, 20, 16), (1, 1, 16, 48), (1, 1, 16, 256)])
def test_tiles_are_taken_wherever_they_fit(heads, monkeypatch):
    def refuses(*_args, **_options):
        raise AssertionError("taken")

    refusing = type("Kernel", (), {"__getitem__": refuses})()
    fits = heads == (1, 1, 16, 16)
    monkeypatch.setattr(dqkwg, "dqkwg_tiles_kernel" if fits else "_dqkwg_kernel", refusing)
    with pytest.raises(AssertionError, match="taken"):
        errors(case(whole_plan(forest_of_segments([(-1, 3)])), 0, heads))


class Recorded:
    """A kernel that notes whether it was given tiles."""

    def __init__(self, kernel):
        self.kernel, self.tiles = kernel, set()

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.tiles.add(options["TILES"])
            return self.kernel[grid](*arguments, **options)

        return launch


@pytest.mark.parametrize(("keys", "fits"), [(16, True), (20, False), (256, False)])
def test_both_state_passes_take_tiles_of_the_same_keys(keys, fits, monkeypatch):
    passes = [(forward_pass, "_state_kernel"), (backward_pass, "_adjoint_kernel")]
    kernels = [Recorded(getattr(module, name)) for module, name in passes]
    for (module, name), kernel in zip(passes, kernels, strict=True):
        monkeypatch.setattr(module, name, kernel)
    found = errors(case(whole_plan(forest_of_segments([(-1, 70), (0, 3), (0, 2)])), 0, (1, 2, keys, 48)))
    assert max(found.values()) <= BOUND, found
    assert [kernel.tiles for kernel in kernels] == [{fits}, {fits}]
