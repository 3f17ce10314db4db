"""Attention by a ring: keys and values of one peer at a time, partial results merged by their log-sum-exp.

In round s = 1 .. P - 1 rank r reads from rank r - s (mod P), exactly the rows that it sees. The next round's rows are
on their way while this round's are computed with, so at most two peers' rows are held. A round in which no rank sees
anything does not take place, and a pair of ranks that sees nothing moves nothing. Backward moves the keys and values
again, because keeping them would need the memory of `gather`; gradients go home while the next round computes.

Two partial results (o_a, lse_a) and (o_b, lse_b) over disjoint keys merge to

    lse = log(exp(lse_a) + exp(lse_b))      o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

in the accumulation dtype (ring attention, Liu et al. 2023). Callables and shapes as in `gather`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from cp_engine.sharding.exchange.rows import accumulation_dtype, take_rows
from cp_engine.sharding.exchange.transport import Arrival, Part, Shipment, Transport
from cp_engine.sharding.row_exchange import Moves


@dataclass(frozen=True, eq=False)
class RingTables:
    """A `RingPlan` on a device."""

    moves: Moves  # of key rows
    send_rows: torch.Tensor  # int64 [sum(moves.send_counts)] local rows, receivers in rank order
    intervals: tuple[Any, ...]  # [P] the kernel's; entry p over the rows received from p, entry `rank` over local rows

    @property
    def rank(self) -> int:
        return self.moves.rank

    @cached_property
    def rounds(self) -> list[Round]:
        """The rounds that take place, the same on every rank."""
        world, found = self.moves.world, []
        rows = self.send_rows.split(self.moves.send_counts)
        for step in range(1, world):
            moves = self.moves.at_distance(step)
            if moves.counts.any():
                found.append(Round(moves, (self.rank - step) % world, rows[(self.rank + step) % world]))
        return found


@dataclass(frozen=True, eq=False)
class Round:
    moves: Moves
    source: int  # whose rows are read
    rows: torch.Tensor  # int64 local rows that the reader sees


def ring_forward(
    kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: RingTables, transport: Transport | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward on every rank; ``transport`` is None on a single rank.

    Args:
        q: [n, Hq, D].
        k, v: [n, Hk, D].

    Returns:
        out [n, Hq, D] in q's dtype, rounded once after the last merge, and what `ring_backward` needs.
    """
    rounds = tables.rounds
    if rounds:
        transport.reserve(_home_parts(rounds, k), accumulation_dtype(k.dtype))
        start = _start_keys(k, v, rounds, transport)
        pending = start(0)
    out, lse = kernel(q, k, v, tables.intervals[tables.rank], accumulate=bool(rounds))
    for index, each in enumerate(rounds):
        remote = pending.wait()
        pending = start(index + 1)
        if len(remote):
            keys, values = remote.unbind(1)
            part = kernel(q, keys, values, tables.intervals[each.source], accumulate=True)
            out, lse = merge_partials(out, lse, *part)
    out = out.to(q.dtype)
    return out, (q, k, v, out, lse)


def ring_backward(
    kernel_backward, saved, dout: torch.Tensor, tables: RingTables, transport: Transport | None
) -> tuple[torch.Tensor, ...]:
    """dq [n, Hq, D], dk, dv [n, Hk, D], in the accumulation dtype where there are rounds.

    Every round uses the final out and lse. Gradients of remote rows go home in the accumulation dtype and are added in
    a fixed order: the rank's own first, then those of ranks r + 1, r + 2, .. (mod P), as the rounds bring them.
    """
    q, k, v, out, lse = saved
    rounds, accumulation = tables.rounds, accumulation_dtype(k.dtype)
    kernel_backward = partial(kernel_backward, accumulate_q=bool(rounds), accumulate_kv=bool(rounds))
    if rounds:
        transport.reserve(_home_parts(rounds, k), accumulation)
        start = _start_keys(k, v, rounds, transport)
        home = transport.open(_home_parts(rounds, k), accumulation, k.device)
        pending = start(0)
    dq, dk, dv = kernel_backward(q, k, v, out, lse, dout, tables.intervals[tables.rank])
    if rounds:
        dk, dv = dk.to(accumulation), dv.to(accumulation)
    returning: list[Arrival] = []
    for index, each in enumerate(rounds):
        remote = pending.wait()
        pending = start(index + 1)
        packed = home.outgoing(index)
        if len(remote):
            keys, values = remote.unbind(1)
            part = kernel_backward(q, keys, values, out, lse, dout, tables.intervals[each.source])
            dq += part[0]
            packed[:, 0], packed[:, 1] = part[1:]
        returning.append(home.start(index))
        if index:
            add_home(dk, dv, rounds[index - 1], returning[index - 1])
    if rounds:
        add_home(dk, dv, rounds[-1], returning[-1])
    return dq, dk, dv


def merge_partials(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge results over disjoint keys: out [n, H, D], lse [n, H], in the accumulation dtype; lse may be -inf."""
    total = torch.logaddexp(lse, other_lse)
    # Where neither side saw a key, -inf - -inf would be NaN.
    base = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = (lse - base).exp().unsqueeze(-1), (other_lse - base).exp().unsqueeze(-1)
    return out * mine + other_out * theirs, total


def add_home(dk: torch.Tensor, dv: torch.Tensor, each: Round, arrival: Arrival) -> None:
    """Add the gradients that the reader of a round sends back to the local rows that it has read."""
    grads = arrival.wait()
    if len(grads):
        dk.index_add_(0, each.rows, grads[:, 0])
        dv.index_add_(0, each.rows, grads[:, 1])


def _start_keys(
    k: torch.Tensor, v: torch.Tensor, rounds: list[Round], transport: Transport
) -> Callable[[int], Arrival | None]:
    """Pack keys and values of all rounds; returns what starts the transfer of a round, none after the last."""
    parts = [Part(each.moves, (2, *k.shape[1:])) for each in rounds]
    shipment: Shipment = transport.open(parts, k.dtype, k.device)
    for index, each in enumerate(rounds):
        packed = shipment.outgoing(index)
        take_rows(k, each.rows, packed[:, 0])
        take_rows(v, each.rows, packed[:, 1])
    shipment.publish()
    return lambda index: shipment.start(index) if index < len(rounds) else None


def _home_parts(rounds: list[Round], k: torch.Tensor) -> list[Part]:
    return [Part(each.moves.back, (2, *k.shape[1:])) for each in rounds]
