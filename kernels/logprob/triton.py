"""The Triton backend of the head: any GPU that Triton compiles for, and Triton's interpreter on a CPU.

A chunk's logits are one product into a buffer that all chunks share, and are read once; backward makes them again, and
overwrites them by their gradients, which two products take to the hidden states and the weight.

Shapes: M predictors, C hidden size, V vocabulary, E edges.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from cp_engine.kernels.logprob.row_kernels import Statistics, gradients_in_place, score_rows
from cp_engine.kernels.shared import packages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a chunk's logits: 3,456 rows of 151,936 in 16 bits. The gradient of a trained weight is added up in float32 once a
# chunk, 5 GB of traffic at 151,936 x 4,096 (1.2 ms), against 6 ms of a chunk's product for it.
CHUNK_BYTES = 2**30
TILE = 128  # rows of a matrix product's tile; whole chunks have a multiple of it


def why_not(hidden: torch.Tensor, head: nn.Module) -> str | None:
    """Why this backend cannot score hidden states like these with a head, in the user's words; None when it can."""
    if type(head) is not nn.Linear or head.bias is not None:
        # An adapter computes in its module's forward, which this backend does not call.
        return (
            f"needs a head that is one linear layer without bias or adapter; got {type(head).__name__}. Use reference"
        )
    if hidden.dtype not in DTYPES:
        return f"computes float32, bfloat16 and float16; got {hidden.dtype}. Use reference"
    if hidden.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU, or TRITON_INTERPRET=1 before the start; hidden states are on {hidden.device}"
    if not packages.installed("triton"):
        return "needs the package triton (pip install triton)"
    return None


def chunk_rows(vocab_size: int, element_size: int) -> int:
    """Predictors of a chunk."""
    rows = CHUNK_BYTES // (vocab_size * element_size)
    return max(1, rows // TILE * TILE or rows)


def edge_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, edge_ptr: torch.Tensor, edge_target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy [E] in float32 of the edges of predictors with hidden states [M, C], weight [V, C].

    Gradients of the weight add up in float32 over the chunks and are rounded once.

    Args:
        edge_ptr: int64 [M + 1] first edge of each predictor.
        edge_target: int64 [E].
    """
    return _EdgeLogprobs.apply(hidden, weight, edge_ptr, edge_target, temperature)


def logit_chunks(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """First predictor, hidden states and logits of each chunk; the logits of the next overwrite them."""
    rows = chunk_rows(len(weight), weight.element_size())
    buffer = hidden.new_empty((min(rows, len(hidden)), len(weight)))
    for first in range(0, len(hidden), rows):
        part = hidden[first : first + rows]
        yield first, part, torch.mm(part, weight.t(), out=buffer[: len(part)])


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where total is float32 and the factors may have 16 bits."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # PyTorch has this product on CUDA devices only
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class _EdgeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, edge_ptr, edge_target, temperature):
        log_prob = hidden.new_empty(len(edge_target), dtype=torch.float32)
        entropy, statistics = torch.empty_like(log_prob), Statistics.empty(hidden)
        edges = edge_ptr, edge_target
        for first, _, logits in logit_chunks(hidden, weight):
            score_rows(logits, first, *edges, temperature, log_prob, entropy, statistics)
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, weight, *edges, log_prob, *statistics)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dlog_prob, dentropy):
        hidden, weight = ctx.saved_tensors[:2]
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        _pull_back(ctx, dlog_prob.contiguous(), dentropy.contiguous(), dhidden, dweight)
        # The logits are gone before the weight's gradient is copied.
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None


def _pull_back(ctx, dlog_prob, dentropy, dhidden: torch.Tensor | None, dweight: torch.Tensor | None) -> None:
    """Write the gradient of the hidden states, and add to that of the weight, where they are asked for."""
    hidden, weight, edge_ptr, edge_target, log_prob, *statistics = ctx.saved_tensors
    made = log_prob, Statistics(*statistics)
    for first, part, logits in logit_chunks(hidden, weight):
        gradients_in_place(logits, first, edge_ptr, edge_target, ctx.temperature, *made, dlog_prob, dentropy)
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[first : first + len(part)])
        if dweight is not None:
            add_product(dweight, logits.t(), part)
