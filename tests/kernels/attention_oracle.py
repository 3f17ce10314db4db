"""Truth for attention on a forest: dense float64 attention with the explicit ancestor mask, and bounds derived from it.

Shapes: T tokens, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from cp_engine.sharding.forest import Forest
from cp_engine.sharding.intervals import RowIntervals


@dataclass(frozen=True)
class Tensors:
    """Inputs of one attention call on all tokens of a forest, depth-first."""

    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hk, D]
    v: torch.Tensor  # [T, Hk, D]
    dout: torch.Tensor  # [T, Hq, D]

    def to(self, dtype: torch.dtype) -> Tensors:
        return Tensors(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.dout.to(dtype))

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def random_tensors(
    tokens: int, heads: tuple[int, int], size: int, seed: int, dtype=torch.float64, key_rank: int | None = None
) -> Tensors:
    """Normal tensors, rounded to ``dtype``. ``key_rank``: keys lie in a subspace of this many dimensions."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    q, dout = draw(tokens, heads[0], size), draw(tokens, heads[0], size)
    k, v = draw(tokens, heads[1], size), draw(tokens, heads[1], size)
    if key_rank is not None:
        k = draw(tokens, heads[1], key_rank) @ draw(key_rank, size)
    return Tensors(q, k, v, dout).to(dtype)


def visible(forest: Forest, window: int | None = None) -> torch.Tensor:
    """bool [T, T]: query q sees key k iff k <= q < subtree_end(k), and position(k) > position(q) - window."""
    token = torch.arange(forest.tokens)
    end = torch.as_tensor(forest.subtree_end[forest.segment_of])
    mask = (token[None] <= token[:, None]) & (token[:, None] < end[None])
    if window is not None:
        position = torch.as_tensor(forest.position)
        mask &= position[None] > position[:, None] - window
    return mask


def dense_attention(mask: torch.Tensor, x: Tensors) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv in float64, gradients by autograd."""
    q, k, v = (part.double().detach().requires_grad_() for part in (x.q, x.k, x.v))
    share = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * x.scale
    scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), x.dout.double())
    lse = scores.logsumexp(-1).T.detach()
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def error_bounds(mask: torch.Tensor, x: Tensors, calls: int = 1) -> dict[str, torch.Tensor]:
    """First-order bounds on the rounding errors of a float32-accumulating kernel, one for each element.

    u = 2^-24 is the unit roundoff of float32, w that of the storage dtype. A dot product of n terms errs by at most
    n u times the sum of its terms' sizes; an error e of a score changes exp by a factor 1 + e. Inputs count as exact.
    ``calls``: partial results that are merged, each with a few more roundings.
    """
    u, w = 2.0**-24, torch.finfo(x.q.dtype).eps / 2
    q, k, v, dout = (part.double() for part in (x.q, x.k, x.v, x.dout))
    share, tokens, size = q.shape[1] // k.shape[1], q.shape[0], q.shape[2]
    keys, values = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)

    def weigh(a, b):
        return torch.einsum("hqk,khd->qhd", a, b)

    def weigh_t(a, b):
        return torch.einsum("hqk,qhd->khd", a, b).unflatten(1, (k.shape[1], share)).sum(2)

    def pair(a, b):
        return torch.einsum("qhd,khd->hqk", a, b)

    scores = (pair(q, keys) * x.scale).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - lse).exp()
    reach = (pair(q.abs(), keys.abs()) * x.scale).masked_fill(~mask, 0).amax(-1, keepdim=True)
    lse_error = u * ((size + 4) * reach + tokens + lse.abs() + 8 * calls)
    r = lse_error + u * ((size + 4) * reach + lse.abs() + 8 * calls)  # relative error of p
    out = weigh(p, values)
    out_error = weigh(p * (r + tokens * u), values.abs()) + w * out.abs()
    delta = (dout * out).sum(-1).T[..., None]
    delta_error = ((dout.abs() * (out_error + size * u * out.abs())).sum(-1)).T[..., None]
    dp = pair(dout, values)
    ds = p * (dp - delta) * x.scale
    ds_error = (
        x.scale * p * ((r + 4 * u) * (dp.abs() + delta.abs()) + size * u * pair(dout.abs(), values.abs()) + delta_error)
    )
    ds_error = ds_error + (tokens + calls) * share * u * ds.abs()
    dq, dk, dv = weigh(ds, keys), weigh_t(ds, q), weigh_t(p, dout)
    bounds = {
        "out": out_error,
        "lse": lse_error[..., 0].T,
        "dq": weigh(ds_error, keys.abs()) + w * dq.abs(),
        "dk": weigh_t(ds_error, q.abs()) + w * dk.abs(),
        "dv": weigh_t(p * (r + tokens * share * u), dout.abs()) + w * dv.abs(),
    }
    # Second-order terms: the largest first-order relative error is far below 5 %.
    return {name: 1.05 * bound for name, bound in bounds.items()}


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest true value."""
    if not truth.numel():
        return 0.0
    return float((got.double() - truth).abs().max() / truth.abs().max().clamp_min(1e-30))


@contextlib.contextmanager
def poisoned_memory():
    """Uninitialised float memory holds NaN, so that reading what nobody wrote shows."""

    def poison(original):
        def make(*args, **kwargs):
            made = original(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return make

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty)),
    ):
        yield


def partly_blind() -> tuple[RowIntervals, torch.Tensor]:
    """Eight rows over nine keys, and what they see, bool [8, 9].

    Rows 0, 3 and 4 see nothing, the diagonal of the last run starts empty, and keys 0 and 7 on are seen by no one.
    """
    arrays = RowIntervals(
        rows=8,
        run_row=np.array([1, 3, 5]),
        run_length=np.array([2, 1, 3]),
        span_ptr=np.array([0, 1, 1, 1]),
        span_lo=np.array([3]),
        span_hi=np.array([5]),
        diag_lo=np.array([1, -1, 5]),
        diag_hi=np.array([2, -1, 5]),
    )
    mask = torch.zeros(8, 9, dtype=torch.bool)
    for row in range(8):
        for lo, hi in arrays.of_row(row):
            mask[row, lo:hi] = True
    return arrays, mask


def blind(rows: int) -> RowIntervals:
    """Rows that see nothing."""
    none = np.empty(0, np.int64)
    return RowIntervals(rows, none, none, np.zeros(1, np.int64), none, none, none, none)
