"""The solve of each chunk of the gated delta rule, and w and u from it, by fla-core 0.6.0: the only file that names it.

fla's kernels restart their chunks at every sequence, so fragments are its sequences and each stage is one call over
all of them. Decays are cumulative inside a chunk and in the log2 domain. fla is imported at the first call, since that
takes seconds and needs Triton.

Shapes: n rows, Hk key heads, H value heads, K and V head sizes, N chunks, C chunk size, F fragments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VERSION = "0.6.0"
# Parameters that this file passes, by module and function; a test compares them with the installed fla.
CONTRACT = {
    ("fla.ops.utils", "solve_tril"): ("A", "cu_seqlens", "output_dtype", "chunk_indices"),
    ("fla.ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_intra"): (
        "k", "v", "g", "beta", "cu_seqlens", "chunk_size", "chunk_indices",
    ),
    ("fla.ops.gated_delta_rule.wy_fast", "recompute_w_u_fwd"): (
        "k", "v", "beta", "A", "g", "cu_seqlens", "chunk_indices",
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sequences:
    """Fragments in fla's words."""

    fragment_row: torch.Tensor  # int64 [F + 1]
    chunk_fragment: torch.Tensor  # int64 [N, 2] fragment and place in it
    chunk_size: int

    def where(self) -> dict[str, torch.Tensor]:
        return {"cu_seqlens": self.fragment_row, "chunk_indices": self.chunk_fragment}


def solve(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, at: Sequences
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w [n, H, K], u [n, H, V] and the inverse T of each chunk [n, H, C], from k [n, Hk, K] and v [n, H, V]."""
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    w, u, inverse = chunk_gated_delta_rule_fwd_intra(
        k=k[None], v=v[None], g=decay[None], beta=beta[None], chunk_size=at.chunk_size, **at.where()
    )
    return w[0], u[0], inverse[0]


def inverse_of(products: torch.Tensor, dtype: torch.dtype, at: Sequences) -> torch.Tensor:
    """(I + A)^-1 of each chunk [n, H, C] in ``dtype``, from A float32 [n, H, C]."""
    from fla.ops.utils import solve_tril

    return solve_tril(products[None], output_dtype=dtype, **at.where())[0]


def w_and_u(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, inverse: torch.Tensor, at: Sequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """w [n, H, K] and u [n, H, V] from the inverse of each chunk."""
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

    w, u = recompute_w_u_fwd(k=k[None], v=v[None], beta=beta[None], A=inverse[None], g=decay[None], **at.where())
    return w[0], u[0]
