"""Heads of a Gated DeltaNet layer, and a pack's plan on one rank, ready to execute.

Shapes: n local rows (padding row included), T tokens of the pack, Hk key heads, HV value heads, K and V head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from cp_engine.kernels import conv
from cp_engine.kernels.gdn import api as gdn
from cp_engine.sharding.exchange.heads import HeadTables, head_tables
from cp_engine.sharding.exchange.rows import RowTables, row_tables
from cp_engine.sharding.exchange.state_rounds import RoundTables, round_tables
from cp_engine.sharding.exchange.states import FoldTables, fold_tables
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
    rounds: tuple[RoundTables, ...]  # in which states are handed on; none where none cross, and where maps are folded
    fold: FoldTables
    order: HeadTables | None  # set for ulysses: convolution and recurrence then see all T tokens
    transport: str  # of history rows and states, see `cp_engine.sharding.exchange.transport.transport_for`

    @cached_property
    def chunks(self) -> gdn.ChunkTables:
        """Tables of the `reference` backend."""
        p = self.plan
        fragments = (p.fragment_row, p.fragment_parent, p.fragment_entry)
        crossing = (p.exit_fragment, p.exit_entry, p.entry_level)
        return gdn.chunk_tables(*fragments, *crossing, self.mixed_rows, self.chunk_size, self.device)

    @cached_property
    def chains(self) -> gdn.ChainTables:
        """Tables of the `triton` backend."""
        p = self.plan
        fragments = (p.fragment_row, p.fragment_parent, p.fragment_entry, p.chain_fragment, p.chain_level)
        crossing = (p.exit_fragment, p.exit_entry, p.entry_level)
        return gdn.chain_tables(*fragments, *crossing, self.mixed_rows, self.chunk_size, self.device)

    def make_for_triton(self) -> None:
        """Make its tables now and not inside the first layer, as a planning thread does."""
        _ = self.chains, self.conv.short_taps, self.conv.late, self.conv.readers

    def of_backend(self, backend: str) -> gdn.ChunkTables | gdn.ChainTables:
        return self.chains if backend == "triton" else self.chunks


def gdn_tables(
    plan: GdnPlan, rank: int, device: torch.device | str = "cpu", chunk_size: int = 64, transport: str = "auto"
) -> GdnTables:
    """Execution tables of one rank's plan, made once per pack.

    Args:
        transport: what carries history rows and states, as in `cp_engine.layers.attention.attention_tables`.
    """
    device, tokens = torch.device(device), int(plan.fragment_row[-1])
    order = None if plan.order is None else head_tables(plan.order, rank, device)
    # Head shards hold exactly the tokens; token shards have a padding row where they hold none.
    rows = max(1, tokens) if order is None else tokens
    fetch = plan.history_fetch
    return GdnTables(
        plan=plan,
        rows=rows if order is None else order.rows,
        mixed_rows=rows,
        entries=len(plan.entry_level),
        chunk_size=chunk_size,
        device=device,
        conv=conv.conv_tables(plan.fragment_row, plan.history, rows, fetch.rows_in, device, fetch.send_rows),
        history=row_tables(fetch, device),
        rounds=tuple(round_tables(each, device) for each in plan.rounds),
        fold=fold_tables(plan.fold, rank, device),
        order=order,
        transport=transport,
    )
