"""Attention by gathering: every visible remote key row is fetched, then one kernel call sees all keys.

Heads are worked off in groups, so that the rows of group g + 1 are on their way while group g is computed. All groups
are packed at once, before the first kernel: after that, fetching needs nothing from the card but its copy engines (see
`cp_engine.sharding.exchange.peer`). At most two groups of gathered keys exist at a time; backward fetches them again,
because keeping them would need the memory of all groups in all layers. Its remote dk, dv go home a group at a time.

A rank that sees no remote row computes all heads in one call, whatever its peers do.

The kernel comes in as two callables (this package imports no kernels):
``kernel(q, k, v, intervals, accumulate=..., into=...) -> out, lse`` and
``kernel_backward(q, k, v, out, lse, dout, intervals, accumulate_kv=..., into_q=...) -> dq, dk, dv``, where ``into`` are
a group's heads of the whole results.

Shapes: P ranks, n local rows, K_in rows received, K gathered key rows, Hq query heads, Hk kv heads, hq and hk those of
a group, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cp_engine.sharding.exchange.rows import accumulation_dtype, put_rows, take_rows
from cp_engine.sharding.exchange.transport import Arrival, Part, Shipment, Transport
from cp_engine.sharding.layer_time import best_head_groups
from cp_engine.sharding.row_exchange import Moves


@dataclass(frozen=True, eq=False)
class GatherTables:
    """A `GatherPlan` on a device."""

    moves: Moves  # of key rows
    most_pairs: int  # visible pairs of the rank or team that has most
    keys: int  # K
    send_rows: torch.Tensor  # int64 [sum(moves.send_counts)] local rows, receivers in rank order
    sent: torch.Tensor  # int64 [S] the local rows that are sent to anyone, each once
    place_sent: torch.Tensor  # int64 [sum(moves.send_counts)] place of each of ``send_rows`` in ``sent``
    local_keys: torch.Tensor  # int64 [n] key row of each local token; empty for a padding row
    remote_keys: torch.Tensor  # int64 [K_in] key row of each received row
    intervals: Any  # the kernel's, over the K gathered key rows
    groups: int | None = None  # head groups; None: `sharding.layer_time.best_head_groups` decides


def head_groups(tables: GatherTables, query_heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> int:
    """In how many groups the kv heads are worked off: the same on every rank, since it comes from what all know.

    Raises:
        ValueError: for a number of groups that the kv heads do not allow.
    """
    if tables.groups is None:
        return best_head_groups(
            max(tables.moves.most_out, tables.moves.back.most_out),
            tables.most_pairs,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=size,
            element_bytes=dtype.itemsize,
        )
    if not 1 <= tables.groups <= kv_heads:
        raise ValueError(f"exchange gather can use 1 to {kv_heads} groups of {kv_heads} kv heads; got {tables.groups}")
    return tables.groups


@dataclass(frozen=True)
class _Group:
    kv: slice
    query: slice


def _groups(tables: GatherTables, q: torch.Tensor, k: torch.Tensor) -> list[_Group]:
    kv_heads, share = k.shape[1], q.shape[1] // k.shape[1]
    number = head_groups(tables, q.shape[1], kv_heads, k.shape[2], k.dtype)
    bounds = [kv_heads * g // number for g in range(number + 1)]
    return [
        _Group(slice(lo, hi), slice(lo * share, hi * share)) for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)
    ]


class _Fetch:
    """The fetching of keys and values of all groups, one group ahead of its use."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, tables: GatherTables, groups: list[_Group], transport):
        self._k, self._v, self._tables, self._groups = k, v, tables, groups
        self._rows = len(tables.local_keys)
        self._pending: list[tuple[torch.Tensor, Arrival]] = []
        self._shipment: Shipment = transport.open(_parts(tables.moves, k, groups), k.dtype, k.device)
        for index, group in enumerate(groups):
            packed = self._shipment.outgoing(index)
            take_rows(k[:, group.kv], tables.send_rows, packed[:, 0])
            take_rows(v[:, group.kv], tables.send_rows, packed[:, 1])
        self._shipment.publish()

    def start(self, index: int) -> None:
        """Let the rows of a group come; nothing after the last group."""
        if index == len(self._groups):
            return
        heads = self._groups[index].kv
        k = self._k[:, heads]
        local, received = self._rows, self._tables.moves.rows_in
        arrival = self._shipment.start(index)
        gathered = k.new_empty((2, self._tables.keys if received else 0, *k.shape[1:]))
        if received:
            for own, rows in zip((k, self._v[:, heads]), gathered, strict=True):
                put_rows(own[:local], self._tables.local_keys, rows)
        self._pending.append((gathered, arrival))

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathered keys and values [K, hk, D] of the group that was started first."""
        gathered, arrival = self._pending.pop(0)
        for came, rows in zip(arrival.wait().unbind(1), gathered, strict=True):
            put_rows(came, self._tables.remote_keys, rows)
        return gathered[0], gathered[1]

    def finish(self) -> None:
        """Wait for what was started and is of no use here: rows for others only."""
        for _, arrival in self._pending:
            arrival.wait()
        self._pending.clear()


def _parts(moves: Moves, k: torch.Tensor, groups: list[_Group]) -> list[Part]:
    return [Part(moves, (2, group.kv.stop - group.kv.start, k.shape[2])) for group in groups]


def gather_forward(
    kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: GatherTables, transport: Transport | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward on every rank; ``transport`` is None on a single rank.

    Args:
        q: [n, Hq, D].
        k, v: [n, Hk, D].

    Returns:
        out [n, Hq, D] and what `gather_backward` needs.
    """
    if not tables.moves.counts.any():
        out, lse = kernel(q, k, v, tables.intervals, accumulate=False)
        return out, (q, k, v, out, lse)
    groups = _groups(tables, q, k)
    transport.reserve(_parts(tables.moves.back, k, groups), accumulation_dtype(k.dtype))
    fetch = _Fetch(k, v, tables, groups, transport)
    if not tables.moves.rows_in:
        for index in range(len(groups)):
            fetch.start(index)
        out, lse = kernel(q, k, v, tables.intervals, accumulate=False)
        fetch.finish()
        return out, (q, k, v, out, lse)
    fetch.start(0)
    if len(groups) == 1:
        keys, values = fetch.wait()
        out, lse = kernel(q, keys, values, tables.intervals, accumulate=False)
        return out, (q, k, v, out, lse)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A head's rows side by side: so a group's part is one block, which cuDNN writes and reads where it is.
    lse = torch.empty((q.shape[1], len(q)), dtype=accumulation_dtype(q.dtype), device=q.device).T
    for index, group in enumerate(groups):
        keys, values = fetch.wait()
        fetch.start(index + 1)
        into = out[:, group.query], lse[:, group.query]
        kernel(q[:, group.query], keys, values, tables.intervals, accumulate=False, into=into)
    return out, (q, k, v, out, lse)


