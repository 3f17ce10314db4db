"""What the cudnn backend hands to cuDNN: rows in place where their layout allows it. cuDNN is a dense stand-in."""

import sys
import types

import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward, cudnn
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests import dense_rivals
from tests.forests import random_rows
from tests.kernels import dense_fa4
from tests.kernels.attention_oracle import Tensors, dense_attention, random_tensors, relative_error, visible

NAMES = ("out", "lse", "dq", "dk", "dv")


def buffer_of(elements: int) -> torch.Tensor:
    """bf16, starting at a multiple of 128 bytes as memory of a GPU does."""
    made = torch.arange(elements + 64, dtype=torch.bfloat16)
    first = -(made.data_ptr() // made.element_size()) % 64
    return made[first : first + elements]


@pytest.mark.parametrize(("size", "head"), [(64, 3), (96, 1), (128, 2), (256, 1)])
def test_slices_of_heads_are_read_in_place(size, head):
    x = buffer_of(7 * 8 * size).view(7, 8, size)
    for part in (x, x[:, head : head + 2], x[2:], x[:0], x.view(8, 7, size).transpose(0, 1)):
        assert cudnn.aligned(part) is part


@pytest.mark.parametrize("size", [64, 256])
def test_other_layouts_are_copied(size):
    buffer = buffer_of(7 * 2 * 300)
    step = {64: 4, 256: 32}[size]  # elements, half of the alignment
    shifted = buffer[step : step + 7 * 2 * size].view(7, 2, size)
    gaps = buffer[: 7 * 2 * (size + step)].view(7, 2, size + step)[..., :size]
    reversed_axes = buffer[: 7 * 2 * size].view(size, 2, 7).permute(2, 1, 0)
    expanded = buffer[:1].view(1, 1, 1).expand(7, 2, size)  # the gradient of a sum
    for x in (shifted, gaps, reversed_axes, expanded):
        made = cudnn.aligned(x)
        assert made is not x and made.is_contiguous() and torch.equal(made, x)


def _dense(q, k, lse, scale, mask):
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores if lse is None else (scores - lse[..., None]).exp()


@pytest.fixture
def stand_in(monkeypatch):
    """Dense float64 attention that refuses copies and layouts that cuDNN refuses; yields the memory it was given."""
    given = []

    def check(*tensors):
        given.append([x.data_ptr() for x in tensors])
        assert all(x.shape[0] == 1 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in tensors)

    def forward(q, k, v, *, mask_plan, softmax_scale, return_lse):
        check(q, k, v)
        scores = _dense(q[0], k[0], None, softmax_scale, mask_plan)
        values = v[0].repeat_interleave(q.shape[2] // v.shape[2], 1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return {"o_tensor": out[None], "lse_tensor": scores.logsumexp(-1)[None]}

    def backward(q, k, v, out, dout, lse, *, mask_plan, softmax_scale, deterministic):
        check(q, k, v, out, dout)
        rows, keys = q.shape[1], k.shape[1]
        monkeypatch.setattr(dense_fa4, "sequence_mask", lambda *_: mask_plan)
        grads = dense_fa4.backward(
            *(x[0] for x in (q, k, v, out, dout, lse)), softmax_scale=softmax_scale, causal=False,
            cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32), max_seqlen_q=rows,
            cu_seqlens_k=torch.tensor([0, keys], dtype=torch.int32), max_seqlen_k=keys, deterministic=deterministic,
        )  # fmt: skip
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), (x[None] for x in grads), strict=True))

    modules = {name: types.ModuleType(name) for name in ("cudnn", "cudnn.flex_attention")}
    modules["cudnn.flex_attention.execution"] = execution = types.ModuleType("execution")
    modules["cudnn.flex_attention"].create_mask_plan = lambda *made, **_: dense_rivals.create_mask_plan(*made)
    execution._flex_attention_forward, execution._flex_attention_backward = forward, backward
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cudnn, "why_not", lambda q: None)
    return given


def test_a_group_of_heads_is_computed_without_a_copy(stand_in):
    forest = random_rows(0, rows=12, longest=12).forest
    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0))
    whole = random_tensors(forest.tokens, (8, 4), 8, 0)
    x = Tensors(whole.q[:, 2:6], whole.k[:, 1:3], whole.v[:, 1:3], whole.dout[:, 2:6])
    call = {"scale": x.scale, "backend": "cudnn"}
    out, lse = attention(x.q, x.k, x.v, intervals, **call)
    all_out, all_lse = whole.q.new_zeros(whole.q.shape), lse.new_zeros(len(lse), 8)
    all_out[:, 2:6], all_lse[:, 2:6] = out, lse
    saved = all_out[:, 2:6], all_lse[:, 2:6]
    grads = attention_backward(x.q, x.k, x.v, *saved, x.dout, intervals, **call)
    truth = dense_attention(visible(forest), x)
    # cuDNN's gradients and lse are float32 at most.
    for name, made in zip(NAMES, (out, lse, *grads), strict=True):
        assert relative_error(made, truth[name]) < 1e-6, name
    assert stand_in == [
        [t.data_ptr() for t in (x.q, x.k, x.v)],
        [t.data_ptr() for t in (x.q, x.k, x.v, saved[0], x.dout)],
    ]
