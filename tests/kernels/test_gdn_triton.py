"""The Triton GDN backend: in the interpreter against the float64 reference, and in bf16 and float32 on a GPU.

The interpreter has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cp_engine.kernels.gdn import triton as gdn
from cp_engine.kernels.gdn.triton import (
    backward_pass,
    dqkwg,
    dqkwg_tiles,
    dqkwg_walk,
    forward_pass,
    inside,
    launch,
    output,
    solve_backward,
)
from cp_engine.kernels.gdn.triton import solve_backward_from_solutions as from_solutions
from cp_engine.kernels.gdn.triton.chain_tables import CHAIN_COLUMNS, CHUNK_COLUMNS
from cp_engine.kernels.gdn.triton.launch import STATE, WIDE_STATE
from cp_engine.kernels.gdn.triton.primitives import Sizes
from tests.gdn_oracle import random_forest
from tests.kernels.gdn_cases import case, rank_plans, whole_plan
from tests.kernels.gdn_flat import share_of_bounds

ROOT = Path(__file__).parents[2]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "cases", ["interpreted_gdn", "interpreted_gdn_options", "interpreted_gdn_packing", "interpreted_gdn_rounding"]
)
def test_in_the_interpreter(cases):
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kernels/{cases}.py"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


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
        gdn.chain_tables(*arrays, p.exit_fragment, p.exit_entry, 0, len(mine.dout), chunk_size=20)


ARGUMENT_TYPES = (
    dict.fromkeys(("g", "beta", "decay", "ends", "dexit", "dbelow", "dstarts", "dk_states", "dtotal", "dg"), "*fp32")
    | {"products": "*fp32", "dbeta": "*fp32", "ancestors": "*i64"}
    | dict.fromkeys(("chunks", "chains", "members", "reader_ptr", "reader"), "*i32")
    | {"first_chain": "i32", "first_below": "i32", "tokens_in_all": "i32", "count": "i32", "scale": "fp32"}
)
TABLES = {"CHUNK_COLUMNS": CHUNK_COLUMNS, "CHAIN_COLUMNS": CHAIN_COLUMNS}
HEADS = {"HK": 16, "H": 32, "K": 128, "V": 128, "C": 64, "PRECISION": "tf32", **TABLES}
PADDED = {"KP": 128, "VP": 128}
COLUMNS, WIDE = PADDED | {"BV": STATE.columns}, PADDED | {"BV": WIDE_STATE.columns}
NO_TILES = {"TILES": False, "full_new_v": None, "full_dnew_v": None}
KEPT = NO_TILES | {"KEEP": True, "STARTS": True, "EXITS": True, "COLUMNS": 128}
UNKEPT = NO_TILES | {"KEEP": False, "rows": None, "new_v": None, "dexit": None, "drows": None, "dnew_v": None}
TILED = KEPT | {"TILES": True}


MORE = ("wide states", "wide adjoint", "dv_local", "products", "solve backward", "solve backward from w and u")


@pytest.mark.parametrize(
    ("kernel", "constants", "warps", "stages"),
    [
        (forward_pass._state_kernel, COLUMNS | KEPT, STATE.warps, STATE.stages),
        (forward_pass._state_kernel, COLUMNS | UNKEPT | {"COLUMNS": 256}, STATE.warps, STATE.stages),
        (
            backward_pass._adjoint_kernel,
            COLUMNS | KEPT,
            STATE.warps,
            STATE.stages,
        ),
        (backward_pass._adjoint_kernel, COLUMNS | UNKEPT | {"STARTS": True, "EXITS": False}, STATE.warps, STATE.stages),
        (forward_pass._state_kernel, WIDE | KEPT, WIDE_STATE.warps, WIDE_STATE.stages),
        (backward_pass._adjoint_kernel, WIDE | KEPT, WIDE_STATE.warps, WIDE_STATE.stages),
        (inside._value_gradient_kernel, PADDED | {"BK": 64}, inside.WARPS, inside.STAGES),
        (inside._products_kernel, {"BK": 64}, inside.WARPS, inside.STAGES),
        (solve_backward._solve_backward_kernel, PADDED | {"PARTS": 2}, solve_backward.WARPS, solve_backward.STAGES),
        (from_solutions.solve_backward_from_solutions_kernel, PADDED | {"PARTS": 2}, 8, 2),
        (dqkwg._dqkwg_kernel, {"BK": 64, "BV": 64}, dqkwg.WARPS, dqkwg.STAGES),
        (output._output_kernel, {"BK": 64, "BV": output.OUTPUT.columns}, output.OUTPUT.warps, output.OUTPUT.stages),
    ],
    ids=["states", "summary", "adjoint", "entry cotangents", *MORE, "dqkwg", "output"],
)
def test_compiles_for_hopper_without_one(kernel, constants, warps, stages):
    """Every product on matrix units, and loads that the compiler pipelines (a loop around a loop it does not)."""
    triton = pytest.importorskip("triton")
    made = compiled(triton, kernel, constants, warps, stages)
    assert "wgmma.mma_async" in made.asm["ptx"] and "mma.sync" not in made.asm["ptx"]
    assert "cp.async" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024


FULL = "tensordesc<bf16[64, 128]>"
OF_DQKWG = dict.fromkeys(("dout", "new_v", "dnew_v", "states", "dstates"), FULL)
OF_KEYS = dict.fromkeys(("q", "k"), "tensordesc<bf16[64, 64]>")


def of_columns(columns: int) -> dict[str, str]:
    """Types of the tensor descriptors of either state pass."""
    some = f"tensordesc<bf16[64, {columns}]>"
    rows = dict.fromkeys(("rows", "drows"), f"tensordesc<bf16[128, {columns}]>")
    return dict.fromkeys(("q", "k", "w"), FULL) | rows | dict.fromkeys(
        ("u", "dout", "dv_local", "full_new_v", "full_dnew_v"), some
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "constants", "types", "warps", "stages"),
    [
        (forward_pass._state_kernel, COLUMNS | TILED, of_columns(32), 4, 3),
        (forward_pass._state_kernel, WIDE | TILED, of_columns(64), 4, 2),
        (backward_pass._adjoint_kernel, COLUMNS | TILED, of_columns(32), 4, 2),
        (backward_pass._adjoint_kernel, WIDE | TILED, of_columns(64), 8, 2),
        (dqkwg_tiles.dqkwg_tiles_kernel, {"BK": 64}, OF_DQKWG, 8, 2),
        (dqkwg_walk.dqkwg_walk_kernel, {"BK": 64, "CHUNKS": 8}, OF_DQKWG | OF_KEYS, 8, 2),
    ],
    ids=["states", "wide states", "adjoint", "wide adjoint", "dqkwg", "dqkwg over chunks"],
)
def test_tiles_are_fetched_by_the_copy_unit(kernel, constants, types, warps, stages):
    """No product reads what was transposed in registers: that is wrong on Hopper before Triton 3.7.1."""
    made = compiled(pytest.importorskip("triton"), kernel, constants, warps, stages, types)
    assert "wgmma.mma_async" in made.asm["ptx"] and "mma.sync" not in made.asm["ptx"]
    assert "cp.async.bulk.tensor" in made.asm["ptx"]
    turned = [line for line in made.asm["ttgir"].splitlines() if "tt.trans " in line]
    assert all("xf32" in line for line in turned), turned
    assert made.metadata.shared <= 227 * 1024


def compiled(triton, kernel, constants, warps: int, stages: int, other_types=()):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in (HEADS | constants).items() if name in kernel.arg_names}
    signature, places, aligned = {}, {}, {}
    # Slots are float32, the rows that other kernels read are not.
    types = ARGUMENT_TYPES | ({"states": "*fp32"} if kernel is forward_pass._state_kernel else {})
    types |= {"dk": "*fp32"} if "dqkwg" in kernel.__name__ else {}
    types |= dict(other_types)
    constants = {name: value for name, value in constants.items() if name not in dict(other_types)}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "*bf16")
        if name in constants:
            places[(place,)] = constants[name]
        elif signature[name].startswith("*"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    at_most = {"maxnreg": dqkwg.registers()} if kernel is dqkwg._dqkwg_kernel else {}
    return triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages} | at_most,
    )


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


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("columns", "warps"), [(32, 2), (32, 4), (32, 8), (64, 4), (64, 8)])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_launch_option_on_gpu(monkeypatch, columns, warps, stages):
    """A wrong product under one option only has been seen in other kernels on Hopper."""
    monkeypatch.setattr(launch, "STATE", Sizes(columns, warps, stages))
    monkeypatch.setattr(launch, "WIDE_STATE", Sizes(columns, warps, stages))
    monkeypatch.setattr(launch, "ALONE", stages)
    monkeypatch.setattr(dqkwg, "BLOCK_KEYS", columns)
    monkeypatch.setattr(dqkwg, "BLOCK_VALUES", columns)
    monkeypatch.setattr(dqkwg, "WARPS", warps)
    monkeypatch.setattr(dqkwg, "STAGES", stages)
    check_on_gpu(case(whole_plan(random_forest(2, 20)), 0, (2, 4, 128, 128)).to("cuda", torch.bfloat16))
    plan = rank_plans(random_forest(0, 20), 0)[2]
    check_on_gpu(case(plan, 2, (2, 4, 128, 128)).to("cuda", torch.bfloat16))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("sizes", [Sizes(32, 4, 3, True), Sizes(64, 8, 2, True)], ids=["narrow", "wide"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_tiles_and_products_from_w_and_u_on_gpu(monkeypatch, sizes, chunks):
    monkeypatch.setattr(dqkwg, "CHUNKS", chunks)
    for name in ("STATE", "WIDE_STATE"):
        monkeypatch.setattr(launch, name, sizes)
    monkeypatch.setattr(dqkwg, "TILES", True)
    monkeypatch.setattr(solve_backward, "FROM_SOLUTIONS", True)
    check_on_gpu(case(whole_plan(random_forest(2, 20)), 0, (2, 4, 128, 128)).to("cuda", torch.bfloat16))
    plan = rank_plans(random_forest(0, 20), 0)[2]
    check_on_gpu(case(plan, 2, (2, 4, 128, 128)).to("cuda", torch.bfloat16))


@pytest.mark.gpu
@on_gpu
def test_runs_are_equal_to_the_bit():
    mine = case(whole_plan(random_forest(3, 40)), 0, (2, 4, 128, 128)).to("cuda", torch.bfloat16)
    for first, second in zip(mine.run(mine.tables()), mine.run(mine.tables()), strict=True):
        assert torch.equal(first, second)
