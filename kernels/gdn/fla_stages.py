"""The tree-independent stages of the gated delta rule, from fla-core 0.6.0: the only file that names them.

fla's kernels restart their chunks at every sequence, so fragments are its sequences and each stage is one call over
all of them. Decays are cumulative inside a chunk and in the log2 domain; gradients of them are in units of the natural
logarithm. fla is imported at the first call, since that takes seconds and needs Triton.

Shapes: n rows, Hk key heads, H value heads, K and V head sizes, N chunks, C chunk size, F fragments, W taps,
D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VERSION = "0.6.0"
LOG2_E = 1.4426950408889634
# Parameters that this file passes, by module and function; a test compares them with the installed fla.
CONTRACT = {
    ("fla.ops.utils", "chunk_local_cumsum"): (
        "g", "chunk_size", "reverse", "scale", "cu_seqlens", "output_dtype", "chunk_indices",
    ),
    ("fla.ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_intra"): (
        "k", "v", "g", "beta", "cu_seqlens", "chunk_size", "chunk_indices",
    ),
    ("fla.ops.gated_delta_rule.wy_fast", "prepare_wy_repr_bwd"): (
        "k", "v", "beta", "A", "dw", "du", "g", "cu_seqlens", "chunk_indices",
    ),
    ("fla.ops.common.chunk_o", "chunk_bwd_dv_local"): (
        "q", "k", "do", "g", "scale", "cu_seqlens", "chunk_size", "chunk_indices",
    ),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_fwd"): (
        "x", "weight", "bias", "residual", "initial_state", "activation", "cu_seqlens", "chunk_indices", "chunk_size",
    ),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_bwd"): (
        "x", "dy", "dht", "weight", "initial_state", "activation", "cu_seqlens", "chunk_indices", "chunk_size",
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


def cumulative_decay(g: torch.Tensor, at: Sequences) -> torch.Tensor:
    """Log decays [n, H] summed inside each chunk, in the log2 domain; float32."""
    from fla.ops.utils import chunk_local_cumsum

    total = chunk_local_cumsum(
        g[None], chunk_size=at.chunk_size, scale=LOG2_E, output_dtype=torch.float32, **at.where()
    )
    return total[0]


def decay_gradient(dtotal: torch.Tensor, at: Sequences) -> torch.Tensor:
    """Gradient of g [n, H] from that of its (natural) cumulative sums; float32."""
    from fla.ops.utils import chunk_local_cumsum

    dg = chunk_local_cumsum(
        dtotal[None], chunk_size=at.chunk_size, reverse=True, output_dtype=torch.float32, **at.where()
    )
    return dg[0]


def solve(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, at: Sequences
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w [n, H, K], u [n, H, V] and the inverse T of each chunk [n, H, C], from k [n, Hk, K] and v [n, H, V]."""
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    w, u, inverse = chunk_gated_delta_rule_fwd_intra(
        k=k[None], v=v[None], g=decay[None], beta=beta[None], chunk_size=at.chunk_size, **at.where()
    )
    return w[0], u[0], inverse[0]


def solve_backward(
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    inverse: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    at: Sequences,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of k [n, Hk, K], v [n, H, V], beta [n, H] and the cumulative log decay [n, H] through w and u."""
    from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd

    dk, dv, dbeta, dtotal = prepare_wy_repr_bwd(
        k=k[None], v=v[None], beta=beta[None], A=inverse[None], dw=dw[None], du=du[None], g=decay[None], **at.where()
    )
    return dk[0], dv[0], dbeta[0], dtotal[0]


def value_gradient_inside(
    q: torch.Tensor, k: torch.Tensor, dout: torch.Tensor, decay: torch.Tensor, at: Sequences
) -> torch.Tensor:
    """Gradient of v' [n, H, V] through the outputs of the same chunk."""
    from fla.ops.common.chunk_o import chunk_bwd_dv_local

    dv = chunk_bwd_dv_local(
        q=q[None], k=k[None], do=dout[None], g=decay[None], scale=q.shape[2] ** -0.5, chunk_size=at.chunk_size,
        **at.where(),
    )  # fmt: skip
    return dv[0]


def convolution(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, at: Sequences) -> torch.Tensor:
    """SiLU of the causal depthwise convolution, [n, D].

    Args:
        x: [n, D].
        weight: [D, W].
        history: [F, D, W] inputs above each fragment on its root path, oldest first; column 0 is not read.
    """
    from fla.modules.causal_conv1d.ops import causal_conv1d_fwd

    y, _ = causal_conv1d_fwd(
        x=x[None], weight=weight, bias=None, residual=None, initial_state=history, activation="silu",
        chunk_size=at.chunk_size, **at.where(),
    )  # fmt: skip
    return y[0]


def convolution_backward(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, dout: torch.Tensor, at: Sequences
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [n, D], weight [D, W] and history [F, D, W], each in its dtype; column 0 of the last is zero.

    No state is carried from one fragment to another, so the gradient of what is left behind (fla's ``dht``) is none.
    """
    from fla.modules.causal_conv1d.ops import causal_conv1d_bwd

    dx, dweight, _, _, dhistory = causal_conv1d_bwd(
        x=x[None], dy=dout[None], dht=None, weight=weight, initial_state=history, activation="silu",
        chunk_size=at.chunk_size, **at.where(),
    )  # fmt: skip
    return dx[0], dweight, dhistory
