"""The methods that attention is measured with: our backends, flat rollouts, FlexAttention, the raw cuDNN call.

A method is called with a `Problem` and yields one or more calls. A call has ``forward()`` and ``backward()``, which are
timed, and ``results_into(found)``, which writes its out, dq, dk, dv as rows of the tree: they are compared with the
truth before a time counts.

Shapes: T tree tokens, B blocks of T, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.attention_flat import FlatCudnn, FlatFA2, FlatFA4, flat_calls
from benchmarks.attention_problem import NAMES, Problem
from cp_engine.kernels.attention import attention, attention_backward
from cp_engine.kernels.attention.cudnn import interval_ends
from cp_engine.sharding.forest import Forest

BLOCK = 128  # FlexAttention's mask blocks; its FLASH backend takes no others on Hopper
MASK_ROWS = 8 * BLOCK  # query rows whose visibility is looked at together when a mask is made


class Backend:
    """One of our own, ``backward_name`` where another one computes the gradients."""

    def __init__(self, problem: Problem, name: str, backward_name: str | None = None):
        self.problem = problem
        self.names = name, backward_name or name
        self.call = {"intervals": problem.intervals, "scale": problem.scale}

    def forward(self):
        self.saved = attention(self.problem.q, self.problem.k, self.problem.v, backend=self.names[0], **self.call)

    def backward(self):
        p = self.problem
        self.grads = attention_backward(p.q, p.k, p.v, *self.saved, p.dout, backend=self.names[1], **self.call)

    def results_into(self, found: dict[str, torch.Tensor]):
        found.update(zip(NAMES, (self.saved[0], *self.grads), strict=True))


class ByAutograd:
    """A differentiable call on tensors q, k, v. Sub-classes set them, ``grad_out``, and ``call``."""

    def forward(self):
        self.out = self.call(self.q, self.k, self.v)

    def backward(self):
        self.grads = torch.autograd.grad(self.out, (self.q, self.k, self.v), self.grad_out, retain_graph=True)

    def results_into(self, found: dict[str, torch.Tensor]):
        found.update((name, self.rows(x)) for name, x in zip(NAMES, (self.out.detach(), *self.grads), strict=True))


class Flex(ByAutograd):
    """Compiled FlexAttention with the ancestor test as mask."""

    def __init__(self, problem: Problem, mode: str = "default", options: dict | None = None):
        from torch.nn.attention.flex_attention import flex_attention

        # Every workload has sizes of its own. After eight of them the compiler would give up on constant sizes.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        mask = block_mask(problem.forest, problem.device)
        self.call = partial(compiled, block_mask=mask, enable_gqa=True, scale=problem.scale, kernel_options=options)
        self.q, self.k, self.v = (
            x.transpose(0, 1).contiguous()[None].requires_grad_() for x in (problem.q, problem.k, problem.v)
        )
        self.grad_out = problem.dout.transpose(0, 1).contiguous()[None]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[0].transpose(0, 1)


def block_mask(forest: Forest, device: torch.device):
    """What `create_block_mask` makes of the ancestor test, without compiling for every number of tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    tokens = forest.tokens
    end = torch.as_tensor(forest.subtree_end[forest.segment_of], dtype=torch.int32, device=device)

    def sees(_batch, _head, query, key):
        return (key <= query) & (query < end[key])

    blocks = -(-tokens // BLOCK)
    key = torch.arange(tokens, device=device)
    visible = torch.zeros((blocks, blocks), dtype=torch.int32, device=device)
    for begin in range(0, tokens, MASK_ROWS):
        query = torch.arange(begin, min(begin + MASK_ROWS, tokens), device=device)
        seen = torch.zeros((MASK_ROWS, blocks * BLOCK), dtype=torch.bool, device=device)
        seen[: len(query), :tokens] = sees(0, 0, query[:, None], key)
        counts = seen.view(-1, BLOCK, blocks, BLOCK).sum((1, 3), dtype=torch.int32)
        visible[begin // BLOCK : begin // BLOCK + len(counts)] = counts[: blocks - begin // BLOCK]
    full = visible == BLOCK * BLOCK
    parts = []
    for chosen in ((visible > 0) & ~full, full):
        order = chosen.int().argsort(dim=1, descending=True, stable=True)
        parts += [chosen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()]
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens))


class RawCudnn(ByAutograd):
    """`cudnn.flex_attention` as its documentation calls it."""

    def __init__(self, problem: Problem):
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        self.q, self.k, self.v = (x[None].detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
        plan = create_mask_plan(interval_ends(problem.intervals).to(problem.device)[None], self.q, self.k, self.v)
        self.call = partial(flex_attn_func, mask_plan=plan, softmax_scale=problem.scale)
        self.grad_out = problem.dout[None]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[0]


def one_call(problem: Problem, kind: Callable) -> Iterator:
    yield kind(problem)


BACKENDS = ("auto", "triton", "cudnn")
OURS = {name: partial(one_call, kind=partial(Backend, name=name)) for name in BACKENDS}
OURS["cudnn_fa4"] = partial(one_call, kind=partial(Backend, name="cudnn", backward_name="fa4"))
FLAT = {
    name: partial(flat_calls, kind=kind)
    for name, kind in (("flat_cudnn", FlatCudnn), ("flat_fa2", FlatFA2), ("flat_fa4", FlatFA4))
}
RIVALS = FLAT | {
    name: partial(one_call, kind=kind)
    for name, kind in (
        ("cudnn_raw", RawCudnn),
        ("flex", Flex),
        ("flex_fa4", partial(Flex, options={"BACKEND": "FLASH"})),
        ("flex_tuned", partial(Flex, mode="max-autotune-no-cudagraphs")),
    )
}
METHODS = OURS | RIVALS
