"""Every attention backend on a GPU, in bf16: design section 10's bounds, equal bits, and no compilation per pack.

Each backend compiles its kernels once for a head size (seconds to half a minute with FA4), so that four processes
beside each other, one a backend, take the time of the slowest:
``for b in triton cudnn fa4 auto; do python -m pytest -m gpu tests/kernels/test_attention_gpu.py -k $b & done; wait``

Shapes: T tokens of a forest, S segments, Hq query heads, Hk kv heads, D head size.
"""

import contextlib
import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_engine.kernels.attention import Intervals, attention, attention_backward, cudnn, fa4, triton
from cp_engine.sharding.forest import Forest, build_forest
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import random_rows
from tests.kernels.attention_oracle import Tensors, dense_attention, random_tensors, visible

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = ("out", "lse", "dq", "dk", "dv")
BACKENDS = ("triton", "cudnn", "fa4", "auto")
FORWARD = {"fa4": "auto"}  # it computes gradients only; auto never takes it forward


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    rows = torch.empty(0, 1, 128, dtype=torch.bfloat16, device="cuda")
    if request.param in ("cudnn", "fa4"):
        reason = {"cudnn": cudnn, "fa4": fa4}[request.param].why_not(rows)
        if reason is not None:
            pytest.skip(f"{request.param} {reason}")
    return request.param


@pytest.fixture(autouse=True)
def deterministic():
    """Equal bits are asked for; PyTorch then fills uninitialised memory with NaN too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def deep_forest() -> Forest:
    """Some 2,000 tokens: a long shared trunk left at many places, and short trees beside it."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, 700)
    rows = [np.concatenate([trunk[: rng.integers(100, 700)], rng.integers(0, 50, 160)]) for _ in range(6)]
    rows += [rng.integers(50, 99, rng.integers(1, 90)) for _ in range(9)]
    return build_forest(np.concatenate(rows), np.cumsum([0] + [len(row) for row in rows]))


def inputs(forest: Forest, heads: tuple[int, int], size: int) -> Tensors:
    x = random_tensors(forest.tokens, heads, size, 1, torch.bfloat16)
    return Tensors(*(part.cuda() for part in (x.q, x.k, x.v, x.dout)))


def whole(forest: Forest, window: int | None = None) -> Intervals:
    return Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0, window), "cuda")


