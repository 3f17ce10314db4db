import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cp_engine.kernels.conv import Channels, conv_tables, qkv, triton
from cp_engine.kernels.conv.reference import conv_backward, conv_forward
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import contiguous_layout
from tests.gdn_oracle import forest_of_segments, random_forest
from tests.kernels.compiled import compile_for_hopper, is_tuned_compiler


def whole_tables(forest, width):
    plan = gdn_plan(forest, contiguous_layout(forest, 1), 0, "affine", width)
    return conv_tables(plan.fragment_row, plan.history, forest.tokens, 0)


def test_closed_form():
    # Parent 1, 2, 3 with children 6, 7 | 4 | 5 (heaviest child first).
    forest = forest_of_segments([(-1, 3), (0, 1), (0, 1), (0, 2)])
    x = torch.tensor([1.0, 2, 3, 6, 7, 4, 5], dtype=torch.float64)[:, None]
    weight = torch.tensor([[1.0, 10, 100, 1000]], dtype=torch.float64)
    out = conv_forward(x, weight, whole_tables(forest, 4).taps)
    assert out[:, 0].tolist() == [1000, 2100, 3210, 6321, 7632, 4321, 5321]


@pytest.mark.parametrize("width", [2, 3, 4, 7])
def test_every_path_alone(width):
    forest = random_forest(width, segments=14)
    torch.manual_seed(width)
    x = torch.randn(forest.tokens, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(forest.tokens, 3, dtype=torch.float64)
    taps = whole_tables(forest, width).taps
    out = conv_forward(x.detach(), weight.detach(), taps)
    grads = conv_backward(x.detach(), weight.detach(), taps, dout)

    # The oracle climbs from every token to its root.
    truth = []
    for token in range(forest.tokens):
        path = [token]
        while forest.token_parent[path[0]] >= 0 and len(path) < width:
            path.insert(0, int(forest.token_parent[path[0]]))
        window = F.pad(x[path].T, (width - len(path), 0))
        truth.append((window * weight).sum(1))
    truth = torch.stack(truth)
    expected = torch.autograd.grad((truth * dout).sum(), (x, weight))
    for a, e in zip((out, *grads), (truth, *expected), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-13, atol=1e-13)


def test_fetched_rows_and_padding():
    # One fragment of two rows whose history is one fetched row, and a padding row.
    tables = conv_tables(np.array([0, 2]), np.array([[-1, 3]]), rows=3, fetched=1)
    x = torch.tensor([[1.0], [2], [torch.nan], [5]])
    weight = torch.tensor([[1.0, 10, 100]])
    assert conv_forward(x, weight, tables.taps)[:, 0].tolist() == [150, 215, 0]
    dx, _ = conv_backward(x, weight, tables.taps, torch.ones(3, 1))
    assert dx[:, 0].tolist() == [110, 100, 0, 11]


def test_bfloat16_sums_in_float32():
    # 300 siblings below one token: a bfloat16 sum of their gradients would stop at 256.
    forest = forest_of_segments([(-1, 1)] + [(0, 1)] * 300)
    x = torch.zeros(301, 1, dtype=torch.bfloat16)
    weight, dout = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(301, 1, dtype=torch.bfloat16)
    dx, _ = conv_backward(x, weight, whole_tables(forest, 2).taps, dout)
    assert dx[0].item() == torch.tensor(301.0).bfloat16().item()


def test_weight_shape_is_checked():
    forest = forest_of_segments([(-1, 3)])
    with pytest.raises(ValueError, match=r"\[5, 4\], got \[5, 3\]: plan with conv_width"):
        qkv(torch.zeros(3, 5), None, torch.zeros(5, 3), whole_tables(forest, 4), Channels(1, 1, 1, 3), "reference")


OF_KEYS = {"FIRST": 2048, "C": 8192, "H": 16, "D": 128, "DP": 128, "W": 4, "WP": 4, "NORM": True, "EPS": 1e-6}
OF_ROWS = {"CHANNELS": 128, "BLOCKS": 64, "ENTRIES": 16, "HOME": True}
TYPES = dict.fromkeys(("taps", "late", "following", "pointers", "entries", "places"), "*i32")
TYPES |= dict.fromkeys(("weight", "dweight", "home"), "*fp32") | dict.fromkeys(("rows", "used", "total"), "i32")


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize(
    ("kernel", "rows", "warps"),
    [
        ("_qkv_kernel", triton.ROWS, triton.WARPS),
        ("_values_kernel", triton.VALUE_ROWS, triton.VALUE_WARPS),
        ("_rows_kernel", triton.ROWS, triton.WARPS),
    ],
)
def test_compiles_for_hopper_without_spills(kernel, rows, warps, fetched):
    constants = OF_KEYS | OF_ROWS | {"ROWS": rows, "SPLITS": triton.SPLITS, "FETCHED": fetched}
    made = compile_for_hopper(getattr(triton, kernel), constants, TYPES, warps)
    assert made.spilled == 0
    if is_tuned_compiler():
        # Twelve warps on a multiprocessor at least, with loads of 16 bytes a thread.
        assert made.registers <= 168
        assert "ld.global.v4" in made.ptx
    if kernel == "_values_kernel":
        assert made.shared == 0 and "bar.sync" not in made.ptx