def gather_backward(
    kernel_backward,
    saved,
    dout: torch.Tensor,
    tables: GatherTables,
    transport: Transport | None,
    accumulate_kv: bool = False,
) -> tuple[torch.Tensor, ...]:
    """dq [n, Hq, D] in q's dtype, since one call sees all keys of a row; dk, dv [n, Hk, D] in the kernel's dtype.

    Gradients of fetched rows go home in the accumulation dtype and are added to the local part, peers in rank order.

    Args:
        accumulate_kv: return dk and dv in the accumulation dtype also where nothing moves.
    """
    q, k, v, out, lse = saved
    if not tables.moves.counts.any():
        return kernel_backward(q, k, v, out, lse, dout, tables.intervals, accumulate_kv=accumulate_kv)
    groups = _groups(tables, q, k)
    accumulation = accumulation_dtype(k.dtype)
    home_parts = _parts(tables.moves.back, k, groups)
    transport.reserve(home_parts, accumulation)
    fetch, local = _Fetch(k, v, tables, groups, transport), len(tables.local_keys)
    home = transport.open(home_parts, accumulation, k.device)
    fetch.start(0)
    if not tables.moves.rows_in:
        returning = _start_for_others(fetch, home, len(groups))
        dq, dk, dv = kernel_backward(q, k, v, out, lse, dout, tables.intervals, accumulate_kv=True)
        fetch.finish()
        for group, arrival in zip(groups, returning, strict=True):
            add_home(dk, dv, tables, group, arrival)
        return dq, dk, dv
    returning, dk, dv = [], None, None
    whole_dq = torch.empty_like(q) if len(groups) > 1 else None
    for index, group in enumerate(groups):
        keys, values = fetch.wait()
        fetch.start(index + 1)
        packed = home.outgoing(index)
        of_group = (x[:, group.query] for x in (out, lse, dout))
        into = {} if whole_dq is None else {"into_q": whole_dq[:, group.query]}
        dq, *part_kv = kernel_backward(
            q[:, group.query], keys, values, *of_group, tables.intervals, accumulate_kv=True, **into
        )
        _pack_home(part_kv, tables.remote_keys, packed)
        returning.append(home.start(index))
        if dk is None:
            dk, dv = (torch.empty_like(k, dtype=part.dtype) for part in part_kv)
        for total, part in zip((dk, dv), part_kv, strict=True):
            take_rows(part, tables.local_keys, total[:local, group.kv])
            total[local:, group.kv] = 0  # a padding row is nobody's key
        if index:
            add_home(dk, dv, tables, groups[index - 1], returning[index - 1])
    add_home(dk, dv, tables, groups[-1], returning[-1])
    return dq if whole_dq is None else whole_dq, dk, dv


def _start_for_others(fetch: _Fetch, home: Shipment, groups: int) -> list[Arrival]:
    """Every start of a backward pass after the first one, on a rank that fetches nothing and so sends no gradients."""
    returning = []
    for index in range(groups):
        fetch.start(index + 1)
        home.outgoing(index)
        returning.append(home.start(index))
    return returning


def _pack_home(grads: list[torch.Tensor], rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Rows of dk and dv into ``packed`` [len(rows), 2, hk, D], taken before they are widened: half as many bytes."""
    taken = packed if packed.dtype == grads[0].dtype else torch.empty_like(packed, dtype=grads[0].dtype)
    for place, grad in enumerate(grads):
        take_rows(grad, rows, taken[:, place])
    if taken is not packed:
        packed.copy_(taken)


def add_home(dk: torch.Tensor, dv: torch.Tensor, tables: GatherTables, group: _Group, arrival: Arrival) -> None:
    """Add the gradients of a group that come home, peers in rank order; sums are in the dtype of what comes."""
    home, counts = arrival.wait(), tables.moves.send_counts
    if not len(home):
        return
    for total, grads in zip((dk, dv), home.unbind(1), strict=True):
        own = total[:, group.kv]
        sums = take_rows(own, tables.sent, own.new_empty((len(tables.sent), *own.shape[1:]))).to(home.dtype)
        for places, part in zip(tables.place_sent.split(counts), grads.split(counts), strict=True):
            if len(places) == len(sums):  # every row, in order
                sums += part
            else:  # no row occurs twice in a call, so the order of the sums is fixed on every device
                sums.index_add_(0, places, part)
        put_rows(sums.to(total.dtype), tables.sent, own)
