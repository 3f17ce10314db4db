"""Triton kernels of the head: what a row of logits says about its edges, and the gradient of the row in its place.

Shapes: m rows of logits (predictors of a chunk), V vocabulary, M predictors, E edges. ``first`` is the predictor of row
0, and edges of predictor i are ``edge_ptr[i]`` to ``edge_ptr[i + 1]``. ``scale`` is 1 / temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_engine.kernels.shared.triton import LOG2_E, tl, triton

# A program streams one row: 32 elements a thread at a time are 16 KiB in flight for 16-bit logits, and four programs of
# 256 threads fit a multiprocessor at 64 registers a thread: 64 KiB, three times what hides the latency of its memory.
LANES = 1024
BYTES = 16  # of a lane: what a thread loads at once
WARPS = 8
EDGES = 32  # read at once
EDGE_WARPS = 1


@triton.jit
def _merge(values, peak, total, moment, scale_log2, MASKED: tl.constexpr):
    """Add a tile of logits [LANES, WIDTH] to running sums of each lane: with e = exp((x - peak) * scale) the sum of e
    and that of e * (x - peak). A lane's values lie in one thread, and only its largest needs a second exponential."""
    higher = tl.maximum(peak, tl.max(values, 1))
    lowered = peak - higher
    shrink = tl.exp2(lowered * scale_log2)
    distance = values - higher[:, None]
    weight = tl.exp2(distance * scale_log2)
    if MASKED:
        distance = tl.where(values > float("-inf"), distance, 0.0)
    added = tl.sum(weight * distance, 1)
    return higher, shrink * total + tl.sum(weight, 1), shrink * (moment + lowered * total) + added


