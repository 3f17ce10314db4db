"""The Gated DeltaNet mixer on one rank of a packed forest: convolution, normalisation, recurrence, and its exchange.

Shapes: n local rows (padding row included), T tokens of the pack, Hk key heads, HV value heads, K and V head sizes,
W taps, C = 2 Hk K + HV V channels in the order [q | k | v].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from cp_engine.kernels.conv import ConvTables, conv_tables, tree_conv
from cp_engine.kernels.gdn import api as gdn
from cp_engine.sharding.exchange.heads import HeadTables, head_tables, heads_to_rows, rows_to_heads
from cp_engine.sharding.exchange.rows import RowTables, accumulation_dtype, fetch_rows, row_tables
from cp_engine.sharding.exchange.states import FoldTables, fold_entry_states, fold_exit_cotangents, fold_tables
from cp_engine.sharding.gdn_plan import GdnPlan


@dataclass(frozen=True)
class GdnHeads:
    """Head counts and sizes of a layer; value head j reads key head ``j // (value_heads // key_heads)``.

    Raises:
        ValueError: if the value heads are not a multiple of the key heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self):
        if self.key_heads < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"value heads must be a multiple of key heads, got {self.value_heads} value heads and "
                f"{self.key_heads} key heads"
            )

    @property
    def splits(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True, eq=False)
class GdnTables:
    """A `GdnPlan` ready to execute on one rank; all layers of a pack share it."""

    rows: int  # n
    conv: ConvTables
    history: RowTables
    chunks: gdn.ChunkTables
    fold: FoldTables
    order: HeadTables | None  # set for ulysses: conv and chunks then describe all T tokens


def gdn_tables(plan: GdnPlan, rank: int, device: torch.device | str = "cpu", chunk_size: int = 64) -> GdnTables:
    """Execution tables of one rank's plan, made once per pack."""
    tokens = int(plan.fragment_row[-1])
    order = None if plan.order is None else head_tables(plan.order, rank, device)
    # Head shards hold exactly the tokens; token shards have a padding row where they hold none.
    rows = max(1, tokens) if order is None else tokens
    chunks = gdn.chunk_tables(
        plan.fragment_row,
        plan.fragment_parent,
        plan.fragment_entry,
        plan.exit_fragment,
        plan.exit_entry,
        entries=int(plan.fold.entry_counts[rank]) if order is None else 0,
        rows=rows,
        chunk_size=chunk_size,
        device=device,
    )
    return GdnTables(
        rows=rows if order is None else order.rows,
        conv=conv_tables(plan.fragment_row, plan.history, rows, plan.history_fetch.rows_in, device),
        history=row_tables(plan.history_fetch, device),
        chunks=chunks,
        fold=fold_tables(plan.fold, rank, device),
        order=order,
    )


def tree_gated_delta_rule(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: GdnTables,
    group,
    heads: GdnHeads,
) -> torch.Tensor:
    """Convolution, SiLU, L2 norm of q and k, and the gated delta rule along root paths, across the ranks of ``group``.

    Every rank of the group must call it, and call backward, also one that has only a padding row (whose output and
    gradients are zero). Parameter gradients are this rank's share: they sum over the group.

    Args:
        mixed_qkv: [n, C] projections before the convolution.
        conv_weight: [C, W], tap W - 1 on the token itself.
        g: [n, HV] log decay.
        beta: [n, HV].
        group: process group of the CP ranks; None on a single rank.

    Returns:
        [n, HV, V] in the dtype of ``mixed_qkv``. States and summaries are in the accumulation dtype.

    Raises:
        ValueError: for shapes that do not fit the heads or the plan, and for head counts that cannot be spread over
            the ranks; the latter on every rank, before anything is sent.
    """
    _check_shapes(mixed_qkv, conv_weight, g, beta, tables, heads)
    if tables.order is None:
        history = fetch_rows(mixed_qkv, tables.history, group)
        return _mix(torch.cat([mixed_qkv, history]), conv_weight, g, beta, tables, group, heads)
    order = tables.order
    share, columns, gate_columns = _head_shares(heads, order.world)
    columns, gate_columns = columns.to(mixed_qkv.device), gate_columns.to(mixed_qkv.device)
    acc = accumulation_dtype(mixed_qkv.dtype)
    mixed = rows_to_heads(mixed_qkv, columns, order, group)
    gates = rows_to_heads(torch.cat([g.to(acc), beta.to(acc)], dim=1), gate_columns, order, group)
    own_g, own_beta = gates.chunk(2, dim=1)
    # No state leaves a head shard: the fold of this plan is empty.
    o = _mix(mixed, conv_weight[columns[order.rank]], own_g, own_beta, tables, None, share)
    rows = heads_to_rows(o.flatten(1), order, group)
    return rows.reshape(order.rows, heads.value_heads, heads.value_dim)


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


def _mix(x_ext, conv_weight, g, beta, tables: GdnTables, group, heads: GdnHeads) -> torch.Tensor:
    """Convolve rows and run the recurrence on them; [rows + fetched, C] -> [rows, HV, V]."""
    mixed = F.silu(tree_conv(x_ext, conv_weight, tables.conv)).to(accumulation_dtype(x_ext.dtype))
    q, k, v = mixed.split(heads.splits, dim=1)
    q, k = (gdn.l2_normalise(x.unflatten(1, (heads.key_heads, heads.key_dim))) for x in (q, k))
    v = v.unflatten(1, (heads.value_heads, heads.value_dim))
    o = _TreeRecurrence.apply(q, k, v, g.to(v.dtype), beta.to(v.dtype), tables, group)
    return o.to(x_ext.dtype)


class _TreeRecurrence(torch.autograd.Function):
    """The recurrence and its exchange of states; saves inputs, entry states and A, nothing per chunk."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, tables: GdnTables, group) -> torch.Tensor:
        inputs = gdn.Inputs(q, k, v, g, beta)
        stages = gdn.chunk_stages(inputs, tables.chunks)
        summary = gdn.exit_summary(inputs, stages, tables.chunks)
        entry_states, transition = fold_entry_states(*summary, tables.fold, group)
        ctx.save_for_backward(*inputs, entry_states, transition)
        ctx.tables, ctx.group = tables, group
        return gdn.outputs(inputs, stages, entry_states, tables.chunks)

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        *rows, entry_states, transition = ctx.saved_tensors
        inputs, tables = gdn.Inputs(*rows), ctx.tables
        stages = gdn.chunk_stages(inputs, tables.chunks)
        back = gdn.backward_stages(inputs, dout, tables.chunks)
        dentry = gdn.entry_cotangents(inputs, stages, back, tables.chunks)
        dexit = fold_exit_cotangents(dentry, transition, tables.fold, ctx.group)
        return *gdn.input_gradients(inputs, stages, back, entry_states, dexit, tables.chunks), None, None


@lru_cache(maxsize=64)
def _head_shares(heads: GdnHeads, world: int) -> tuple[GdnHeads, torch.Tensor, torch.Tensor]:
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
    return share, torch.stack(columns), torch.stack(gates)
