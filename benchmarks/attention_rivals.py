"""What tree attention is compared with: flat rollouts through the usual kernels, FlexAttention, the raw cuDNN call.

A method is made for a `Problem` and has ``forward()`` and ``backward()``, which are timed, and ``results()``, its out,
dq, dk and dv as rows of the tree, which are compared with the truth before a time counts.

Shapes: T tree tokens, N flat tokens, R rollouts, L tokens of the longest, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from benchmarks.attention_workloads import Workload
from cp_engine.kernels.attention import Intervals, attention, attention_backward
from cp_engine.kernels.attention.cudnn import interval_ends
from cp_engine.sharding.forest import Forest

NAMES = ("out", "dq", "dk", "dv")


@dataclass(eq=False)
class Problem:
    workload: Workload
    forest: Forest
    intervals: Intervals
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hk, D]
    v: torch.Tensor
    dout: torch.Tensor  # [T, Hq, D]

    @property
    def scale(self) -> float:
        return self.workload.size**-0.5

    @cached_property
    def truth(self) -> dict[str, torch.Tensor]:
        """The reference kernel in float32 on the same inputs."""
        q, k, v, dout = (x.float() for x in (self.q, self.k, self.v, self.dout))
        call = {"intervals": self.intervals, "scale": self.scale, "backend": "reference"}
        out, lse = attention(q, k, v, **call)
        return dict(zip(NAMES, (out, *attention_backward(q, k, v, out, lse, dout, **call)), strict=True))


class Backend:
    """One of our own."""

    def __init__(self, problem: Problem, name: str):
        self.problem = problem
        self.call = {"intervals": problem.intervals, "scale": problem.scale, "backend": name}

    def forward(self):
        self.saved = attention(self.problem.q, self.problem.k, self.problem.v, **self.call)

    def backward(self):
        p = self.problem
        self.grads = attention_backward(p.q, p.k, p.v, *self.saved, p.dout, **self.call)

    def results(self):
        return dict(zip(NAMES, (self.saved[0], *self.grads), strict=True))


class ByAutograd:
    """A differentiable call on tensors q, k, v. Sub-classes set them, ``grad_out``, and ``call``."""

    def forward(self):
        self.out = self.call(self.q, self.k, self.v)

    def backward(self):
        self.grads = torch.autograd.grad(self.out, (self.q, self.k, self.v), self.grad_out, retain_graph=True)


class Flex(ByAutograd):
    """Compiled FlexAttention with the ancestor test as mask."""

    def __init__(self, problem: Problem, mode: str = "default"):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        forest, tokens = problem.forest, problem.forest.tokens
        end = torch.as_tensor(forest.subtree_end[forest.segment_of], device="cuda")

        def sees(_batch, _head, query, key):
            return (key <= query) & (query < end[key])

        mask = create_block_mask(sees, None, None, tokens, tokens, device="cuda", _compile=True)
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        self.call = partial(compiled, block_mask=mask, enable_gqa=True, scale=problem.scale)
        self.q, self.k, self.v = (
            x.transpose(0, 1).contiguous()[None].requires_grad_() for x in (problem.q, problem.k, problem.v)
        )
        self.grad_out = problem.dout.transpose(0, 1).contiguous()[None]

    def results(self):
        return {name: x[0].transpose(0, 1) for name, x in zip(NAMES, (self.out.detach(), *self.grads), strict=True)}


class RawCudnn(ByAutograd):
    """`cudnn.flex_attention` as its documentation calls it."""

    def __init__(self, problem: Problem):
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        self.q, self.k, self.v = (x[None].detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
        plan = create_mask_plan(interval_ends(problem.intervals)[None], self.q, self.k, self.v)
        self.call = partial(flex_attn_func, mask_plan=plan, softmax_scale=problem.scale)
        self.grad_out = problem.dout[None]

    def results(self):
        return {name: x[0] for name, x in zip(NAMES, (self.out.detach(), *self.grads), strict=True)}


class Flat:
    """Every rollout on its own. Sub-classes lay rows out, and put results back as [N, heads, D].

    For the comparison a shared token's gradient enters at its first copy; times are of dense gradients.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.token = torch.as_tensor(problem.forest.flat_to_tree(), device=problem.q.device)
        self.lengths = torch.as_tensor(problem.forest.rollout_length, device=problem.q.device)
        self.longest = int(self.lengths.max())
        self.starts = F.pad(self.lengths.cumsum(0), (1, 0)).int()

    def first_copies(self) -> torch.Tensor:
        """bool [N]."""
        copies = torch.arange(len(self.token), device=self.token.device)
        first = torch.full((self.problem.forest.tokens,), len(copies), device=self.token.device)
        first.scatter_reduce_(0, self.token, copies, "amin")
        return first[self.token] == copies

    def results(self):
        dense = self.grad_out
        self.grad_out = self.rows(self.problem.dout[self.token] * self.first_copies()[:, None, None])
        self.backward()
        self.grad_out = dense
        p = self.problem
        found = {"out": torch.empty_like(p.q)}
        found["out"][self.token] = self.flat(self.out.detach())
        for name, grad, like in zip(NAMES[1:], self.grads, (p.q, p.k, p.v), strict=True):
            summed = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
            flat = self.flat(grad).unflatten(1, (like.shape[1], -1)).sum(2, dtype=torch.float32)
            found[name] = summed.index_add_(0, self.token, flat)
        return found


