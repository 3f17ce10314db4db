"""The reference attention kernel against closed forms and dense float64 attention."""

import math

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward, prepare, reference
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.intervals import RowIntervals, visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import closed_form_rows, random_rows, random_variety
from tests.kernels.attention_oracle import (
    Tensors,
    dense_attention,
    error_bounds,
    poisoned_memory,
    random_tensors,
    relative_error,
    visible,
)

NAMES = ("out", "lse", "dq", "dk", "dv")


def whole(forest) -> Intervals:
    return Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0))


def run_kernel(x, intervals, accumulate=False) -> dict[str, torch.Tensor]:
    out, lse = attention(x.q, x.k, x.v, intervals, scale=x.scale)
    grads = attention_backward(
        x.q, x.k, x.v, out, lse, x.dout, intervals, scale=x.scale, accumulate_q=accumulate, accumulate_kv=accumulate
    )
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def test_closed_form_of_uniform_attention():
    forest = closed_form_rows().forest
    token = torch.as_tensor(forest.token, dtype=torch.float64)
    q, v = torch.zeros(9, 1, 1, dtype=torch.float64), token[:, None, None]
    out, lse = attention(q, v, v, whole(forest), scale=1.0)
    expected = {11: 11, 12: 11.5, 13: 12, 14: 12.5, 15: 13, 21: 14.2, 22: 15.5, 31: 18, 41: 41}
    path = {11: 1, 12: 2, 13: 3, 14: 4, 15: 5, 21: 5, 22: 6, 31: 3, 41: 1}
    for row, name in enumerate(forest.token.tolist()):
        assert out[row].item() == pytest.approx(expected[name], abs=1e-14)
        assert lse[row].item() == pytest.approx(math.log(path[name]), abs=1e-15)
    # Every token takes 1/len(path) of the gradient of each token that sees it: 11 lies on every path but 41's.
    dv = attention_backward(q, v, v, out, lse, torch.ones_like(q), whole(forest), scale=1.0)[2]
    row = forest.token.tolist().index
    seen_by_11 = sum(1 / length for name, length in path.items() if name != 41)
    assert dv[row(11)].item() == pytest.approx(seen_by_11, abs=1e-14)
    assert dv[row(41)].item() == 1.0


# Blocks of 5 rows cut runs and mix them; 128 is the kernel's own size.
@pytest.mark.parametrize("block_rows", [5, 128])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def test_float64_equals_dense_attention(monkeypatch, block_rows, heads):
    monkeypatch.setattr(reference, "BLOCK_ROWS", block_rows)
    for seed in range(12):
        forest = random_variety(seed).forest
        x = random_tensors(forest.tokens, heads, 12, seed, key_rank=2 if seed % 3 == 1 else None)
        with poisoned_memory():
            got = run_kernel(x, whole(forest))
        truth = dense_attention(visible(forest), x)
        for name in NAMES:
            assert relative_error(got[name], truth[name]) < 1e-12, (seed, name)


def test_several_blocks_of_a_deep_forest():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, 300)
    rows = [np.concatenate([trunk[: rng.integers(200, 300)], rng.integers(0, 50, 90)]) for _ in range(6)]
    rows += [rng.integers(50, 99, 40) for _ in range(4)]
    forest = build_forest(np.concatenate(rows), np.cumsum([0] + [len(row) for row in rows]))
    assert forest.tokens > 5 * reference.BLOCK_ROWS
    x = random_tensors(forest.tokens, (4, 2), 16, 0)
    got, truth = run_kernel(x, whole(forest)), dense_attention(visible(forest), x)
    for name in NAMES:
        assert relative_error(got[name], truth[name]) < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_stays_within_derived_bounds(dtype):
    for seed in range(6):
        forest = random_rows(seed, rows=20, longest=20).forest
        x = random_tensors(forest.tokens, (6, 2), 16, seed, dtype)
        got, mask = run_kernel(x, whole(forest)), visible(forest)
        truth, bounds = dense_attention(mask, x), error_bounds(mask, x)
        assert got["lse"].dtype == torch.float32
        for name in NAMES:
            assert name == "lse" or got[name].dtype == dtype
            error = (got[name].double() - truth[name]).abs()
            assert (error <= bounds[name]).all(), (seed, name, float((error / bounds[name]).max()))
            # A bound that says nothing proves nothing.
            meaningful = 2e-3 if dtype == torch.float32 else 0.2
            assert bounds[name].max() < meaningful * truth[name].abs().max(), (seed, name)


def test_accumulate_returns_the_unrounded_gradients():
    forest = random_rows(3).forest
    x = random_tensors(forest.tokens, (4, 2), 8, 0, torch.bfloat16)
    rounded, kept = run_kernel(x, whole(forest)), run_kernel(x, whole(forest), accumulate=True)
    for name in ("dq", "dk", "dv"):
        assert kept[name].dtype == torch.float32
        assert torch.equal(kept[name].to(torch.bfloat16), rounded[name])
    out, _ = attention(x.q, x.k, x.v, whole(forest), scale=x.scale, accumulate=True)
    assert out.dtype == torch.float32 and torch.equal(out.to(torch.bfloat16), rounded["out"])


