"""Attention by a ring: keys and values of one peer at a time, partial results merged by their log-sum-exp.

In round s = 1 .. P - 1 rank r sends to rank r + s and receives from rank r - s (mod P), exactly the rows that the
receiver sees. A transfer without rows does not take place on either side. The next round's transfer is in flight while
this round's rows are computed with, so at most two peers' rows are held. Backward moves the keys and values again,
because keeping them would need the memory of `gather`.

Two partial results (o_a, lse_a) and (o_b, lse_b) over disjoint keys merge to

    lse = log(exp(lse_a) + exp(lse_b))      o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

in the accumulation dtype (ring attention, Liu et al. 2023). Callables and shapes as in `gather`. With NCCL, a
collective of ``group`` in which every rank takes part must have come before the first round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cp_engine.sharding.exchange.rows import RowTables


@dataclass(frozen=True)
class RingTables:
    """A `RingPlan` on a device."""

    rank: int
    fetch: RowTables
    intervals: tuple[Any, ...]  # [P] the kernel's; entry p over the rows received from p, entry `rank` over local rows

    @property
    def world(self) -> int:
        return len(self.intervals)

    def peers(self, step: int) -> tuple[int, int]:
        """Whom round ``step`` sends to and receives from."""
        return (self.rank + step) % self.world, (self.rank - step) % self.world

    def rows_for(self, peer: int) -> torch.Tensor:
        """int64 [sent]: local rows that a peer sees."""
        return self.fetch.send_rows.split(self.fetch.send_counts)[peer]


def ring_forward(kernel, q, k, v, tables: RingTables, group) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward on every rank of ``group`` (None: a single rank).

    Args:
        q: [n, Hq, D].
        k, v: [n, Hk, D].

    Returns:
        out [n, Hq, D] in q's dtype, rounded once after the last merge, and what `ring_backward` needs.
    """
    pending = _start_keys(k, v, tables, 1, group)
    out, lse = kernel(q, k, v, tables.intervals[tables.rank], accumulate=True)
    for step in range(1, tables.world):
        remote = pending.wait()
        pending = _start_keys(k, v, tables, step + 1, group)
        if len(remote):
            _, source = tables.peers(step)
            part = kernel(q, remote[:, 0], remote[:, 1], tables.intervals[source], accumulate=True)
            out, lse = merge_partials(out, lse, *part)
    out = out.to(q.dtype)
    return out, (q, k, v, out, lse)


def ring_backward(kernel_backward, saved, dout, tables: RingTables, group) -> tuple[torch.Tensor, ...]:
    """dq [n, Hq, D], dk, dv [n, Hk, D] in the accumulation dtype.

    Every round uses the final out and lse. Gradients of remote rows go home in the accumulation dtype and are added in
    a fixed order: the rank's own first, then those of ranks r + 1, r + 2, .. (mod P), as the rounds bring them.
    """
    q, k, v, out, lse = saved
    pending = _start_keys(k, v, tables, 1, group)
    dq, dk, dv = kernel_backward(q, k, v, out, lse, dout, tables.intervals[tables.rank])
    local = torch.stack((dk, dv), 1)
    home = None
    for step in range(1, tables.world):
        remote = pending.wait()
        pending = _start_keys(k, v, tables, step + 1, group)
        reader, source = tables.peers(step)
        grads = local.new_zeros((len(remote), *local.shape[1:]))
        if len(remote):
            part = kernel_backward(q, remote[:, 0], remote[:, 1], out, lse, dout, tables.intervals[source])
            dq += part[0]
            grads = torch.stack(part[1:], 1)
        if home is not None:
            add_home(local, tables, step - 1, home.wait())
        home = _start(grads, source, tables.fetch.send_counts[reader], reader, group)
    if home is not None:
        add_home(local, tables, tables.world - 1, home.wait())
    return dq, local[:, 0], local[:, 1]


def merge_partials(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge results over disjoint keys: out [n, H, D], lse [n, H], in the accumulation dtype; lse may be -inf."""
    total = torch.logaddexp(lse, other_lse)
    # Where neither side saw a key, -inf - -inf would be NaN.
    base = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = (lse - base).exp().unsqueeze(-1), (other_lse - base).exp().unsqueeze(-1)
    return out * mine + other_out * theirs, total


def add_home(local: torch.Tensor, tables: RingTables, step: int, grads: torch.Tensor) -> None:
    """Add the gradients that the reader of round ``step`` sent back to the local rows that it had read."""
    reader, _ = tables.peers(step)
    local.index_add_(0, tables.rows_for(reader), grads)


@dataclass
class _Transfer:
    received: torch.Tensor
    sent: torch.Tensor  # must outlive the transfer
    works: list

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _start_keys(k: torch.Tensor, v: torch.Tensor, tables: RingTables, step: int, group) -> _Transfer | None:
    """Start the transfer of keys and values of a round, packed [rows, 2, Hk, D]. None after the last round."""
    if step >= tables.world:
        return None
    reader, source = tables.peers(step)
    rows = tables.rows_for(reader)
    return _start(torch.stack((k[rows], v[rows]), 1), reader, tables.fetch.recv_counts[source], source, group)


def _start(sent: torch.Tensor, to: int, rows_in: int, source: int, group) -> _Transfer:
    """Send rows to one rank and receive rows from another. Both sides know the counts and skip an empty message."""
    received = sent.new_empty((rows_in, *sent.shape[1:]))
    ops = []
    if len(sent):
        ops.append(dist.P2POp(dist.isend, sent.contiguous(), group=group, group_peer=to))
    if rows_in:
        ops.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
    return _Transfer(received, sent, dist.batch_isend_irecv(ops) if ops else [])
