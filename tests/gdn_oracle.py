"""Gated DeltaNet token by token, in plain torch under autograd: the truth that the GDN tests compare with.

Shapes: T tokens, Hk key heads, H value heads, K and V head sizes, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from cp_engine.sharding.forest import Forest, build_forest

# Lengths around the chunk size, and the short ones whose convolution history spans several segments.
LENGTHS = (1, 2, 3, 63, 64, 65, 130)


def token_step(state, k, v, g, beta):
    """``H = a (I - b k^T k) H + b k^T v`` for states [H, K, V], k [H, K], v [H, V], g and beta [H]."""
    state = g.exp()[:, None, None] * (state - beta[:, None, None] * k[:, :, None] * (k[:, None] @ state))
    return state + beta[:, None, None] * k[:, :, None] * v[:, None]


def repeat_heads(x, heads):
    """[n, Hk, K] -> [n, H, K]: value head j reads key head ``j // (H // Hk)``."""
    return x[:, [j // (heads // x.shape[1]) for j in range(heads)]]


def forest_of_segments(segments: list[tuple[int, int]]) -> Forest:
    """A forest with the given (parent segment or -1, length); every segment ends a rollout."""
    paths, fresh = [], 0
    for parent, length in segments:
        above = paths[parent] if parent >= 0 else []
        paths.append(above + list(range(fresh, fresh + length)))
        fresh += length
    start = np.cumsum([0] + [len(path) for path in paths])
    return build_forest(np.concatenate(paths), start)


def random_forest(seed: int, segments: int = 12) -> Forest:
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.resize(LENGTHS, segments))
    parents = [-1] + [int(rng.integers(-1 if rng.random() < 0.2 else max(0, s - 4), s)) for s in range(1, segments)]
    return forest_of_segments(list(zip(parents, lengths.tolist(), strict=True)))


@dataclass(frozen=True, eq=False)
class LayerCase:
    """Inputs of a layer over a whole forest, and the gradient of its output."""

    mixed: torch.Tensor  # [T, 2 Hk K + H V]
    weight: torch.Tensor  # [2 Hk K + H V, W]
    g: torch.Tensor  # [T, H]
    beta: torch.Tensor  # [T, H]
    dout: torch.Tensor  # [T, H, V]


def layer_case(tokens: int, seed: int, heads, width: int = 4) -> LayerCase:
    """Slow decay (0.97 to 0.9999), keys near one line, half of the heads with beta near 0: else wrong states hide."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    keys = heads.key_heads * heads.key_dim
    mixed = normal(tokens, heads.channels)
    mixed[:, keys : 2 * keys] = (normal(keys) * normal(tokens, 1) * 0.5 + 1.0) + 0.1 * normal(tokens, keys)
    g = torch.log(0.97 + 0.0299 * torch.rand(tokens, heads.value_heads, generator=rng, dtype=torch.float64))
    scale = torch.where(torch.arange(heads.value_heads) % 2 == 0, 0.02, 1.0)
    beta = scale * torch.rand(tokens, heads.value_heads, generator=rng, dtype=torch.float64)
    dout = normal(tokens, heads.value_heads, heads.value_dim)
    return LayerCase(mixed, 0.5 * normal(heads.channels, width), g, beta, dout)


def layer_on_path(mixed, weight, g, beta, heads) -> torch.Tensor:
    """One rollout alone, [n, C] -> [n, H, V]."""
    width = weight.shape[1]
    x = F.silu(F.conv1d(F.pad(mixed.T, (width - 1, 0)), weight[:, None], groups=weight.shape[0]).T)
    q, k, v = x.split(heads.splits, dim=1)
    q, k = (y.unflatten(1, (heads.key_heads, heads.key_dim)) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (repeat_heads(y, heads.value_heads) for y in (q, k))
    v = v.unflatten(1, (heads.value_heads, heads.value_dim))
    state = mixed.new_zeros((heads.value_heads, heads.key_dim, heads.value_dim))
    out = []
    for t in range(len(mixed)):
        state = token_step(state, k[t], v[t], g[t], beta[t])
        out.append((q[t][:, None] @ state)[:, 0] * heads.key_dim**-0.5)
    return torch.stack(out)


def layer_truth(forest: Forest, case: LayerCase, heads, dtype=torch.float64) -> list[torch.Tensor]:
    """Output and gradients (mixed, weight, g, beta), every leaf path run alone."""
    leaves = [x.to(dtype).requires_grad_() for x in (case.mixed, case.weight, case.g, case.beta)]
    mixed, weight, g, beta = leaves
    out = torch.zeros_like(case.dout, dtype=dtype)
    seen = torch.zeros(len(mixed), dtype=torch.bool)
    flat, start = torch.as_tensor(forest.flat_to_tree()), np.cumsum(np.append(0, forest.rollout_length))
    inner = set(forest.parent.tolist())
    for rollout in range(forest.rollouts):
        if int(forest.end_segment[rollout]) in inner:
            continue
        path = flat[start[rollout] : start[rollout + 1]]
        o = layer_on_path(mixed[path], weight, g[path], beta[path], heads)
        # A token that several paths share counts once: in the first.
        fresh = ~seen[path]
        seen[path] = True
        (o * case.dout[path].to(dtype))[fresh].sum().backward()
        out[path[fresh]] = o.detach()[fresh]
    assert seen.all()
    return [out, *(leaf.grad for leaf in leaves)]


def relative_errors(actual, expected) -> list[float]:
    """Largest difference over the largest value, per tensor; infinite where anything is not finite."""
    errors = []
    for a, e in zip(actual, expected, strict=True):
        a, e = a.detach().double(), e.detach().double()
        error = float((a - e).abs().max() / e.abs().max().clamp_min(1e-30))
        errors.append(error if np.isfinite(error) else np.inf)
    return errors