def test_results_go_where_they_are_wanted():
    forest = random_rows(3).forest
    x = random_tensors(forest.tokens, (4, 2), 8, 0, torch.bfloat16)
    given, call = (x.q, x.k, x.v), {"intervals": whole(forest), "scale": x.scale}
    rounded, kept = run_kernel(x, whole(forest)), run_kernel(x, whole(forest), accumulate=True)
    out, dq = (torch.full((forest.tokens, 6, 8), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    lse, wide_dq = torch.full((6, forest.tokens), torch.nan).T, torch.empty(4, forest.tokens, 8).transpose(0, 1)
    into, into_q = (out[:, 1:5], lse[:, 1:5]), dq[:, 1:5]
    made = attention(*given, **call, into=into)
    assert made[0] is into[0] and made[1] is into[1]
    assert attention_backward(*given, *made, x.dout, **call, into_q=into_q)[0] is into_q
    assert attention_backward(*given, *made, x.dout, **call, into_q=wide_dq, accumulate_q=True)[0] is wide_dq
    for name, got in zip(("out", "lse", "dq"), (*into, into_q), strict=True):
        assert torch.equal(got, rounded[name])
    assert torch.equal(wide_dq, kept["dq"])
    assert all(part[:, [0, 5]].isnan().all() for part in (out, lse, dq))
    with pytest.raises(ValueError, match=r"into\[1\] must be torch.float32"):
        attention(*given, **call, into=(into[0], out[:, 1:5, 0]))
    with pytest.raises(ValueError, match="into_q must be torch.bfloat16"):
        attention_backward(*given, *made, x.dout, **call, into_q=wide_dq)


def test_other_branches_do_not_touch_a_bit():
    for seed in (1, 4, 7):
        forest = random_variety(seed).forest
        mask, intervals = visible(forest), whole(forest)
        x = random_tensors(forest.tokens, (4, 2), 8, seed, torch.float32)
        out, lse = attention(x.q, x.k, x.v, intervals, scale=x.scale)
        for token in np.random.default_rng(seed).permutation(forest.tokens)[:10].tolist():
            others = ~mask[token]
            assert not others[token]
            changed = [part.masked_fill(others[:, None, None], 1e3) for part in (x.q, x.k, x.v)]
            out_2, lse_2 = attention(*changed, intervals, scale=x.scale)
            assert torch.equal(out[token], out_2[token]) and torch.equal(lse[token], lse_2[token])


def _arrays(rows, run_row, run_length, spans, diag_lo, diag_hi) -> RowIntervals:
    flat = [span for of_run in spans for span in of_run]
    return RowIntervals(
        rows=rows,
        run_row=np.array(run_row, np.int64),
        run_length=np.array(run_length, np.int64),
        span_ptr=np.cumsum([0] + [len(of_run) for of_run in spans]),
        span_lo=np.array([lo for lo, _ in flat], np.int64),
        span_hi=np.array([hi for _, hi in flat], np.int64),
        diag_lo=np.array(diag_lo, np.int64),
        diag_hi=np.array(diag_hi, np.int64),
    )


def test_rows_that_see_nothing_and_keys_that_nobody_sees():
    """Rows 0 and 4 lie outside every run, run 1 (row 3) is empty; key 0 and keys from 5 on are seen by no one."""
    arrays = _arrays(5, [1, 3], [2, 1], [[(3, 5)], []], [1, -1], [2, -1])
    assert [arrays.of_row(row) for row in range(5)] == [[], [(3, 5), (1, 2)], [(3, 5), (1, 3)], [], []]
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[1, [1, 3, 4]] = mask[2, [1, 2, 3, 4]] = True
    x, y = random_tensors(5, (4, 2), 8, 0), random_tensors(7, (4, 2), 8, 1)
    with poisoned_memory():
        out, lse = attention(x.q, y.k, y.v, Intervals.from_arrays(arrays), scale=0.3)
        dq, dk, dv = attention_backward(x.q, y.k, y.v, out, lse, x.dout, Intervals.from_arrays(arrays), scale=0.3)
    blind = torch.tensor([0, 3, 4])
    assert (out[blind] == 0).all() and (lse[blind] == -torch.inf).all() and (dq[blind] == 0).all()
    unseen = torch.tensor([0, 5, 6])
    assert (dk[unseen] == 0).all() and (dv[unseen] == 0).all()
    for row in (1, 2):
        keys, values = (part[mask[row]].repeat_interleave(2, 1) for part in (y.k, y.v))
        scores = torch.einsum("hd,khd->hk", x.q[row], keys) * 0.3
        assert relative_error(out[row], torch.einsum("hk,khd->hd", scores.softmax(-1), values)) < 1e-14
        assert relative_error(lse[row], scores.logsumexp(-1)) < 1e-14


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0)])
def test_zero_rows(queries, keys):
    runs = ([0], [queries], [[]], [-1], [-1]) if queries else ([], [], [], [], [])
    intervals = Intervals.from_arrays(_arrays(queries, *runs))
    x, y = random_tensors(queries, (4, 2), 8, 0), random_tensors(keys, (4, 2), 8, 0)
    out, lse = attention(x.q, y.k, y.v, intervals, scale=1.0)
    dq, dk, dv = attention_backward(x.q, y.k, y.v, out, lse, x.dout, intervals, scale=1.0)
    assert out.shape == x.q.shape and (out == 0).all() and (lse == -torch.inf).all()
    assert dq.shape == x.q.shape and dk.shape == dv.shape == y.k.shape
    assert not any(grad.any() for grad in (dq, dk, dv))