@triton.jit(do_not_specialize=["first"])
def _score_kernel(
    logits, edge_ptr, edge_target, log_prob, entropy, peaks, log_sums, entropies, first, scale, scale_log2,
    V: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Log-prob [E] and entropy [E] of a row's edges; of the row its largest logit, log2 of its sum, and entropy [M]."""
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.cast(tl.program_id(0), tl.int64)
    base, predictor = logits + row * V, first + row
    column = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    # Finite, so that a lane without a value subtracts no infinities.
    peak = tl.full([LANES], -1e30, tl.float32)
    total, moment = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    WHOLE: tl.constexpr = V // (LANES * WIDTH) * (LANES * WIDTH)
    for start in range(0, WHOLE, LANES * WIDTH):
        values = tl.load(base + start + column).to(tl.float32)
        peak, total, moment = _merge(values, peak, total, moment, scale_log2, False)
    if WHOLE < V:
        values = tl.load(base + WHOLE + column, mask=WHOLE + column < V, other=float("-inf")).to(tl.float32)
        peak, total, moment = _merge(values, peak, total, moment, scale_log2, True)

    largest = tl.max(peak, 0)
    lowered = peak - largest
    shrink = tl.exp2(lowered * scale_log2)
    whole = tl.sum(shrink * total, 0)
    mean = tl.sum(shrink * (moment + lowered * total), 0) / whole
    log_sum = tl.log2(whole)
    row_entropy = log_sum * LN_2 - mean * scale
    tl.store(peaks + predictor, largest)
    tl.store(log_sums + predictor, log_sum)
    tl.store(entropies + predictor, row_entropy)
    begin, end = tl.load(edge_ptr + predictor), tl.load(edge_ptr + predictor + 1)
    for start in range(begin, end, EDGES):
        edge = start + tl.arange(0, EDGES)
        live = edge < end
        target = tl.load(edge_target + edge, mask=live, other=0)
        value = tl.load(base + target, mask=live, other=0.0).to(tl.float32)
        tl.store(log_prob + edge, ((value - largest) * scale_log2 - log_sum) * LN_2, mask=live)
        tl.store(entropy + edge, tl.zeros([EDGES], tl.float32) + row_entropy, mask=live)


@triton.jit
def _edge_sums(dlog_prob, dentropy, begin, end, EDGES: tl.constexpr):
    """Gradients of a predictor's log-probs and entropies, added up in a fixed order."""
    scores, entropies = tl.zeros([EDGES], tl.float32), tl.zeros([EDGES], tl.float32)
    for start in range(begin, end, EDGES):
        edge = start + tl.arange(0, EDGES)
        scores += tl.load(dlog_prob + edge, mask=edge < end, other=0.0)
        entropies += tl.load(dentropy + edge, mask=edge < end, other=0.0)
    return tl.sum(scores, 0), tl.sum(entropies, 0)


@triton.jit
def _gradient(distance, largest, log_sum, constant, slope, scale_log2):
    """Gradient of logits without the terms of targets: ``p * (constant + slope * log2 p)``."""
    log_p = (distance - largest) * scale_log2 - log_sum
    return tl.exp2(log_p) * (constant + slope * log_p)


@triton.jit(do_not_specialize=["first"])
def _gradient_kernel(
    logits, edge_ptr, dlog_prob, dentropy, peaks, log_sums, entropies, first, scale, scale_log2,
    V: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of logits x by its gradient but for the terms of targets.

    With z = x * scale, G and h the summed gradients of the row's log-probs and entropies, and H the row's entropy:
    ``scale * p * (-G - h * (log p + H))``.
    """
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.cast(tl.program_id(0), tl.int64)
    base, predictor = logits + row * V, first + row
    begin, end = tl.load(edge_ptr + predictor), tl.load(edge_ptr + predictor + 1)
    scores, spread = _edge_sums(dlog_prob, dentropy, begin, end, EDGES)
    largest, log_sum = tl.load(peaks + predictor), tl.load(log_sums + predictor)
    constant = -scale * (scores + spread * tl.load(entropies + predictor))
    slope = -scale * spread * LN_2
    column = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    WHOLE: tl.constexpr = V // (LANES * WIDTH) * (LANES * WIDTH)
    for start in range(0, WHOLE, LANES * WIDTH):
        at = base + start + column
        values = tl.load(at).to(tl.float32)
        values = _gradient(values, largest, log_sum, constant, slope, scale_log2)
        tl.store(at, values.to(logits.dtype.element_ty))
    if WHOLE < V:
        at, inside = base + WHOLE + column, WHOLE + column < V
        values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        values = _gradient(values, largest, log_sum, constant, slope, scale_log2)
        tl.store(at, values.to(logits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def _target_kernel(
    logits, edge_ptr, edge_target, log_prob, dlog_prob, dentropy, entropies, first, scale,
    V: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a row's targets again, with their own terms, rounded once.

    A predictor may have edges to equal tokens (trees shared by keys beside the ids); each writes the same sum.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    base, predictor = logits + row * V, first + row
    begin, end = tl.load(edge_ptr + predictor), tl.load(edge_ptr + predictor + 1)
    scores, spread = _edge_sums(dlog_prob, dentropy, begin, end, EDGES)
    row_entropy = tl.load(entropies + predictor)
    for start in range(begin, end, EDGES):
        edge = start + tl.arange(0, EDGES)
        live = edge < end
        target = tl.load(edge_target + edge, mask=live, other=-1)
        own = tl.zeros([EDGES], tl.float32)
        for other_start in range(begin, end, EDGES):
            other = other_start + tl.arange(0, EDGES)
            other_target = tl.load(edge_target + other, mask=other < end, other=-2)
            gradient = tl.load(dlog_prob + other, mask=other < end, other=0.0)
            own += tl.sum(tl.where(target[:, None] == other_target[None, :], gradient[None, :], 0.0), 1)
        log_p = tl.load(log_prob + edge, mask=live, other=0.0)
        value = own - tl.exp(log_p) * (scores + spread * (log_p + row_entropy))
        tl.store(base + target, (value * scale).to(logits.dtype.element_ty), mask=live)


class Statistics(NamedTuple):
    """Of each predictor, float32 [M]; tensors of their own, since Triton compiles a kernel for aligned pointers."""

    largest: torch.Tensor  # logit
    log_sum: torch.Tensor  # log2 of the sum of exp((x - largest) * scale)
    entropy: torch.Tensor  # nats

    @classmethod
    def empty(cls, hidden: torch.Tensor) -> Statistics:
        return cls(*(hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3)))


def _sizes(logits: torch.Tensor) -> dict[str, int]:
    return {"V": logits.shape[1], "LANES": LANES, "WIDTH": BYTES // logits.element_size(), "EDGES": EDGES}


def score_rows(
    logits: torch.Tensor,
    first: int,
    edge_ptr: torch.Tensor,
    edge_target: torch.Tensor,
    temperature: float,
    log_prob: torch.Tensor,
    entropy: torch.Tensor,
    statistics: Statistics,
) -> None:
    """Fill the log-probs and entropies of the edges of rows, and the rows' statistics.

    Args:
        logits: [m, V] of predictors ``first`` to ``first + m``.
        edge_ptr: int64 [M + 1].
        edge_target: int64 [E].
        log_prob: float32 [E], of which the edges of these rows are written; as ``entropy`` [E].
        statistics: of which the rows' are written.
    """
    _score_kernel[(len(logits),)](
        logits, edge_ptr, edge_target, log_prob, entropy, *statistics, first, 1 / temperature, LOG2_E / temperature,
        **_sizes(logits), num_warps=WARPS,
    )  # fmt: skip


def gradients_in_place(
    logits: torch.Tensor,
    first: int,
    edge_ptr: torch.Tensor,
    edge_target: torch.Tensor,
    temperature: float,
    log_prob: torch.Tensor,
    statistics: Statistics,
    dlog_prob: torch.Tensor,
    dentropy: torch.Tensor,
) -> None:
    """Overwrite logits [m, V] by their gradients, given those of log-probs and entropies (contiguous float32 [E]).

    The others are what `score_rows` got and made.
    """
    _gradient_kernel[(len(logits),)](
        logits, edge_ptr, dlog_prob, dentropy, *statistics, first, 1 / temperature, LOG2_E / temperature,
        **_sizes(logits), num_warps=WARPS,
    )  # fmt: skip
    _target_kernel[(len(logits),)](
        logits, edge_ptr, edge_target, log_prob, dlog_prob, dentropy, statistics.entropy, first, 1 / temperature,
        V=logits.shape[1], EDGES=EDGES, num_warps=EDGE_WARPS,
    )  # fmt: skip
