"""The kernels of the gated delta rule compiled for Hopper without one: what their binaries are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from cp_engine.kernels.gdn.triton import (
    backward_pass,
    dqkwg,
    dqkwg_tiles,
    forward_pass,
    inside,
    output,
    solve_backward,
    twigs,
)
from cp_engine.kernels.gdn.triton.chain_tables import CHAIN_COLUMNS, CHUNK_COLUMNS
from cp_engine.kernels.gdn.triton.launch import ALONE, STATE, WIDE_FROM, WIDE_STATE, state_sizes
from cp_engine.kernels.gdn.triton.primitives import Sizes
from tests.kernels.compiled import compile_for_hopper, is_tuned_compiler

ARGUMENT_TYPES = (
    dict.fromkeys(("g", "beta", "decay", "ends", "dexit", "dbelow", "dstarts", "dk_states", "dtotal", "dg"), "*fp32")
    | {"products": "*fp32", "dbeta": "*fp32", "ancestors": "*i64"}
    | dict.fromkeys(("chunks", "chains", "members", "reader_ptr", "reader", "twig_ptr", "twigs"), "*i32")
    | {
        "first_chain": "i32",
        "first_below": "i32",
        "first_kept": "i32",
        "slots": "i32",
        "tokens_in_all": "i32",
        "scale": "fp32",
    }
)
TABLES = {"CHUNK_COLUMNS": CHUNK_COLUMNS, "CHAIN_COLUMNS": CHAIN_COLUMNS}
HEADS = {"HK": 16, "H": 32, "K": 128, "V": 128, "C": 64, "PRECISION": "tf32", **TABLES}
PADDED = {"KP": 128, "VP": 128}
KEPT = {"KEEP": True, "STARTS": True, "EXITS": True, "TWIGS": True, "COLUMNS": 128}
UNKEPT = {"KEEP": False, "rows": None, "new_v": None, "dexit": None, "drows": None, "dnew_v": None}
# Slots are float32, the rows that other kernels read are not.
SLOTS, FLOAT32_DK, WHOLE_ROWS = {"states": "*fp32"}, {"dk": "*fp32"}, "tensordesc<bf16[64, 128]>"
TILES = FLOAT32_DK | dict.fromkeys(("dout", "new_v", "dnew_v", "states", "dstates"), WHOLE_ROWS)


@dataclass(frozen=True)
class Build:
    """A kernel as it is launched with 16 / 32 heads of 128."""

    kernel: object
    constants: dict
    warps: int
    stages: int
    types: dict = field(default_factory=dict)
    spilled: int = 0  # most bytes of a thread's stack
    options: dict = field(default_factory=dict)

    def compiled(self):
        return compile_for_hopper(
            self.kernel, HEADS | self.constants, ARGUMENT_TYPES | self.types, self.warps, self.stages, **self.options
        )


def states(constants: dict, sizes: Sizes, stages: int, by_tiles: bool = True) -> Build:
    constants = PADDED | {"BV": sizes.columns, "TILES": by_tiles} | constants
    types = SLOTS | (dict.fromkeys(("k", "w"), WHOLE_ROWS) if by_tiles else {})
    return Build(forward_pass._state_kernel, constants, sizes.warps, stages, types)


def adjoint(constants: dict, sizes: Sizes, spilled: int = 0, by_tiles: bool = True) -> Build:
    constants = PADDED | {"BV": sizes.columns, "TILES": by_tiles} | constants
    types = dict.fromkeys(("q", "k", "w"), f"tensordesc<bf16[64, {constants['KP']}]>") if by_tiles else {}
    return Build(backward_pass._adjoint_kernel, constants, sizes.warps, sizes.stages, types, spilled)


def chosen(key_dim: int, many: bool, alone: bool) -> Sizes:
    """Sizes of a launch over few or many states of bfloat16 rows, with values as long as keys."""
    return state_sizes(key_dim, key_dim, torch.bfloat16, WIDE_FROM if many else 1, alone)


BY_TILES = Build(dqkwg_tiles.dqkwg_tiles_kernel, {"BK": dqkwg.BLOCK_KEYS}, dqkwg.WARPS, dqkwg.STAGES, TILES)
BUILDS = {
    "states": states(KEPT, STATE, STATE.stages),
    "states alone": states(KEPT, STATE, ALONE),
    "wide states": states(KEPT, WIDE_STATE, WIDE_STATE.stages),
    "states without tiles": states(KEPT, STATE, STATE.stages, by_tiles=False),
    "summary": states(UNKEPT | {"COLUMNS": 256}, STATE, ALONE),
    "adjoint": adjoint(KEPT, STATE),
    "wide adjoint": adjoint(KEPT, WIDE_STATE),
    "wide adjoint without tiles": adjoint(KEPT, WIDE_STATE, spilled=32, by_tiles=False),
    "adjoint without tiles": adjoint(KEPT, STATE, by_tiles=False),
    "adjoint alone": adjoint(KEPT, chosen(128, many=False, alone=True)),
    "entry cotangents": adjoint(
        UNKEPT | {"STARTS": True, "EXITS": False, "TWIGS": True}, chosen(128, many=False, alone=True)
    ),
    "dv_local": Build(inside._value_gradient_kernel, PADDED | {"BK": 64}, inside.WARPS, inside.STAGES),
    "products": Build(inside._products_kernel, {"BK": 64}, inside.WARPS, inside.STAGES),
    "solve_backward": Build(
        solve_backward._solve_backward_kernel, PADDED | {"PARTS": 2}, solve_backward.WARPS, solve_backward.STAGES,
        spilled=96,
    ),
    "dqkwg without tiles": Build(
        dqkwg._dqkwg_kernel, {"BK": 64, "BV": 64}, dqkwg.WARPS, dqkwg.STAGES, FLOAT32_DK, 328,
        {"maxnreg": dqkwg.REGISTERS},
    ),
    "dqkwg": BY_TILES,
    "twigs": Build(twigs._twig_kernel, PADDED | {"BV": twigs.TWIGS.columns}, twigs.TWIGS.warps, twigs.TWIGS.stages),
    "output": Build(
        output._output_kernel, {"BK": 64, "BV": output.OUTPUT.columns}, output.OUTPUT.warps, output.OUTPUT.stages
    ),
}  # fmt: skip
SHARED = 227 * 1024
OF_TILES = [name for name, build in BUILDS.items() if any("tensordesc" in x for x in build.types.values())]
PIPELINED = BUILDS.keys() - {"twigs"}  # which has no loop


@pytest.mark.parametrize("name", BUILDS)
def test_compiles_for_hopper_without_one(name):
    """Every product on matrix units, and loads that the compiler pipelines (a loop around a loop it does not)."""
    build = BUILDS[name]
    pipelined = "cp.async.bulk.tensor" if name in OF_TILES else "cp.async"
    made = build.compiled()
    assert "wgmma.mma_async" in made.ptx and "mma.sync" not in made.ptx
    assert pipelined in made.ptx or name not in PIPELINED
    assert made.shared <= SHARED
    if is_tuned_compiler():
        assert made.spilled <= build.spilled, made.spilled


@pytest.mark.parametrize("name", OF_TILES)
def test_no_product_of_tiles_reads_what_was_transposed_in_registers(name):
    """That is wrong on Hopper before Triton 3.7.1."""
    turned = [line for line in BUILDS[name].compiled().ttgir.splitlines() if "tt.trans " in line]
    assert all("xf32" in line for line in turned), turned


@pytest.mark.parametrize("name", OF_TILES)
def test_no_tile_is_stored_or_read_inside_a_branch(name):
    """A store at a negative coordinate is an illegal instruction, and the pipeline forgets readers in branches."""
    made = BUILDS[name].compiled()
    assert "cp.async.bulk.tensor.2d.global" not in made.ptx
    branches = made.ttgir.split("scf.if")[1:]
    assert all("mutable" not in branch.split("\n      }")[0] for branch in branches)


@pytest.mark.parametrize(("size", "stages"), [(256, 1), (128, solve_backward.STAGES)])
def test_the_gradient_through_the_solve_fits(size, stages):
    heads = {"K": size, "V": size, "KP": size, "VP": size, "PARTS": size // 64}
    build = Build(solve_backward._solve_backward_kernel, heads, solve_backward.WARPS, stages)
    assert build.compiled().shared <= SHARED


@pytest.mark.parametrize("key_heads", [16, 32])
@pytest.mark.parametrize("size", [64, 128])
def test_the_reverse_pass_by_tiles_of_other_heads_fits(size, key_heads):
    """A wave with branch points and neither twigs nor exits, a level that chains start from and one that none does."""
    heads = {"K": size, "V": size, "KP": size, "VP": size, "HK": key_heads, "TWIGS": False, "EXITS": False}
    for sizes in (chosen(size, many=True, alone=False), chosen(size, many=False, alone=False)):
        for starts in (True, False):
            made = adjoint(KEPT | heads | {"STARTS": starts, "dexit": None}, sizes).compiled()
            assert made.shared <= SHARED and "cp.async.bulk.tensor" in made.ptx
            assert not is_tuned_compiler() or made.spilled <= 8, (sizes, starts, made.spilled)


@pytest.mark.parametrize(("many", "alone"), [(False, True), (True, False)])
def test_passes_over_large_states_fit(many, alone):
    sizes = chosen(256, many, alone)
    heads = {"K": 256, "V": 256, "KP": 256, "VP": 256}
    assert adjoint(KEPT | heads, sizes, by_tiles=False).compiled().shared <= SHARED
    forward = states(KEPT | heads | {"COLUMNS": 256}, sizes, sizes.stages, by_tiles=False)
    assert forward.compiled().shared <= SHARED