def test_blocks_are_built_once():
    intervals = whole(random_rows(0).forest)
    x = random_tensors(intervals.rows, (2, 1), 4, 0)
    attention(x.q, x.k, x.v, intervals, scale=1.0)
    blocks = intervals.prepared("reference", reference.build_blocks)
    attention(x.q, x.k, x.v, intervals, scale=1.0)
    assert intervals.prepared("reference", reference.build_blocks) is blocks


def test_prepare_builds_what_calls_need():
    intervals = whole(random_rows(0).forest)
    shapes = {"query_heads": 2, "kv_heads": 1, "size": 4, "dtype": torch.float64}
    for backend, name in (("auto", "reference"), ("cudnn", "cudnn ends"), ("fa4", "rectangles")):
        assert name not in intervals._prepared
        prepare(intervals, **shapes, backend=backend)
        assert name in intervals._prepared
    with pytest.raises(ValueError, match="query heads must be a multiple of kv heads; got 2 and 3"):
        prepare(intervals, **(shapes | {"kv_heads": 3}))


def _refused(text: str, backend: str = "reference", **changes):
    intervals = whole(closed_form_rows().forest)
    x = random_tensors(9, (4, 2), 8, 0)
    arguments = {"q": x.q, "k": x.k, "v": x.v} | changes
    with pytest.raises(ValueError) as error:
        attention(**arguments, intervals=intervals, scale=1.0, backend=backend)
    assert text in str(error.value)


def test_arguments_that_do_not_fit_are_refused():
    x = random_tensors(9, (4, 2), 8, 0)
    _refused("attention backend must be one of auto, reference, triton, cudnn, fa4; got 'triton2'", backend="triton2")
    _refused("q must be [rows, heads, head size]; got shape [9, 4, 8, 1]", q=x.q[..., None])
    _refused("got torch.float64, torch.float32, torch.float64", k=x.k.float())
    _refused("one dtype of float64, float32, bfloat16, float16; got torch.int64", q=x.q.long())
    _refused("k and v must have one shape; got [9, 2, 8] and [8, 2, 8]", v=x.v[1:])
    _refused("q and k must have one head size; got 4 and 8", q=x.q[..., :4])
    _refused("query heads must be a multiple of kv heads; got 3 and 2", q=x.q[:, :3])
    _refused("the intervals are for 9 query rows; q has 8", q=x.q[1:])
    _refused("the intervals reach key row 8; k has 8 rows", k=x.k[1:], v=x.v[1:])


def test_backward_refuses_a_foreign_out_or_lse():
    intervals = whole(closed_form_rows().forest)
    x = random_tensors(9, (4, 2), 8, 0)
    out, lse = attention(x.q, x.k, x.v, intervals, scale=1.0)
    with pytest.raises(
        ValueError, match=r"dout must be like q, torch.float64 \[9, 4, 8\]; got torch.float32 \[9, 4, 8\]"
    ):
        attention_backward(x.q, x.k, x.v, out, lse, x.dout.float(), intervals, scale=1.0)
    with pytest.raises(ValueError, match=r"lse must be torch.float64 \[9, 4\]; got torch.float64 \[4, 9\]"):
        attention_backward(x.q, x.k, x.v, out, lse.T, x.dout, intervals, scale=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_for_the_host_after_the_first_call():
    forest = random_rows(5, rows=40, longest=40).forest
    x = random_tensors(forest.tokens, (4, 2), 16, 0)
    on_gpu = Tensors(*(part.cuda() for part in (x.q, x.k, x.v, x.dout)))
    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0), "cuda:0")
    first = run_kernel(on_gpu, intervals)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run_kernel(on_gpu, intervals)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    truth = dense_attention(visible(forest), x)
    for name in NAMES:
        assert torch.equal(first[name], second[name])
        assert relative_error(second[name].cpu(), truth[name]) < 1e-12, name
