"""Attention by gathering: every visible remote key row is fetched, then one kernel call sees all keys.

The kernel comes in as two callables (this package imports no kernels):
``kernel(q, k, v, intervals, accumulate=...) -> out, lse`` and
``kernel_backward(q, k, v, out, lse, dout, intervals) -> dq, dk, dv`` in the accumulation dtype.

Shapes: n local rows, K_in rows received, K gathered key rows, Hq query heads, Hk kv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cp_engine.sharding.exchange.rows import RowTables, all_to_all_rows, return_rows


@dataclass(frozen=True)
class GatherTables:
    """A `GatherPlan` on a device."""

    fetch: RowTables
    key_order: torch.Tensor  # int64 [K] index of each key row in concat(local rows, received rows)
    intervals: Any  # the kernel's, over the K gathered key rows


def gather_forward(kernel, q, k, v, tables: GatherTables, group) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward on every rank of ``group`` (None: a single rank).

    Args:
        q: [n, Hq, D].
        k, v: [n, Hk, D].

    Returns:
        out [n, Hq, D] and what `gather_backward` needs. The gathered keys and values are kept, so that backward
        fetches nothing again.
    """
    fetch = tables.fetch
    # Keys and values travel in one message.
    sent = torch.stack((k[fetch.send_rows], v[fetch.send_rows]), 1)
    received = all_to_all_rows(sent, fetch.send_counts, fetch.recv_counts, group)
    keys = torch.cat((k, received[:, 0]))[tables.key_order]
    values = torch.cat((v, received[:, 1]))[tables.key_order]
    out, lse = kernel(q, keys, values, tables.intervals, accumulate=False)
    return out, (q, keys, values, out, lse)


def gather_backward(kernel_backward, saved, dout, tables: GatherTables, group) -> tuple[torch.Tensor, ...]:
    """dq [n, Hq, D], dk, dv [n, Hk, D] in the accumulation dtype.

    Gradients of fetched rows go home in the accumulation dtype and are added to the local part, peers in rank order.
    """
    q, keys, values, out, lse = saved
    dq, dk, dv = kernel_backward(q, keys, values, out, lse, dout, tables.intervals)
    rows = q.shape[0]
    # Rows that nobody here sees (a padding row) are not in key_order and stay zero.
    grads = dk.new_zeros((rows + tables.fetch.rows_in, 2, *dk.shape[1:]))
    grads[tables.key_order] = torch.stack((dk, dv), 1)
    local = return_rows(grads[rows:], tables.fetch, grads[:rows], group)
    return dq, local[:, 0], local[:, 1]
