"""The Gated DeltaNet mixer on one rank of a packed forest: convolution, normalisation, recurrence, and its exchange.

Shapes: n local rows (padding row included), T tokens of the pack, Hk key heads, HV value heads, K and V head sizes,
W taps, C = 2 Hk K + HV V channels in the order [q | k | v].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from cp_engine.kernels import conv
from cp_engine.kernels.gdn import api as gdn
from cp_engine.sharding.exchange.heads import HeadTables, head_tables, heads_to_rows, rows_to_heads
from cp_engine.sharding.exchange.in_flight import InFlight
from cp_engine.sharding.exchange.kept import is_taken, kept
from cp_engine.sharding.exchange.rows import (
    RowTables,
    accumulation_dtype,
    fetch_rows_raw,
    row_tables,
    send_rows_home,
)
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
    def of_channels(self) -> conv.Channels:
        return conv.Channels(self.key_heads, self.value_heads, self.key_dim, self.value_dim)

    @property
    def splits(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        return self.of_channels.splits

    @property
    def channels(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True, eq=False)
class GdnTables:
    """A `GdnPlan` ready to execute on one rank; all layers of a pack share it."""

    plan: GdnPlan
    rows: int  # n
    mixed_rows: int  # rows of convolution and recurrence: n, or the T tokens of head shards
    entries: int
    chunk_size: int
    device: torch.device
    conv: conv.ConvTables
    history: RowTables
    fold: FoldTables
    order: HeadTables | None  # set for ulysses: convolution and recurrence then see all T tokens

    @cached_property
    def chunks(self) -> gdn.ChunkTables:
        """Tables of the `reference` backend."""
        p = self.plan
        arrays = (p.fragment_row, p.fragment_parent, p.fragment_entry, p.exit_fragment, p.exit_entry)
        return gdn.chunk_tables(*arrays, self.entries, self.mixed_rows, self.chunk_size, self.device)

    @cached_property
    def chains(self) -> gdn.ChainTables:
        """Tables of the `triton` backend."""
        p = self.plan
        fragments = (p.fragment_row, p.fragment_parent, p.fragment_entry, p.chain_fragment, p.chain_level)
        exits = (p.exit_fragment, p.exit_entry)
        return gdn.chain_tables(*fragments, *exits, self.entries, self.mixed_rows, self.chunk_size, self.device)

    def make_for_triton(self) -> None:
        """Make its tables now and not inside the first layer: copies to a device wait."""
        _ = self.chains, self.conv.short_taps, self.conv.late, self.conv.readers

    def of_backend(self, backend: str) -> gdn.ChunkTables | gdn.ChainTables:
        return self.chains if backend == "triton" else self.chunks


def gdn_tables(plan: GdnPlan, rank: int, device: torch.device | str = "cpu", chunk_size: int = 64) -> GdnTables:
    """Execution tables of one rank's plan, made once per pack."""
    device, tokens = torch.device(device), int(plan.fragment_row[-1])
    order = None if plan.order is None else head_tables(plan.order, rank, device)
    # Head shards hold exactly the tokens; token shards have a padding row where they hold none.
    rows = max(1, tokens) if order is None else tokens
    fetch = plan.history_fetch
    tables = GdnTables(
        plan=plan,
        rows=rows if order is None else order.rows,
        mixed_rows=rows,
        entries=int(plan.fold.entry_counts[rank]) if order is None else 0,
        chunk_size=chunk_size,
        device=device,
        conv=conv.conv_tables(plan.fragment_row, plan.history, rows, fetch.rows_in, device, fetch.send_rows),
        history=row_tables(fetch, device),
        fold=fold_tables(plan.fold, rank, device),
        order=order,
    )
    if device.type == "cuda":
        tables.make_for_triton()
    return tables


