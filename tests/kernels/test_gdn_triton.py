"""The Triton GDN backend: in the interpreter against the float64 reference, and in bf16 and float32 on a GPU.

The interpreter has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from cp_engine.kernels.gdn import triton as gdn
from cp_engine.kernels.gdn.triton import backward_pass, dqkwg, forward_pass, launch
from tests.gdn_oracle import random_forest
from tests.in_interpreter import pass_in_the_interpreter
from tests.kernels.gdn_cases import Case, case, rank_plans, whole_plan
from tests.kernels.gdn_flat import share_of_bounds

# Of the state passes: sizes, and stages of a pass with no other beside it.
OPTIONS = [
    (launch.STATE, launch.STATE.stages),
    (replace(launch.STATE, stages=launch.ALONE), launch.ALONE),
    (launch.WIDE_STATE, launch.WIDE_STATE.stages),
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "cases",
    [
        "interpreted_gdn",
        "interpreted_gdn_begun",
        "interpreted_gdn_options",
        "interpreted_gdn_packing",
        "interpreted_gdn_rounding",
        "interpreted_gdn_rounds",
        "interpreted_gdn_twigs",
    ],
)
def test_in_the_interpreter(cases):
    pass_in_the_interpreter(f"tests/kernels/{cases}.py")


def test_refusals_name_the_remedy(monkeypatch):
    mine = case(whole_plan(random_forest(0, 3)), 0, (1, 1, 16, 16))
    tables = mine.tables()
    with pytest.raises(ValueError, match="gdn backend triton needs "):
        gdn.chunk_stages(mine.inputs, tables)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if gdn.why_not(mine.inputs.k, mine.inputs.v) is None:
        wide = mine.to("cpu", torch.float64).inputs
        with pytest.raises(ValueError, match="computes float32, bfloat16 and float16; got torch.float64"):
            gdn.chunk_stages(wide, tables)
        large = torch.zeros(1, 1, 512)
        assert "needs head sizes up to 256; got 512 and 512" in gdn.why_not(large, large)
    p = mine.plan
    arrays = (p.fragment_row, p.fragment_parent, p.fragment_entry, p.chain_fragment, p.chain_level)
    with pytest.raises(ValueError, match="chunk_size of the Triton backend must be 16, 32 or 64, got 20"):
        gdn.chain_tables(*arrays, p.exit_fragment, p.exit_entry, p.entry_level, len(mine.dout), chunk_size=20)


@pytest.fixture(scope="module", autouse=True)
def flas_kernels_untuned():
    """fla's kernels with the first of their options: to tune the three of them takes 27 compilations a head size, and
    `tests/layers/test_gdn_gpu.py` runs them tuned."""
    if not torch.cuda.is_available():
        yield
        return
    from benchmarks.gdn_tuning import fla_autotuners

    options = [(tuner, tuner.configs) for tuner in fla_autotuners()]
    for tuner, configs in options:
        tuner.configs = configs[:1]
    yield
    for tuner, configs in options:
        tuner.configs = configs


def check_on_gpu(mine) -> None:
    used = share_of_bounds(mine)
    assert max(used.values(), default=0.0) <= 1, used


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("keys", ["random", "low rank"])
@pytest.mark.parametrize("rank", range(3))
def test_bf16_on_gpu(rank, keys):
    plan = rank_plans(random_forest(0, 40), 0)[rank]
    check_on_gpu(case(plan, rank, (2, 4, 128, 128), keys).to("cuda", torch.bfloat16))


@pytest.mark.gpu
@on_gpu
def test_float32_on_gpu():
    check_on_gpu(case(whole_plan(random_forest(1, 20)), 0, (2, 4, 128, 128)).to("cuda", torch.float32))


@cache
def two_cases() -> tuple[Case, Case]:
    """A tree, and a rank below entries; kept, with their truth, for all launch options."""
    whole = case(whole_plan(random_forest(2, 20)), 0, (2, 4, 128, 128))
    below = case(rank_plans(random_forest(0, 20), 0)[2], 2, (2, 4, 128, 128))
    return tuple(mine.to("cuda", torch.bfloat16) for mine in (whole, below))


def check_two_cases_on_gpu() -> None:
    for mine in two_cases():
        check_on_gpu(mine)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("sizes", "alone"), OPTIONS, ids=["narrow", "narrow, 3 stages", "wide"])
def test_every_option_in_use_of_the_state_passes_on_gpu(monkeypatch, sizes, alone):
    """Each for all launches: a wrong product under one option only has been seen in other kernels on Hopper."""
    monkeypatch.setattr(launch, "STATE", sizes)
    monkeypatch.setattr(launch, "WIDE_STATE", sizes)
    monkeypatch.setattr(launch, "ALONE", alone)
    check_two_cases_on_gpu()


@pytest.mark.gpu
@on_gpu
def test_without_tiles_on_gpu(monkeypatch):
    for module in (backward_pass, dqkwg, forward_pass):
        monkeypatch.setattr(module, "tiles_fit", lambda *_: False)
    check_two_cases_on_gpu()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("heads", [(2, 4, 64, 64), (1, 2, 256, 128), (1, 2, 96, 80)], ids=str)
def test_other_head_sizes_on_gpu(heads):
    check_on_gpu(case(whole_plan(random_forest(2, 10)), 0, heads).to("cuda", torch.bfloat16))


@pytest.mark.gpu
@on_gpu
def test_large_heads_below_entries_on_gpu(monkeypatch):
    """Of many states, some of them walked with no other pass beside."""
    monkeypatch.setattr(launch, "WIDE_FROM", 1)
    plan = rank_plans(random_forest(0, 20), 0)[2]
    check_on_gpu(case(plan, 2, (1, 2, 256, 256)).to("cuda", torch.bfloat16))


@pytest.mark.gpu
@on_gpu
def test_runs_are_equal_to_the_bit():
    mine = case(whole_plan(random_forest(3, 40)), 0, (2, 4, 128, 128)).to("cuda", torch.bfloat16)
    for first, second in zip(mine.run(mine.tables()), mine.run(mine.tables()), strict=True):
        assert torch.equal(first, second)
