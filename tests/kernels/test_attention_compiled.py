"""The Triton attention kernels compiled without a GPU: for Hopper what their binaries are made of, for cards with less
shared memory that they fit into it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from cp_engine.kernels.attention.triton import backward_pass, forward_pass
from cp_engine.kernels.attention.triton.primitives import SHORT_SIZES, SIZES, Sizes, kernel_sizes, row_source
from cp_engine.kernels.attention.triton.tiles import ENTRY, WORD
from cp_engine.kernels.shared.triton import padded
from tests.kernels.compiled import Compiled, compile_for, is_tuned_compiler

PACK, KV_HEADS = 4, 2
HOPPER = 90
REGISTERS, SHARED = 65_536, 228 << 10  # of a multiprocessor
RESERVED = 1 << 10  # bytes of shared memory that a program takes besides its own
TYPES = (
    dict.fromkeys(("entries", "range_lo", "range_tiles", "border_lo"), "*i32")
    | dict.fromkeys(("lse", "lse2", "delta"), "*fp32")
    | dict.fromkeys(("query_rows", "key_rows"), "i32")
    | dict.fromkeys(("scale", "scale_log2"), "fp32")
)
KERNELS = {
    "forward": forward_pass._forward_kernel,
    "dq": backward_pass._dq_kernel,
    "dkdv": backward_pass._dkdv_kernel,
}
# Left operands of a loop's products: the number of an owned tile, or None for what was computed.
LEFT = {"forward": (0, None), "dq": (0, 1, None), "dkdv": (0, None, 1, None)}
MOST_SPILLED = {("dq", 64): 72, ("dkdv", 128): 40}  # bytes of a thread


def compiled(kernel: str, sizes: Sizes, size: int, capability: int = HOPPER) -> Compiled:
    """A kernel in bfloat16 as it is launched for eight query and two kv heads, on a card of this capability."""
    tokens, copied = sizes.rows // PACK, capability >= HOPPER and size == padded(size)
    # Descriptors are made on a CPU as on such a card.
    owned = row_source(torch.empty(1, PACK, size, dtype=torch.bfloat16), sizes, PACK)[1] or kernel == "dkdv"
    constants = {"QH": KV_HEADS * PACK, "KH": KV_HEADS, "D": size, "DP": padded(size), "PACK": PACK, "TOKENS": tokens}
    constants |= {"ROWS": sizes.rows, "KEYS": sizes.keys, "PRECISION": "tf32", "ENTRY": ENTRY, "HELD": sizes.held}
    constants |= {"DESCRIBED": copied, "OWNED": copied and owned}
    constants |= dict.fromkeys(("Q_ROW", "OUT_ROW", "DOUT_ROW"), KV_HEADS * PACK * size)
    constants |= dict.fromkeys(("K_ROW", "V_ROW"), KV_HEADS * size)
    walked = sizes.keys
    if kernel == "dkdv":
        constants["PARTS"] = max(1, backward_pass.LISTED_TOKENS // tokens)
        constants |= {"DK": True, "DV": True}
        walked = tokens * constants["PARTS"]
    types = TYPES | {"words": f"*i{next(bits for bits in (8, 16, 32, 64) if min(walked, WORD) <= bits)}"}
    if copied:
        types |= dict.fromkeys("kv", f"tensordesc<bf16[{sizes.keys},{size}]>")
        rows = ("q", "dout") if kernel == "dkdv" else ("q",) if owned else ()
        types |= dict.fromkeys(rows, f"tensordesc<bf16[{tokens},{PACK},{size}]>")
    function = KERNELS[kernel]
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    return compile_for(capability, function, constants, types, sizes.warps, sizes.stages)


def left_operands(ttgir: str, loops: int = 2) -> list[str]:
    """Where Hopper's products in loops have their left operands, in the order of the loop of full tiles."""
    found = re.findall(r"ttng\.warp_group_dot .* : (tensor|!ttg\.memdesc)<(\d+x\d+)x\S+.*? \* .* -> ", ttgir)
    places = ["registers" if place == "tensor" else "shared" for place, extent in found if not extent.endswith("x16")]
    assert len(places) % loops == 0 and places[: len(places) // loops] == places[len(places) // loops :]
    return places[: len(places) // loops]


@pytest.mark.parametrize(
    ("kernel", "size", "short", "programs"),
    [
        ("forward", 64, False, 2),
        ("forward", 128, False, 2),
        ("forward", 128, True, 3),
        ("dq", 64, False, 2),
        ("dq", 128, False, 2),
        ("dq", 128, True, 3),
        ("dkdv", 64, False, 2),
        ("dkdv", 128, False, 2),
    ],
)
def test_kernels_compile_for_hopper_without_one(kernel, size, short, programs):
    """Products on matrix units, tiles by bulk copies, owned tiles in registers where held, and room for others."""
    sizes = (SHORT_SIZES if short else SIZES)[kernel][size]
    made = compiled(kernel, sizes, size)
    assert "wgmma.mma_async" in made.ptx and "mma.sync" not in made.ptx
    assert "cp.async.bulk.tensor" in made.ptx
    assert programs * (made.shared + RESERVED) <= SHARED
    if not is_tuned_compiler():
        return
    assert made.spilled <= MOST_SPILLED.get((kernel, size), 0)
    per_thread = -(-made.registers // 8) * 8
    assert programs * per_thread * 32 * sizes.warps <= REGISTERS
    places = ["registers" if owned is None or owned < sizes.held else "shared" for owned in LEFT[kernel]]
    assert left_operands(made.ttgir) == places


def test_rows_through_pointers_are_held_too():
    """Head size 96 is no power of two. Planted fault: sizes that hold nothing."""
    if not is_tuned_compiler():
        pytest.skip("other compilers place operands elsewhere")
    for held, places in ((2, ["registers"] * 3), (0, ["shared", "shared", "registers"])):
        made = compiled("dq", Sizes(64, 64, 4, 3, held), 96)
        assert left_operands(made.ttgir) == places


@pytest.mark.parametrize(("capability", "kib"), [(80, 163), (86, 99), (120, 99)])
def test_kernels_fit_into_less_shared_memory(monkeypatch, capability, kib):
    """Cards without Hopper's matrix units give held tiles a place in shared memory all the same."""
    room = SimpleNamespace(shared_memory_per_block_optin=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: room)
    for kernel in KERNELS:
        sizes = kernel_sizes(kernel, 128, torch.bfloat16, torch.device("cuda"))
        assert compiled(kernel, sizes, 128, capability).shared <= kib << 10, kernel
