"""The reference attention kernel: eager, on any device. It defines what the other backends must compute.

For query row i with visible key rows V(i), head by head, everything in the accumulation dtype:

    s_ij  = scale * q_i . k_j                       j in V(i)
    lse_i = log sum_j exp(s_ij)                     -inf where V(i) is empty
    p_ij  = exp(s_ij - lse_i)
    out_i = sum_j p_ij v_j                          0 where V(i) is empty

and backward, with the final out and lse (FlashAttention-2, Dao 2023, algorithm 2):

    delta_i = dout_i . out_i
    ds_ij   = p_ij (dout_i . v_j - delta_i)
    dv_j = sum_i p_ij dout_i      dk_j = scale * sum_i ds_ij q_i      dq_i = scale * sum_j ds_ij k_j

Correct means: equal to dense attention with the mask "j in V(i)" in exact arithmetic; a finite key outside V(i) has no
influence on row i, not even on its last bit; rows and keys without a partner have zero gradients; sums run in a fixed
order.

Query rows are worked off in blocks of `BLOCK_ROWS` (`GPU_BLOCK_ROWS` on a GPU), several short runs in one block, each
against the union of its rows' visible keys. Memory is a block's scores, never Nq x Nk.

Shapes: Nq query rows, Nk key rows, Hq query heads, Hk kv heads, g = Hq / Hk, D head size; R rows and K keys of a block.
Inside, tensors are head-major: queries [Hk, Nq * g, D] with a row's g heads side by side, keys and values [Hk, Nk, D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from cp_engine.kernels.attention.intervals import Intervals
from cp_engine.kernels.attention.pieces import Pieces, cut, row_pieces, tile_starts
from cp_engine.kernels.attention.placing import placed
from cp_engine.kernels.attention.ranges import expand, union
from cp_engine.kernels.shared.dtypes import accumulation_dtype

BLOCK_ROWS = 32  # small enough that a block's scores stay in cache; measured against 64 and 128 on a CPU
GPU_BLOCK_ROWS = 128  # there launches cost more than a cache saves (not measured)


@torch.no_grad()
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    intervals: Intervals,
    scale: float,
    accumulate: bool,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention`."""
    kv_heads, share = k.shape[1], q.shape[1] // k.shape[1]
    queries, keys, values = (_head_major(x, kv_heads) for x in (q, k, v))
    queries = queries * scale
    out = torch.zeros_like(queries)
    lse = queries.new_full(queries.shape[:2], -torch.inf)
    for block in intervals.on_device("reference", build_blocks):
        rows = block.head_rows(share)
        scores = _scores(queries[:, rows], block.take(keys), block, share)
        peak = scores.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -torch.inf, 0.0)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        # The largest score contributes exp(0): a row that sees anything has total >= 1, the others have 0.
        out[:, rows] = torch.bmm(weights, block.take(values)) / total.clamp_min(1.0)
        lse[:, rows] = (peak + total.log()).squeeze(-1)
    out_rows = _token_major(out, q.shape)
    into = into or (None, None)
    lse_rows = _token_major(lse.unsqueeze(-1), (*q.shape[:2], 1))[..., 0]
    return placed(out_rows if accumulate else out_rows.to(q.dtype), into[0]), placed(lse_rows, into[1])


