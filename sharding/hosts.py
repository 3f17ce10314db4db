"""Links between hosts: which ranks stand on others, and what rows cost that cross them.

Shapes: P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_engine.sharding.cost import Costs
from cp_engine.sharding.measure import Figures


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Equal hosts; context-parallel rank r stands on host ``r // ranks``. Integer nanoseconds, all predicted."""

    ranks: int  # of a host
    # One MiB over a 400 Gb/s adapter a GPU at 90 % of its rate; one exchange between hosts; each peer more in it.
    mib: int = 23_300
    latency: int = 25_000
    peer_latency: int = 1_000

    def several(self, world: int) -> bool:
        """Whether so many ranks need more than one host."""
        return self.ranks < world

    def crosses(self, world: int) -> np.ndarray:
        """bool [P, P]: whether two ranks stand on different hosts."""
        host = np.arange(world) // self.ranks
        return host[:, None] != host


ONE_HOST = Hosts(ranks=1 << 30)


@dataclass(frozen=True, eq=False)
class LinkRows:
    """What rows of keys and values take on their links; a row between hosts counts as more of those inside one."""

    rows_in: np.ndarray  # int64 [P]
    rows_out: np.ndarray  # int64 [P]
    latency: int  # of one exchange, ns


def link_rows(figures: Figures, rows: np.ndarray, hosts: Hosts, costs: Costs) -> LinkRows:
    """Rows of the busier of a rank's two links, that inside its host and its adapter.

    Args:
        figures: what is known where no row leaves its host.
        rows: int64 [P, P] rows of owner (column) that each reader (row) fetches, 0 on the diagonal.
    """
    far = np.where(hosts.crosses(len(rows)), rows, 0)
    if not far.any():
        return LinkRows(figures.rows_in, figures.rows_out, costs.pull_latency)
    near, near_mib = rows - far, max(1, costs.pull_mib)  # links that cost nothing have a price of 0
    rows_in = np.maximum(near.sum(1), far.sum(1) * hosts.mib // near_mib)
    rows_out = np.maximum(near.sum(0), far.sum(0) * hosts.mib // near_mib)
    peers = int(max((far > 0).sum(0).max(), (far > 0).sum(1).max()))
    return LinkRows(rows_in, rows_out, max(costs.pull_latency, hosts.latency + hosts.peer_latency * peers))


def shared_links(costs: Costs, hosts: Hosts, world: int) -> Costs:
    """The costs of exchanges in which each of so many ranks sends every other one the same."""
    if not hosts.several(world):
        return costs
    far = world - hosts.ranks
    mib, latency = hosts.mib * far // world, hosts.latency + hosts.peer_latency * far
    return replace(
        costs,
        all_to_all_mib=max(costs.all_to_all_mib, mib),
        all_to_all_latency=max(costs.all_to_all_latency, latency),
        state_mib=max(costs.state_mib, mib),
        state_latency=costs.state_latency + 2 * latency,
        history_latency=costs.history_latency + latency,
        round_latency=costs.round_latency + latency,
    )
