"""v' of twigs, chains of one chunk whose state nobody reads: ``v' = u - w H``, with H read from their parent's row.

The state pass rounds H to the dtype of w before this product, so both give the same bits.

Shapes: n tokens, H value heads, K and V head sizes (KP: K padded), C chunk size, R state rows.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.gdn.triton.chain_tables import CHUNK_COLUMNS, StatePass
from cp_engine.kernels.gdn.triton.primitives import Sizes, load_rows
from cp_engine.kernels.shared.triton import padded, precision, tl, triton

# Without a loop one stage is all: other programs hide the loads.
TWIGS = Sizes(128, 8, 1)
FLOAT32 = Sizes(16, 8, 1)


@triton.jit
def _twig_kernel(
    w, u, rows, new_v, chunks, twigs,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    # All heads of a chunk run together: they read the same rows. One axis, since the others end at 65,535.
    chunk, head = tl.load(twigs + tl.program_id(0) // H), tl.program_id(0) % H
    start = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS), tl.int64)
    enters = tl.cast(tl.load(chunks + chunk * CHUNK_COLUMNS + 5), tl.int64)
    row, inner, column = tl.arange(0, C), tl.arange(0, KP), tl.program_id(1) * BV + tl.arange(0, BV)
    live = row < tl.load(chunks + chunk * CHUNK_COLUMNS + 1)
    erased = load_rows(w, start, row, head, inner, live, H, K)
    at = rows + (enters * H + head) * (K * V) + inner[:, None] * V + column[None, :]
    live_column = (column < V) & (column * 0 + enters >= 0)
    state = tl.load(at, mask=(inner < K)[:, None] & live_column[None, :], other=0.0)
    value = load_rows(u, start, row, head, column, live, H, V).to(tl.float32)
    value -= tl.dot(erased, state, input_precision=PRECISION)
    at = new_v + start * (H * V) + head * V + row[:, None] * (H * V) + column[None, :]
    tl.store(at, value.to(new_v.dtype.element_ty), mask=live[:, None] & (column < V)[None, :])


def run_twigs(
    w: torch.Tensor, u: torch.Tensor, rows: torch.Tensor, new_v: torch.Tensor, walk: StatePass, chunk_size: int
) -> None:
    """Fill in ``new_v`` [n, H, V] for the twigs of one wave.

    Args:
        w: [n, H, K].
        u: [n, H, V].
        rows: [R, H, K, V], written by the wave's state pass.
    """
    if not len(walk.twigs):
        return
    heads, key_dim, value_dim = rows.shape[1:]
    sizes = FLOAT32 if u.dtype == torch.float32 else TWIGS
    columns = min(sizes.columns, padded(value_dim))
    _twig_kernel[(heads * len(walk.twigs), triton.cdiv(value_dim, columns))](
        w, u, rows, new_v, walk.chunks, walk.twigs,
        H=heads, K=key_dim, V=value_dim, KP=padded(key_dim), BV=columns, C=chunk_size, PRECISION=precision(u.dtype),
        CHUNK_COLUMNS=CHUNK_COLUMNS, num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