@torch.no_grad()
def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    intervals: Intervals,
    scale: float,
    accumulate_q: bool,
    accumulate_kv: bool,
    into_q: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.attention.api.attention_backward`."""
    kv_heads, share = k.shape[1], q.shape[1] // k.shape[1]
    queries, keys, values, grads = (_head_major(x, kv_heads) for x in (q, k, v, dout))
    queries = queries * scale
    delta = (grads * _head_major(out, kv_heads)).sum(-1, keepdim=True)
    lse = _head_major(lse.unsqueeze(-1), kv_heads)
    # A row that sees nothing has only hidden scores; any finite number in place of its lse gives p = 0.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for block in intervals.on_device("reference", build_blocks):
        rows = block.head_rows(share)
        block_q, block_grad, block_k = queries[:, rows], grads[:, rows], block.take(keys)
        weights = _scores(block_q, block_k, block, share).sub_(lse[:, rows]).exp_()
        block.add_to(dv, torch.bmm(weights.mT, block_grad))
        ds = torch.bmm(block_grad, block.take(values).mT).sub_(delta[:, rows]).mul_(weights)
        dq[:, rows] = torch.bmm(ds, block_k)
        block.add_to(dk, torch.bmm(ds.mT, block_q))
    shaped = _token_major(dq.mul_(scale), q.shape), _token_major(dk, k.shape), _token_major(dv, v.shape)
    wanted = zip(shaped, (accumulate_q, accumulate_kv, accumulate_kv), strict=True)
    dq, dk, dv = (x if wide else x.to(q.dtype) for x, wide in wanted)
    return placed(dq, into_q), dk, dv


def prepare(step: str, q: torch.Tensor, kv_heads: int, intervals: Intervals) -> None:
    """See `cp_engine.kernels.attention.api.prepare`."""
    intervals.prepared("reference", build_blocks)


def _head_major(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[N, H, D] -> [Hk, N * (H / Hk), D] in the accumulation dtype."""
    rows, heads, size = x.shape
    share = heads // kv_heads
    grouped = x.to(accumulation_dtype(x.dtype)).reshape(rows, kv_heads, share, size)
    return grouped.permute(1, 0, 2, 3).reshape(kv_heads, rows * share, size)


def _token_major(x: torch.Tensor, shape) -> torch.Tensor:
    """Inverse of `_head_major`, to [N, H, D]."""
    rows, heads, size = shape
    kv_heads = x.shape[0]
    return x.reshape(kv_heads, rows, heads // kv_heads, size).permute(1, 0, 2, 3).reshape(rows, heads, size)


def _scores(queries: torch.Tensor, keys: torch.Tensor, block: Block, share: int) -> torch.Tensor:
    """Scaled queries [Hk, R * g, D] x keys [Hk, K, D] -> scores [Hk, R * g, K], -inf where a row sees no key."""
    scores = torch.bmm(queries, keys.mT)
    if block.hidden is not None:
        grouped = scores.view(scores.shape[0], -1, share, scores.shape[2])
        grouped[..., block.masked].masked_fill_(block.hidden, -torch.inf)
    return scores


@dataclass(frozen=True)
class Block:
    """Consecutive query rows and the ascending union of the key rows that they see."""

    rows: slice
    keys: slice | torch.Tensor  # key rows: a slice where the union is one range, else int64 [K]
    masked: slice  # columns of the union that not every row sees, and those between them
    hidden: torch.Tensor | None  # bool [R, 1, masked columns], True where the row does not see the key; None: no such

    def head_rows(self, share: int) -> slice:
        """The block's rows of a head-major query tensor."""
        return slice(self.rows.start * share, self.rows.stop * share)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[Hk, Nk, D] -> [Hk, K, D]."""
        return x[:, self.keys]

    def add_to(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Add [Hk, K, D] to the block's keys of [Hk, Nk, D]. No key occurs twice, so the order of sums is fixed."""
        x[:, self.keys] += part


def build_blocks(intervals: Intervals) -> list[Block]:
    """Cut the query rows into blocks, on the host, once for each `Intervals`. Blocks that see nothing are left out."""
    block_rows = GPU_BLOCK_ROWS if intervals.device.type == "cuda" else BLOCK_ROWS
    pieces, block = cut(row_pieces(intervals), tile_starts(intervals.rows, block_rows))
    blocks = -(-intervals.rows // block_rows)
    bounds = np.searchsorted(block, np.arange(blocks + 1)).tolist()
    built = []
    for index in range(blocks):
        rows = slice(index * block_rows, min((index + 1) * block_rows, intervals.rows))
        if bounds[index] < bounds[index + 1]:
            part = pieces.take(slice(bounds[index], bounds[index + 1]))
            built.append(_build_block(rows, part))
    return built


def _build_block(rows: slice, pieces: Pieces) -> Block:
    """The block of query rows ``rows`` from the pieces of these rows."""
    range_lo, range_hi = union(pieces.lo, pieces.last_hi)
    key = expand(range_lo, range_hi - range_lo)
    lo, core_lo, hi = (np.searchsorted(key, x) for x in (pieces.lo, pieces.last_lo, pieces.hi))

    # A column that all rows see is one that every row of some piece sees, and these pieces hold all rows.
    change = np.zeros(len(key) + 1, np.int64)
    core = hi > core_lo
    np.add.at(change, core_lo[core], pieces.length[core])
    np.add.at(change, hi[core], -pieces.length[core])
    partial = np.flatnonzero(np.cumsum(change[:-1]) < rows.stop - rows.start)
    masked = slice(int(partial[0]), int(partial[-1]) + 1) if len(partial) else slice(0, 0)
    hidden = None
    if len(partial):
        row, *ends = replace(pieces, first=pieces.first - rows.start, lo=lo, hi=hi).by_row()
        opens = np.zeros((rows.stop - rows.start, masked.stop - masked.start + 1), np.int8)
        for end, sign in zip(ends, (1, -1), strict=True):
            np.add.at(opens, (row, np.clip(end, masked.start, masked.stop) - masked.start), sign)
        seen = np.cumsum(opens[:, :-1], axis=1, dtype=np.int8) > 0
        hidden = torch.as_tensor(~seen[:, None])
    one = len(range_lo) == 1
    keys = slice(int(range_lo[0]), int(range_hi[0])) if one else torch.as_tensor(key)
    return Block(rows, keys, masked, hidden)