def tree_gated_delta_rule(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: GdnTables,
    group,
    heads: GdnHeads,
    backend: str = "auto",
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
        backend: ``reference``, ``triton`` (our kernels and fla's; float32, bfloat16 and float16), or ``auto``: triton
            for 16-bit rows on a GPU.

    Returns:
        [n, HV, V] in the dtype of ``mixed_qkv``. States and summaries are in the accumulation dtype.

    Raises:
        ValueError: for shapes that do not fit the heads or the plan, for a backend that cannot run, and for head counts
            that cannot be spread over the ranks; the latter on every rank, before anything is sent.
    """
    _check_shapes(mixed_qkv, conv_weight, g, beta, tables, heads)
    k, v = (mixed_qkv.new_empty(0, 1, size) for size in (heads.key_dim, heads.value_dim))
    backend = gdn.choose(backend, k, v)
    if tables.order is None:
        return _TreeMixer.apply(mixed_qkv, conv_weight, g, beta, tables, group, heads, backend)
    order = tables.order
    share, columns, gate_columns = _head_shares(heads, order.world, mixed_qkv.device)
    acc = accumulation_dtype(mixed_qkv.dtype)
    mixed = rows_to_heads(mixed_qkv, columns, order, group)
    gates = rows_to_heads(torch.cat([g.to(acc), beta.to(acc)], dim=1), gate_columns, order, group)
    own_g, own_beta = gates.chunk(2, dim=1)
    # No state leaves a head shard: the fold of this plan is empty, and so is the exchange of history rows.
    o = _TreeMixer.apply(mixed, conv_weight[columns[order.rank]], own_g, own_beta, tables, None, share, backend)
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


class _TreeMixer(torch.autograd.Function):
    """Convolution and recurrence with their exchanges. Saves inputs, fetched history rows, entry states and A, and of
    the chunks what the backend keeps: backward computes the rest again and exchanges gradients only. Activation
    recompute keeps what came from other ranks, or all results, so it exchanges nothing."""

    @staticmethod
    def forward(ctx, x, weight, g, beta, tables: GdnTables, group, heads: GdnHeads, backend: str) -> torch.Tensor:
        o, *saved = kept("mixer", lambda: _mix(x, weight, g, beta, tables, group, heads, backend), x)
        ctx.save_for_backward(x, weight, g, beta, *saved)
        ctx.tables, ctx.group, ctx.heads, ctx.backend = tables, group, heads, backend
        return o

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        x, weight, g, beta, fetched, entry_states, transition, *of_chunks = ctx.saved_tensors
        tables, group, backend = ctx.tables, ctx.group, ctx.backend
        channels, local = ctx.heads.of_channels, tables.of_backend(backend)
        inputs = _inputs(x, lambda: fetched, weight, g, beta, tables, ctx.heads, backend)
        stages = gdn.chunk_stages(inputs, local, tuple(of_chunks))
        back = gdn.backward_stages(inputs, stages, dout.to(inputs.v.dtype), local)
        dentry = gdn.entry_cotangents(inputs, stages, back, local)
        dexit = InFlight(lambda: fold_exit_cotangents(dentry, transition, tables.fold, group), dentry, transition)
        *dqkv, dg, dbeta = gdn.input_gradients(inputs, stages, back, entry_states, dexit.wait, local)
        dexit.wait()
        part = conv.qkv_backward(x, fetched, weight, tuple(dqkv), tables.conv, channels, backend)
        home = InFlight(lambda: send_rows_home(part.fetched, tables.history, group), part.fetched)
        dx = conv.rows_backward(part, home.wait, x, weight, tables.conv, backend)
        return dx, part.weight, dg.to(g.dtype), dbeta.to(beta.dtype), None, None, None, None


def _mix(x, weight, g, beta, tables: GdnTables, group, heads: GdnHeads, backend: str) -> tuple[torch.Tensor, ...]:
    """o, fetched history rows, entry states, A, and what the backend keeps of its chunks."""

    def fetch() -> torch.Tensor:
        (rows,) = kept("exchange", lambda: (fetch_rows_raw(x, tables.history, group),), x)
        return rows

    def fold() -> tuple[torch.Tensor, ...]:
        if tables.fold.empty:
            return fold_entry_states(*summary, tables.fold, group)
        return kept("exchange", lambda: fold_entry_states(*summary, tables.fold, group), x)

    history = InFlight(fetch, x)
    inputs = _inputs(x, history.wait, weight, g, beta, tables, heads, backend)
    local = tables.of_backend(backend)
    stages = gdn.chunk_stages(inputs, local)
    # Only the fold reads the summary, and a recomputation has the fold's result.
    summary = () if is_taken("exchange") and not tables.fold.empty else gdn.exit_summary(inputs, stages, local)
    states = InFlight(fold, x, *summary)
    o = gdn.outputs(inputs, stages, lambda: states.wait()[0], local).to(x.dtype)
    entry_states, transition = states.wait()
    return o, history.wait(), entry_states, transition, *gdn.kept_tensors(stages)


def _inputs(x, fetched, weight, g, beta, tables: GdnTables, heads: GdnHeads, backend: str) -> gdn.Inputs:
    """Rows of the recurrence: on `triton` in the dtype of x with decays in float32, else in the accumulation dtype."""
    q, k, v = conv.qkv(x, fetched, weight, tables.conv, heads.of_channels, backend)
    acc = accumulation_dtype(x.dtype)
    return gdn.Inputs(q, k, v, g.to(acc), beta.to(acc))


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
