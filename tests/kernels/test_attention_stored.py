"""The five-product backward compiled for Hopper without one, and when the Triton backend takes it."""

from types import SimpleNamespace

import pytest
import torch

from cp_engine.kernels.attention import triton as backend
from cp_engine.kernels.attention.triton import stored_pass
from cp_engine.kernels.attention.triton.blocks import KEY_ENTRY, ROW_ENTRY
from tests.kernels.compiled import compile_for_hopper, is_tuned_compiler

HOW = stored_pass.IN_USE
MOST_SPILLED = 224  # bytes of a thread; 5 loads of 4 bytes in the loop of full tiles
TYPES = (
    dict.fromkeys(("entries", "places", "items"), "*i32")
    | dict.fromkeys(("first_entry", "first_slot", "slots", "query_rows", "key_rows"), "i32")
    | dict.fromkeys(("lse", "dk", "dv"), "*fp32")
    | {"words": "*i64", "scale": "fp32", "scale_log2": "fp32"}
)


def constants_of(size: int, pack: int, kv_heads: int) -> dict:
    heads = {"QH": kv_heads * pack, "KH": kv_heads, "D": size, "DP": 256, "PACK": pack}
    heads |= {"TOKENS": HOW.scores.rows // pack}
    rows = dict.fromkeys(("Q_ROW", "OUT_ROW", "DOUT_ROW"), kv_heads * pack * size)
    rows |= dict.fromkeys(("K_ROW", "V_ROW"), kv_heads * size)
    return heads | rows | {"ROWS": HOW.scores.rows, "BLOCK": HOW.product.keys, "PRECISION": "tf32"}


def tile(*extents: int) -> str:
    return f"tensordesc<bf16[{','.join(map(str, extents))}]>"


@pytest.mark.parametrize(("size", "pack", "kv_heads"), [(256, 8, 2), (256, 8, 1), (256, 6, 2), (192, 8, 1)])
def test_kernels_compile_for_hopper_without_one(size, pack, kv_heads):
    """Products on matrix units, blocks by bulk copies, and the shared memory and registers of a Hopper card.

    Rows come by bulk copies too where a tile of 128 rows holds whole tokens and a head's size is a power of two.
    """
    constants = constants_of(size, pack, kv_heads)
    copied = size == 256
    keys = dict.fromkeys("kv", tile(HOW.scores.keys, 256)) if copied else {}
    made = [
        compile_for_hopper(
            stored_pass._scores_kernel,
            constants | {"KEYS": HOW.scores.keys, "ENTRY": ROW_ENTRY, "DESCRIBED": copied, "HELD": HOW.scores.held},
            TYPES | keys | {"stored": tile(2, HOW.scores.rows, HOW.scores.keys)},
            HOW.scores.warps,
            HOW.scores.stages,
        )
    ]
    copied &= HOW.scores.rows % pack == 0
    rows = dict.fromkeys(("q", "dout"), tile(HOW.product.rows // pack, pack, 256)) if copied else {}
    made.append(
        compile_for_hopper(
            stored_pass._key_products_kernel,
            constants | {"STEP": HOW.product.rows, "ENTRY": KEY_ENTRY, "DESCRIBED": copied},
            TYPES | rows | {"stored": tile(HOW.product.rows, HOW.product.keys)},
            HOW.product.warps,
            HOW.product.stages,
        )
    )
    for kernel in made:
        assert "wgmma.mma_async" in kernel.ptx and "mma.sync" not in kernel.ptx
        assert "cp.async.bulk.tensor" in kernel.ptx
        assert kernel.shared <= 227 * 1024
        if is_tuned_compiler():
            assert kernel.spilled <= MOST_SPILLED


def rows(dtype: torch.dtype, size: int, device: str = "cuda") -> SimpleNamespace:
    """As much of a tensor as the choice of a backend reads."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(0, 1, size))


def test_the_backend_takes_it_in_16_bits_at_large_head_sizes_on_hopper(monkeypatch):
    card = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (card[0], 0))
    for dtype in (torch.bfloat16, torch.float16):
        assert [size for size in (16, 128, 129, 192, 256) if backend.stores(rows(dtype, size))] == [129, 192, 256]
    assert not backend.stores(rows(torch.float32, 256)) and not backend.stores(rows(torch.bfloat16, 256, "cpu"))
    for capability in (8, 10):
        card[0] = capability
        assert not backend.stores(rows(torch.bfloat16, 256))
