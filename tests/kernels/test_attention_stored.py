"""The five-product backward compiled for Hopper without one, and what its benchmark refuses."""

import pytest

from benchmarks.attention_d256 import TRIALS, stored_of
from cp_engine.kernels.attention.triton import stored_pass
from cp_engine.kernels.attention.triton.blocks import KEY_ENTRY, ROW_ENTRY
from cp_engine.kernels.attention.triton.stored_pass import Stored

HEADS = {"QH": 16, "KH": 2, "D": 256, "DP": 256, "PACK": 8, "TOKENS": 16, "ROWS": 128, "BLOCK": 128}
ROWS = {"Q_ROW": 4096, "K_ROW": 512, "V_ROW": 512, "DOUT_ROW": 4096, "PRECISION": "tf32"}
COPIES = {"DESCRIBED": True, "COPIED": True}
TYPES = (
    dict.fromkeys(("entries", "places", "items"), "*i32")
    | dict.fromkeys(("first_entry", "first_slot", "slots", "query_rows", "key_rows"), "i32")
    | dict.fromkeys(("lse2", "delta", "dk", "dv"), "*fp32")
    | {"words": "*i64", "scale": "fp32", "scale_log2": "fp32"}
)
HOW = Stored()


@pytest.mark.parametrize(
    ("kernel", "constants", "tiles", "sizes"),
    [
        (
            stored_pass._scores_kernel,
            {"KEYS": HOW.scores.keys, "ENTRY": ROW_ENTRY, "DQ": False, "HELD": True},
            {"k": (HOW.scores.keys, 256), "v": (HOW.scores.keys, 256), "stored": (128, HOW.scores.keys)},
            HOW.scores,
        ),
        (
            stored_pass._dq_product_kernel,
            {"KEYS": HOW.product.keys, "ENTRY": ROW_ENTRY},
            {"k": (HOW.product.keys, 256), "stored": (128, HOW.product.keys)},
            HOW.product,
        ),
        (
            stored_pass._key_products_kernel,
            {"STEP": HOW.product.rows, "ENTRY": KEY_ENTRY},
            dict.fromkeys(("q", "dout"), (HOW.product.rows // 8, 8, 256)) | {"stored": (HOW.product.rows, 128)},
            HOW.product,
        ),
    ],
    ids=["scores", "dq", "dk dv"],
)
def test_compiles_for_hopper_without_one(kernel, constants, tiles, sizes):
    """All products on matrix units, tiles by bulk copies, and shared memory that a Hopper card has."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in (HEADS | ROWS | COPIES | constants).items() if name in kernel.arg_names}
    signature, places, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], places[(place,)] = "constexpr", constants[name]
        elif name in tiles:
            signature[name] = f"tensordesc<bf16[{','.join(map(str, tiles[name]))}]>"
        else:
            signature[name] = TYPES.get(name, "*bf16")
            if signature[name].startswith("*"):
                aligned[(place,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": sizes.warps, "num_stages": sizes.stages},
    )
    assert "wgmma.mma_async" in made.asm["ptx"] and "mma.sync" not in made.asm["ptx"]
    assert "cp.async.bulk.tensor" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024


def test_trials_name_what_they_change():
    assert stored_of(TRIALS[0]) == Stored()
    assert not stored_of("held+pointers").store_by_copy and stored_of("gib=2").workspace == 2 << 30
    for trial in ("later", "scores=1,2,3", "gib=x", "apart+"):
        with pytest.raises(ValueError, match="a trial is now, or apart, held, pointers, scores=, product= with four"):
            stored_of(trial)
