"""Attention over rollouts that share nothing: every rollout on its own, as trainers without prefix trees compute it.

A batch runs in calls of at most `CALL_TOKENS` flat tokens, so that it fits; a method's time is the sum over its calls.
Rollouts are taken in order of length: rows of one call need little padding.

Shapes: T tree tokens, n flat tokens of a call, R its rollouts, L tokens of the longest, Hq query heads, Hk kv heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.attention_problem import NAMES, Problem
from cp_engine.sharding.forest import expand_ranges

CALL_TOKENS = 600_000  # padding counted; the largest of the papers' trees has 557,056


class FlatCall:
    """Some rollouts in one call. Sub-classes lay rows out, and put results back as [n, heads, D].

    For the comparison a shared token's gradient enters at its first copy; times are of dense gradients.
    """

    def __init__(self, problem: Problem, token: torch.Tensor, first: torch.Tensor, lengths: torch.Tensor):
        self.problem, self.token, self.first, self.lengths = problem, token, first, lengths
        self.longest = int(lengths.max())
        self.starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        self.prepare()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, D] as the kernel wants it."""
        return x

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `rows`."""
        return x

    def results_into(self, found: dict[str, torch.Tensor]) -> None:
        """Add this call's part of out, dq, dk, dv as rows of the tree, in float32."""
        p, dense = self.problem, self.grad_out
        self.grad_out = self.rows(p.dout[self.token] * self.first[:, None, None])
        self.backward()
        self.grad_out = dense
        for name, like in zip(NAMES, (p.q, p.q, p.k, p.v), strict=True):
            found.setdefault(name, torch.zeros(like.shape, dtype=torch.float32, device=like.device))
        found["out"][self.token] = self.flat(self.out.detach()).float()
        for name, grad in zip(NAMES[1:], self.grads, strict=True):
            heads = found[name].shape[1]
            part = self.flat(grad).unflatten(1, (heads, -1)).sum(2, dtype=torch.float32)
            found[name].index_add_(0, self.token, part)


class FlatByAutograd(FlatCall):
    """A differentiable call. Sub-classes define ``call(q, k, v)``."""

    def prepare(self):
        p = self.problem
        self.q, self.k, self.v = (self.rows(x[self.token]).requires_grad_() for x in (p.q, p.k, p.v))
        self.grad_out = self.rows(p.dout[self.token])

    def forward(self):
        self.out = self.call(self.q, self.k, self.v)

    def backward(self):
        self.grads = torch.autograd.grad(self.out, (self.q, self.k, self.v), self.grad_out, retain_graph=True)


class FlatFA2(FlatCall):
    """PyTorch's varlen FlashAttention-2. It has no GQA: kv heads are repeated."""

    def prepare(self):
        p = self.problem
        share = p.workload.query_heads // p.workload.kv_heads
        self.q, self.grad_out = p.q[self.token], p.dout[self.token]
        self.k, self.v = (x[self.token].repeat_interleave(share, 1) for x in (p.k, p.v))
        self.ends = self.starts, self.starts, self.longest, self.longest

    def forward(self):
        self.out, *self.rest = torch.ops.aten._flash_attention_forward(
            self.q, self.k, self.v, *self.ends, 0.0, True, False, scale=self.problem.scale
        )

    def backward(self):
        lse, seed, offset = self.rest[:3]
        self.grads = torch.ops.aten._flash_attention_backward(
            self.grad_out, self.q, self.k, self.v, self.out, lse, *self.ends, 0.0, True, seed, offset,
            scale=self.problem.scale,
        )  # fmt: skip


class FlatFA4(FlatByAutograd):
    """flash-attn-4's varlen call."""

    def call(self, q, k, v):
        from flash_attn.cute import flash_attn_varlen_func

        ends = {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts}
        ends |= {"max_seqlen_q": self.longest, "max_seqlen_k": self.longest}
        out = flash_attn_varlen_func(q, k, v, **ends, causal=True, softmax_scale=self.problem.scale)
        return out[0] if isinstance(out, tuple) else out


class FlatPadded(FlatByAutograd):
    """PyTorch's `scaled_dot_product_attention` on rollouts padded to the longest."""

    def prepare(self):
        self.live = torch.arange(self.longest, device=self.problem.device) < self.lengths[:, None]
        super().prepare()

    def rows(self, x):
        padded = x.new_zeros((len(self.lengths), self.longest, *x.shape[1:]))
        padded[self.live] = x
        return padded.transpose(1, 2)

    def flat(self, x):
        return x.transpose(1, 2)[self.live]

    def call(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.problem.scale)


class FlatCudnn(FlatPadded):
    """The same by cuDNN."""

    def call(self, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return super().call(q, k, v)


def flat_calls(problem: Problem, kind: type[FlatCall], most: int = CALL_TOKENS) -> Iterator[FlatCall]:
    """The calls of a batch, made one at a time, so that the memory of one is free before the next is made."""
    forest, device = problem.forest, problem.device
    token = forest.flat_to_tree()
    start = np.cumsum(forest.rollout_length) - forest.rollout_length
    first = np.zeros(len(token), bool)
    first[np.unique(token, return_index=True)[1]] = True
    for rollouts in split_by_length(forest.rollout_length, most):
        flat = expand_ranges(start[rollouts], forest.rollout_length[rollouts])
        arrays = (token[flat], first[flat], forest.rollout_length[rollouts])
        yield kind(problem, *(torch.as_tensor(array, device=device) for array in arrays))


def split_by_length(lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Rollouts in ascending order of length, in groups of at most ``most`` tokens, padded to the longest of a group."""
    groups, begin = [], 0
    order = np.argsort(lengths, kind="stable")
    for place, rollout in enumerate(order):
        if place > begin and (place + 1 - begin) * lengths[rollout] > most:
            groups.append(order[begin:place])
            begin = place
    return [*groups, order[begin:]]