def run(x: Tensors, intervals: Intervals, backend: str) -> dict[str, torch.Tensor]:
    out, lse = attention(x.q, x.k, x.v, intervals, scale=x.scale, backend=FORWARD.get(backend, backend))
    grads = attention_backward(
        x.q,
        x.k,
        x.v,
        out,
        lse,
        x.dout,
        intervals,
        scale=x.scale,
        backend=backend,
        accumulate_q=True,
        accumulate_kv=True,
    )
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def flat_rows(forest: Forest, x: Tensors) -> dict[str, torch.Tensor]:
    """Every rollout alone through PyTorch's FlashAttention in bf16, put back on the tree in float64.

    A shared token's dout enters at its first copy; dk and dv of its copies are added.
    """
    like = {"out": x.q, "dq": x.q, "dk": x.k, "dv": x.v}
    found = {name: torch.zeros_like(part, dtype=torch.float64) for name, part in like.items()}
    token, length = torch.as_tensor(forest.flat_to_tree()), forest.rollout_length.tolist()
    used = torch.zeros(forest.tokens, dtype=torch.bool)
    share = x.q.shape[1] // x.k.shape[1]
    for rows in token.split(length):
        new, used[rows] = ~used[rows], True
        rows, new = rows.cuda(), new.cuda()
        q, k, v = (part[rows].transpose(0, 1)[None].requires_grad_() for part in (x.q, x.k, x.v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            keys, values = (part.repeat_interleave(share, 1) for part in (k, v))
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=x.scale)
        dout = (x.dout[rows] * new[:, None, None]).transpose(0, 1)[None]
        grads = torch.autograd.grad(out, (q, k, v), dout)
        found["out"][rows] = out.detach()[0].transpose(0, 1).double()
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            found[name][rows] += grad[0].transpose(0, 1).double()  # a rollout holds a token once
    return found


def segment_errors(forest: Forest, got: torch.Tensor, truth: torch.Tensor) -> np.ndarray:
    """[S] largest error of each segment."""
    worst = (got.double() - truth).abs().amax((1, 2)).cpu().numpy()
    return np.maximum.reduceat(worst, forest.segment_start[:-1])


def check_bounds(forest: Forest, got: dict, flat: dict, truth: dict) -> None:
    """Design section 10; a length class holds the segments between two powers of two."""
    length_class = np.log2(np.diff(forest.segment_start)).astype(int)
    for name in ("out", "dq", "dk", "dv"):
        errors, allowed = (segment_errors(forest, made[name], truth[name]) for made in (got, flat))
        usual = np.array([np.quantile(allowed[length_class == own], 0.99) for own in length_class])
        ratio = errors / np.maximum(allowed, usual)
        assert ratio.max() <= 1.5, (name, ratio.max(), int(ratio.argmax()))
        assert errors.max() <= 1.25 * allowed.max(), (name, errors.max() / allowed.max())
    assert (got["lse"].double() - truth["lse"]).abs().max() < 1e-4


@pytest.mark.parametrize(("heads", "size"), [((4, 4), 64), ((8, 2), 128), ((8, 1), 256)], ids=["D64", "D128", "D256"])
def test_errors_are_those_of_flat_rows_and_bits_are_equal(backend, heads, size):
    forest = deep_forest()
    x, intervals = inputs(forest, heads, size), whole(forest)
    got, again = run(x, intervals, backend), run(x, intervals, backend)
    for name in NAMES:
        assert torch.equal(got[name], again[name]), name
    with nondeterministic():
        check_bounds(forest, got, flat_rows(forest, x), dense_attention(visible(forest).cuda(), x))


@contextlib.contextmanager
def nondeterministic():
    """For the truth: PyTorch has no deterministic form of some of its operations."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def test_other_branches_do_not_touch_a_bit(backend):
    """Other keys and values in one leaf: the outputs of all other segments keep their bits."""
    if backend == "fa4":
        pytest.skip("fa4 computes gradients only")
    forest = deep_forest()
    x, intervals = inputs(forest, (8, 2), 128), whole(forest)
    out, lse = attention(x.q, x.k, x.v, intervals, scale=x.scale, backend=backend)
    leaves = np.flatnonzero(forest.subtree_end == forest.segment_start[1:])
    for leaf in leaves[:: max(1, len(leaves) // 4)]:
        mine = slice(int(forest.segment_start[leaf]), int(forest.segment_start[leaf + 1]))
        k, v = x.k.clone(), x.v.clone()
        k[mine], v[mine] = 3 * k[mine], -5 * v[mine]
        out_2, lse_2 = attention(x.q, k, v, intervals, scale=x.scale, backend=backend)
        others = torch.ones(forest.tokens, dtype=torch.bool, device="cuda")
        others[mine] = False
        assert torch.equal(out[others], out_2[others]) and torch.equal(lse[others], lse_2[others])
        assert not torch.equal(out[mine], out_2[mine])


@pytest.mark.parametrize("size", [128, 256])
def test_slices_of_heads_have_the_bits_of_copies(backend, size):
    forest = deep_forest()
    x, intervals = inputs(forest, (16, 4), size), whole(forest)
    sliced = Tensors(x.q[:, 4:12], x.k[:, 1:3], x.v[:, 1:3], x.dout[:, 4:12])
    copied = Tensors(*(part.contiguous() for part in (sliced.q, sliced.k, sliced.v, sliced.dout)))
    got, truth = run(sliced, intervals, backend), run(copied, intervals, backend)
    assert all(torch.equal(got[name], truth[name]) for name in NAMES)


@pytest.mark.parametrize(
    ("heads", "size"), [((8, 1), 256), ((12, 2), 256), ((4, 4), 256), ((8, 2), 192)], ids=["8", "6", "1", "D192"]
)
def test_triton_in_waves_of_stored_scores(monkeypatch, heads, size):
    """Packs of 8 heads, of 6 (rows without bulk copies), of 1, and a size between; no second call waits for the GPU."""
    from cp_engine.kernels.attention.triton import stored_pass

    if not triton.stores(torch.empty(0, 1, size, dtype=torch.bfloat16, device="cuda")):
        pytest.skip("scores are stored on Hopper GPUs")
    monkeypatch.setattr(stored_pass, "IN_USE", replace(stored_pass.IN_USE, workspace=4 << 20))
    forest = deep_forest()
    x, intervals = inputs(forest, heads, size), whole(forest)
    got = run(x, intervals, "triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(x, intervals, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(stored_pass.blocks_of(x.q, heads[1], intervals).waves) > 3
    assert all(torch.equal(got[name], again[name]) for name in NAMES)
    with nondeterministic():
        check_bounds(forest, got, flat_rows(forest, x), dense_attention(visible(forest).cuda(), x))


@pytest.mark.parametrize(("window", "size"), [(1, 128), (40, 128), (300, 128), (40, 256)])
def test_sliding_windows(backend, window, size):
    if backend == "fa4":
        pytest.skip("fa4 computes no sliding window")
    forest = deep_forest()
    x, intervals = inputs(forest, (8, 2), size), whole(forest, window)
    got = run(x, intervals, backend)
    with nondeterministic():
        truth = dense_attention(visible(forest, window).cuda(), x)
    least = 1e-2 * truth["dv"].norm()  # with a window of one key dq and dk are zero
    for name in ("out", "dq", "dk", "dv"):
        assert (got[name].double() - truth[name]).norm() < 5e-3 * truth[name].norm().maximum(least), name


@pytest.mark.parametrize("size", [128, 256])
def test_new_forests_compile_nothing(backend, size):
    """A forest of long segments and one of short ones warm up; 50 of other sizes compile at most twice."""
    if size == 256 and backend != "triton":
        pytest.skip("other backends have the same kernels at both sizes")
    forests = [deep_forest()]
    forests += [random_rows(seed, rows=10 + 3 * seed, longest=(7, 30, 60)[seed % 3]).forest for seed in range(1, 52)]
    counts = []
    for forest in forests:
        run(inputs(forest, (8, 2), size), whole(forest), backend)
        counts.append(compiled_kernels())
    assert counts[1] > 0 and counts[-1] - counts[1] <= 2, counts


def compiled_kernels() -> int:
    """Kernels that Triton, cuDNN and FA4 have compiled in this process."""
    from cp_engine.kernels.attention.triton import backward_pass, forward_pass, stored_pass

    kernels = forward_pass._forward_kernel, backward_pass._dq_kernel, backward_pass._dkdv_kernel
    kernels += stored_pass._scores_kernel, stored_pass._key_products_kernel
    count = sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
    # Both packages keep theirs in instances of a class of this name.
    caches = [one for one in gc.get_objects() if type(one).__name__ == "JITCache"]
    return count + sum(len(one.cache) for one in caches)