class FlatFA2(Flat):
    """PyTorch's varlen FlashAttention-2. It has no GQA: kv heads are repeated."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        share = problem.workload.query_heads // problem.workload.kv_heads
        self.q, self.grad_out = problem.q[self.token], problem.dout[self.token]
        self.k, self.v = (x[self.token].repeat_interleave(share, 1) for x in (problem.k, problem.v))
        self.ends = self.starts, self.starts, self.longest, self.longest

    def rows(self, x):
        return x

    flat = rows

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


class FlatFA4(ByAutograd, Flat):
    """flash-attn-4's varlen call."""

    def __init__(self, problem: Problem):
        from flash_attn.cute import flash_attn_varlen_func

        Flat.__init__(self, problem)
        self.q, self.k, self.v = (x[self.token].requires_grad_() for x in (problem.q, problem.k, problem.v))
        self.grad_out = problem.dout[self.token]
        options = {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts, "causal": True}
        options |= {"max_seqlen_q": self.longest, "max_seqlen_k": self.longest, "softmax_scale": problem.scale}

        def call(q, k, v):
            out = flash_attn_varlen_func(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        self.call = call

    def rows(self, x):
        return x

    flat = rows


class FlatCudnn(ByAutograd, Flat):
    """PyTorch's cuDNN attention on rollouts padded to the longest."""

    def __init__(self, problem: Problem):
        Flat.__init__(self, problem)
        self.live = torch.arange(self.longest, device=problem.q.device) < self.lengths[:, None]
        self.q, self.k, self.v = (self.rows(x[self.token]).requires_grad_() for x in (problem.q, problem.k, problem.v))
        self.grad_out = self.rows(problem.dout[self.token])

    def rows(self, x):
        padded = x.new_zeros((len(self.lengths), self.longest, *x.shape[1:]))
        padded[self.live] = x
        return padded.transpose(1, 2)

    def flat(self, x):
        return x.transpose(1, 2)[self.live]

    def call(self, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.problem.scale)


FLAT = {"flat_cudnn": FlatCudnn, "flat_fa2": FlatFA2, "flat_fa4": FlatFA4}
RIVALS = FLAT | {
    "flex": Flex,
    "flex_tuned": partial(Flex, mode="max-autotune-no-cudagraphs"),
    "cudnn_raw": RawCudnn,
}
OURS = {name: partial(Backend, name=name) for name in ("auto", "triton", "cudnn")}
METHODS = OURS | RIVALS
