"""The Triton attention backend: in the interpreter against dense float64 attention, and in bf16 on a GPU.

The interpreter has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward, auto
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import random_rows, random_variety
from tests.kernels.attention_oracle import Tensors, dense_attention, random_tensors, visible

ROOT = Path(__file__).parents[2]
NAMES = ("out", "lse", "dq", "dk", "dv")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted_attention.py"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_refusals_name_the_remedy():
    rows = torch.zeros(1, 1, 16, dtype=torch.float64)
    forest = build_forest(np.zeros(1, np.int64), np.array([0, 1]))
    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0))
    with pytest.raises(ValueError, match="attention backend triton needs "):
        attention(rows, rows, rows, intervals, scale=1.0, backend="triton")
    with pytest.raises(ValueError, match="attention backend cudnn computes bfloat16 and float16; got torch.float64"):
        attention(rows, rows, rows, intervals, scale=1.0, backend="cudnn")
    with pytest.raises(ValueError, match="attention backend cudnn needs a GPU; q is on cpu"):
        half = rows.bfloat16()
        attention(half, half, half, intervals, scale=1.0, backend="cudnn")


def test_auto_is_the_reference_on_a_cpu():
    forest = random_variety(4).forest
    arrays = visible_intervals(forest, contiguous_layout(forest, 1), 0)
    intervals = Intervals.from_arrays(arrays)
    x = random_tensors(forest.tokens, (4, 2), 16, 0, torch.bfloat16)
    picked = attention(x.q, x.k, x.v, intervals, scale=x.scale, backend="auto")
    for mine, its in zip(picked, attention(x.q, x.k, x.v, intervals, scale=x.scale), strict=True):
        assert torch.equal(mine, its)
    assert auto.mean_keys(intervals) * arrays.rows == pytest.approx(arrays.pairs())


def deep_forest(seed: int):
    """Some 2,000 tokens: a long shared trunk left at many places, and short trees beside it."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 50, 700)
    rows = [np.concatenate([trunk[: rng.integers(100, 700)], rng.integers(0, 50, 160)]) for _ in range(6)]
    rows += [rng.integers(50, 99, rng.integers(1, 90)) for _ in range(9)]
    return build_forest(np.concatenate(rows), np.cumsum([0] + [len(row) for row in rows]))


def run_on_gpu(x: Tensors, intervals: Intervals, backend: str) -> dict[str, torch.Tensor]:
    out, lse = attention(x.q, x.k, x.v, intervals, scale=x.scale, backend=backend)
    grads = attention_backward(
        x.q, x.k, x.v, out, lse, x.dout, intervals, scale=x.scale, backend=backend, accumulate=True
    )
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
@pytest.mark.parametrize(
    ("heads", "size"),
    [((8, 2), 128), ((6, 2), 128), ((4, 4), 64), ((16, 2), 256), ((4, 1), 96)],
    ids=["gqa", "share 3", "mha", "D 256", "D 96"],
)
def test_bf16_errs_no_more_than_the_flat_rows_rounding(backend, heads, size):
    """Design section 10 on a kernel: errors against float64 stay within a bf16 reference's, by segment."""
    if backend == "cudnn":
        pytest.importorskip("cudnn.flex_attention")
    forest = deep_forest(0)
    x = random_tensors(forest.tokens, heads, size, 1, torch.bfloat16)
    x = Tensors(*(part.cuda() for part in (x.q, x.k, x.v, x.dout)))
    intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0), "cuda")
    truth = dense_attention(visible(forest).cuda(), x)
    got, again = run_on_gpu(x, intervals, backend), run_on_gpu(x, intervals, backend)
    flat = bf16_attention(visible(forest).cuda(), x)
    start = torch.as_tensor(forest.segment_start[:-1], device="cuda")
    segment = torch.bucketize(torch.arange(forest.tokens, device="cuda"), start, right=True) - 1
    for name in ("out", "dq", "dk", "dv"):
        if backend == "triton":
            assert torch.equal(got[name], again[name]), name
        errors, allowed = (
            torch.zeros(forest.segments, dtype=torch.float64, device="cuda").scatter_reduce(
                0, segment, (result.double() - truth[name]).abs().amax((1, 2)), "amax"
            )
            for result in (got[name], flat[name])
        )
        assert (errors <= 1.5 * allowed.maximum(allowed.quantile(0.99))).all(), name
        assert errors.max() <= 1.25 * allowed.max(), name
    assert (got["lse"].double() - truth["lse"]).abs().max() < 1e-4


@pytest.mark.gpu
@on_gpu
def test_new_forests_compile_nothing():
    """Two forests, with long segments and with short ones, warm up; 20 more of other sizes compile nothing."""
    from cp_engine.kernels.attention.triton import backward_pass, forward_pass

    kernels = forward_pass._forward_kernel, backward_pass._statistics_kernel
    kernels += backward_pass._dq_kernel, backward_pass._dkdv_kernel
    counts = []
    for seed in range(22):
        forest = deep_forest(0) if seed == 0 else random_rows(seed, rows=10 + 3 * seed, longest=30).forest
        x = random_tensors(forest.tokens, (8, 2), 128, seed, torch.bfloat16)
        x = Tensors(*(part.cuda() for part in (x.q, x.k, x.v, x.dout)))
        intervals = Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0), "cuda")
        run_on_gpu(x, intervals, "triton")
        counts.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    assert counts[-1] == counts[1] > 0


def bf16_attention(mask: torch.Tensor, x: Tensors) -> dict[str, torch.Tensor]:
    """Dense attention that rounds where flash kernels do: p and ds to bf16 before their products, the results last."""
    share = x.q.shape[1] // x.k.shape[1]
    q, dout = x.q.double(), x.dout.double()
    k, v = (part.double().repeat_interleave(share, 1) for part in (x.k, x.v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * x.scale).masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1)

    def rounded(part):
        return part.bfloat16().double()

    def summed(part):
        return part.unflatten(1, (x.k.shape[1], share)).sum(2)

    out = rounded(torch.einsum("hqk,khd->qhd", rounded(p), v))
    delta = (dout * out).sum(-1).T[..., None]
    ds = rounded(p * (torch.einsum("qhd,khd->hqk", dout, v) - delta)) * x.scale
    dv = summed(torch.einsum("hqk,qhd->khd", rounded(p), dout))
    dk = summed(torch.einsum("hqk,qhd->khd", ds, q))
    dq = torch.einsum("hqk,khd->qhd", ds, k)
    return {"out": out, "dq": rounded(dq), "dk": rounded(dk), "dv": rounded(dv)}
