"""The Gated DeltaNet mixer on one rank of a packed forest: convolution, normalisation, recurrence, and its exchange.

Shapes: n local rows (padding row included), T tokens of the pack, Hk key heads, HV value heads, K and V head sizes,
W taps, C = 2 Hk K + HV V channels in the order [q | k | v].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from cp_engine.kernels.gdn import api as gdn
from cp_engine.layers.gdn_mixer import start_mixing
from cp_engine.layers.gdn_tables import GdnHeads, GdnTables
from cp_engine.sharding.exchange.heads import heads_to_rows, rows_to_heads
from cp_engine.sharding.exchange.rows import accumulation_dtype
from cp_engine.sharding.exchange.transport import transport_for


def start_gated_delta_rule(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: GdnTables,
    group,
    heads: GdnHeads,
    backend: str = "auto",
) -> Callable[[], torch.Tensor]:
    """Convolution, SiLU, L2 norm of q and k, and the gated delta rule along root paths, across the ranks of ``group``:
    all that comes before states cross ranks, and the rest in the function that it returns.

    What the caller computes before calling that function runs while states move. So does its backward while their
    gradients move: autograd runs it between those of the two halves, since it goes by the order of the forward. It must
    not wait for other ranks: some of them have states to send first, some to take. Every rank of the group must call
    both, and backward, also one that has only a padding row (whose output and gradients are zero). Parameter gradients
    are this rank's share: they sum over the group.

    Args:
        mixed_qkv: [n, C] projections before the convolution.
        conv_weight: [C, W], tap W - 1 on the token itself.
        g: [n, HV] log decay.
        beta: [n, HV].
        group: process group of the CP ranks; None on a single rank.
        backend: ``reference``, ``triton`` (our kernels and fla's; float32, bfloat16 and float16), or ``auto``: triton
            for 16-bit rows on a GPU.

    Returns:
        A function, to be called once, that gives the outputs [n, HV, V] in the dtype of ``mixed_qkv``. States and
        summaries are in the accumulation dtype.

    Raises:
        ValueError: for shapes that do not fit the heads or the plan, for a backend that cannot run, for a transport
            that cannot, and for head counts that cannot be spread over the ranks; the latter on every rank, before
            anything is sent.
    """
    _check_shapes(mixed_qkv, conv_weight, g, beta, tables, heads)
    k, v = (mixed_qkv.new_empty(0, 1, size) for size in (heads.key_dim, heads.value_dim))
    backend = gdn.choose(backend, k, v)
    if tables.order is None:
        transport = None if group is None else transport_for(group, mixed_qkv.device, tables.transport)
        return start_mixing(mixed_qkv, conv_weight, g, beta, tables, transport, heads, backend)
    order = tables.order
    share, columns, gate_columns = _head_shares(heads, order.world, mixed_qkv.device)
    acc = accumulation_dtype(mixed_qkv.dtype)
    mixed = rows_to_heads(mixed_qkv, columns, order, group)
    gates = rows_to_heads(torch.cat([g.to(acc), beta.to(acc)], dim=1), gate_columns, order, group)
    own_g, own_beta = gates.chunk(2, dim=1)
    # No state leaves a head shard: the fold of this plan is empty, and so is the exchange of history rows.
    finish = start_mixing(mixed, conv_weight[columns[order.rank]], own_g, own_beta, tables, None, share, backend)

    def to_rows() -> torch.Tensor:
        rows = heads_to_rows(finish().flatten(1), order, group)
        return rows.reshape(order.rows, heads.value_heads, heads.value_dim)

    return to_rows


def _check_shapes(mixed_qkv, conv_weight, g, beta, tables: GdnTables, heads: GdnHeads) -> None:
    expected = {
        "mixed_qkv": (mixed_qkv, (tables.rows, heads.channels)),
        "conv_weight": (conv_weight, (heads.channels, tables.conv.width)),
        "g": (g, (tables.rows, heads.value_heads)),
        "beta": (beta, (tables.rows, heads.value_heads)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} for {heads} and this pack's plan, got {list(tensor.shape)}: "
                "use the rows of the plan, and plan with conv_width equal to the model's convolution width"
            )


@lru_cache(maxsize=64)
def _head_shares(heads: GdnHeads, world: int, device: torch.device) -> tuple[GdnHeads, torch.Tensor, torch.Tensor]:
    """Heads of one rank, the channels [P, c] of mixed_qkv and the columns [P, 2 HV / P] of (g | beta) of each rank.

    Key heads fewer than ranks are repeated interleaved, so that a rank's value heads find their own key head.
    """
    keys, values = heads.key_heads, heads.value_heads
    if values % world or (keys % world and world % keys):
        raise ValueError(
            f"gdn_exchange ulysses cannot spread {keys} key and {values} value heads over {world} ranks: value heads "
            "must divide by the ranks, and key heads by the ranks or the ranks by key heads. Use gdn_exchange affine "
            "or another cp"
        )
    share = GdnHeads(max(1, keys // world), values // world, heads.key_dim, heads.value_dim)
    columns, gates = [], []
    for rank in range(world):
        key = torch.arange(share.key_heads * heads.key_dim) + (rank * keys // world) * heads.key_dim
        value = torch.arange(share.value_heads * heads.value_dim) + rank * share.value_heads * heads.value_dim
        columns.append(torch.cat([key, heads.splits[0] + key, 2 * heads.splits[0] + value]))
        gate = torch.arange(share.value_heads) + rank * share.value_heads
        gates.append(torch.cat([gate, values + gate]))
    return share, torch.stack(columns).to(device), torch.stack(gates).to(device)
