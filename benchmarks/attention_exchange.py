"""What the benchmark of several GPUs needs of the exchanges: bytes that a plan moves, and runs without moving them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from cp_engine.sharding.attention_plan import AttentionPlan
from cp_engine.sharding.exchange import gather, ring, rows, ulysses

MIB = 2**20
ACCUMULATION_BYTES = 4


def moved_mib(plan: AttentionPlan, heads: tuple[int, int], size: int, element_bytes: int, rank: int) -> float:
    """MiB that a rank sends or receives, whichever is more, in forward and backward of one layer.

    `gather` keeps what it fetched; `ring` fetches again in backward. Gradients of fetched rows go home in float32.
    """
    query, kv = heads
    if plan.ulysses is not None:
        rank_rows = plan.ulysses.order.rank_rows
        world, own, all_rows = len(rank_rows), int(rank_rows[rank]), int(rank_rows.sum())
        shard, share = query // world, max(kv, world) // world
        out, back = own * (world - 1) * size, (all_rows - own) * size
        there = out * (shard + 2 * share) * element_bytes + back * shard * element_bytes
        here = back * (shard + 2 * share) * element_bytes + out * shard * element_bytes
        grads = (shard + 2 * share) * ACCUMULATION_BYTES
        sent = there + out * shard * element_bytes + back * grads
        received = here + back * shard * element_bytes + out * grads
        return max(sent, received) / MIB
    fetches = 2 if plan.ring is not None else 1
    fetch, home = 2 * kv * size * element_bytes * fetches, 2 * kv * size * ACCUMULATION_BYTES
    rows_in, rows_out = plan.fetch.rows_in, plan.fetch.rows_out
    return max(rows_in * fetch + rows_out * home, rows_out * fetch + rows_in * home) / MIB


@contextlib.contextmanager
def rows_present() -> Iterator[None]:
    """Inside, exchanges compute and copy as always but wait for no other rank: received rows hold old memory."""

    def nothing_moves(x, send_counts, recv_counts, group):
        return x.new_empty((sum(recv_counts), *x.shape[1:]))

    def nothing_starts(sent, to, rows_in, source, group):
        return ring._Transfer(sent.new_empty((rows_in, *sent.shape[1:])), sent, [])

    modules = (gather, rows, ulysses)
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "all_to_all_rows", nothing_moves))
        stack.enter_context(mock.patch.object(ring, "_start", nothing_starts))
        yield
