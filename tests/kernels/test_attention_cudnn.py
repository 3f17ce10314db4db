"""What the cudnn backend hands to cuDNN: rows in place where their layout allows it. cuDNN is a dense stand-in."""

import sys
import types
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

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


@dataclass
class Seen:
    made: int = 0  # kernels
    calls: list[list[int]] = field(default_factory=list)  # addresses of rows read and written


class StandIn:
    """A kernel made for some layouts: it refuses others, and work before it is made."""

    def __init__(self, seen: Seen, *samples, deterministic: bool = False):
        self.seen, self.deterministic, self.steps, self.workspace_size = seen, deterministic, [], 128
        self.layouts = self._layouts(samples)
        seen.made += 1

    def _layouts(self, tensors):
        tensors = [x for x in tensors if x.dtype.is_floating_point]  # the mask plan is a mask
        rows = [x for x in tensors if x.dim() == 4]
        assert all(x.shape[0] == 1 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in rows)
        assert all(x.shape[0] == 1 and x.stride(-1) == 1 for x in tensors)
        return [(x.shape, x.stride(), x.dtype) for x in tensors]

    def check_support(self):
        self.steps.append("checked")

    def compile(self):
        self.steps.append("compiled")

    def execute(self, *tensors, workspace: torch.Tensor, softmax_scale: float):
        assert self.steps == ["checked", "compiled"] and self._layouts(tensors) == self.layouts
        assert workspace.shape == (self.workspace_size,) and workspace.dtype == torch.uint8
        self.seen.calls.append([x.data_ptr() for x in tensors if x.dim() == 4])
        self.run(*tensors, softmax_scale)


class StandInForward(StandIn):
    def run(self, q, k, v, out, mask, lse, scale):
        scores = _dense(q[0], k[0], None, scale, mask)
        values = v[0].repeat_interleave(q.shape[2] // v.shape[2], 1)
        out[0] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        lse[0] = scores.logsumexp(-1)


class StandInBackward(StandIn):
    def run(self, q, k, v, out, dout, lse, dq, dk, dv, mask, scale):
        rows, keys = q.shape[1], k.shape[1]
        with mock.patch.object(dense_fa4, "sequence_mask", lambda *_: mask):
            grads = dense_fa4.backward(
                *(x[0] for x in (q, k, v, out, dout, lse)), softmax_scale=scale, causal=False,
                cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32), max_seqlen_q=rows,
                cu_seqlens_k=torch.tensor([0, keys], dtype=torch.int32), max_seqlen_k=keys,
                deterministic=self.deterministic,
            )  # fmt: skip
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place[0] = grad


@pytest.fixture
def stand_in(monkeypatch):
    """Dense float64 attention that refuses layouts that cuDNN refuses; what it saw."""
    seen = Seen()
    forward, backward = (partial(kind, seen) for kind in (StandInForward, StandInBackward))
    flex = {"FlexAttentionFwd": forward, "FlexAttentionBwd": backward}
    flex["create_mask_plan"] = lambda *made, **_: dense_rivals.create_mask_plan(*made)
    modules = {name: types.ModuleType(name) for name in ("cudnn", "cudnn.flex_attention")}
    modules["cudnn"].flex_attention = modules["cudnn.flex_attention"]
    vars(modules["cudnn.flex_attention"]).update(flex)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cudnn, "why_not", lambda q: None)
    return seen


def heads_of_a_forest(heads: tuple[int, int]):
    """Query heads and their kv heads of a whole tensor, visible intervals, and the truth about them."""
    forest = random_rows(0, rows=12, longest=12).forest
    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0))
    whole = random_tensors(forest.tokens, (8, 4), 8, 0)
    query, kv = slice(*heads), slice(heads[0] // 2, heads[1] // 2)
    x = Tensors(whole.q[:, query], whole.k[:, kv], whole.v[:, kv], whole.dout[:, query])
    return x, intervals, dense_attention(visible(forest), x)


def right(made, truth) -> bool:
    # cuDNN's gradients and lse are float32 at most.
    return all(relative_error(x, truth[name]) < 1e-6 for name, x in zip(NAMES, made, strict=True))


def test_a_group_of_heads_is_computed_without_a_copy(stand_in):
    """What it reads and what it writes are parts of whole tensors; a second layer uses the kernels of the first."""
    x, intervals, truth = heads_of_a_forest((2, 6))
    call, wanted = {"scale": x.scale, "backend": "cudnn"}, []
    for _ in range(2):
        whole_out, whole_dq = (x.q.new_full((len(x.q), 8, 8), torch.nan) for _ in range(2))
        whole_lse = x.q.new_full((8, len(x.q)), torch.nan).T
        into, into_q = (whole_out[:, 2:6], whole_lse[:, 2:6]), whole_dq[:, 2:6]
        out, lse = attention(x.q, x.k, x.v, intervals, **call, into=into)
        dq, dk, dv = attention_backward(x.q, x.k, x.v, out, lse, x.dout, intervals, **call, into_q=into_q)
        assert out is into[0] and lse is into[1] and dq is into_q
        assert right((out, lse, dq, dk, dv), truth)
        for whole in (whole_out, whole_lse, whole_dq):
            assert whole[:, :2].isnan().all() and whole[:, 6:].isnan().all()
        given = x.q, x.k, x.v, out, x.dout, dq, dk, dv
        wanted += [[t.data_ptr() for t in (x.q, x.k, x.v, out)], [t.data_ptr() for t in given]]
    assert stand_in.calls == wanted
    assert stand_in.made == 2


def test_places_that_cudnn_cannot_write_get_copies(stand_in):
    x, intervals, truth = heads_of_a_forest((2, 6))
    call = {"scale": x.scale, "backend": "cudnn"}
    into = x.q.new_empty((len(x.q), 4, 9))[..., 1:], x.q.new_empty((len(x.q), 8))[:, 2:6]
    into_q = x.q.new_empty((4, 8, len(x.q))).permute(2, 0, 1)
    out, lse = attention(x.q, x.k, x.v, intervals, **call, into=into)
    grads = attention_backward(x.q, x.k, x.v, out, lse, x.dout, intervals, **call, into_q=into_q)
    assert out is into[0] and lse is into[1] and grads[0] is into_q
    assert right((out, lse, *grads), truth)


def test_results_without_a_place_are_made(stand_in):
    x, intervals, truth = heads_of_a_forest((0, 8))
    call = {"scale": x.scale, "backend": "cudnn"}
    out, lse = attention(x.q, x.k, x.v, intervals, **call)
    grads = attention_backward(x.q, x.k, x.v, out, lse.double(), x.dout, intervals, **call)
    assert right((out, lse, *grads), truth)
