"""Machines that a plan can be predicted for: GPUs, and the links inside and between hosts.

Only the H200's costs were measured (`sharding/cost.py`); the others are scaled from them by published peak rates and
are marked predicted, as are all links between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cp_engine.sharding.cost import H200, Costs
from cp_engine.sharding.hosts import Hosts


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal GPUs on equal hosts. Integer nanoseconds."""

    name: str
    costs: Costs
    memory_bytes: int
    measured: bool  # whether the costs of one GPU and of the links inside a host were measured on it
    links: Hosts = Hosts(ranks=8)  # GPUs of a host, and what lies between hosts

    @property
    def gpus_per_node(self) -> int:
        return self.links.ranks

    def hosts(self, world: int) -> int:
        return -(-world // self.gpus_per_node)

    def with_instant_links(self) -> Machine:
        """The same with exchanges that start at once, but take their time for every byte."""
        latencies = ("pull", "all_to_all", "send", "state", "round", "history")
        costs = replace(self.costs, **{f"{name}_latency": 0 for name in latencies})
        return replace(self, costs=costs, links=replace(self.links, latency=0, peer_latency=0))

    def with_free_links(self) -> Machine:
        """The same with exchanges that take no time at all."""
        instant = self.with_instant_links()
        costs = replace(instant.costs, pull_mib=0, all_to_all_mib=0, send_mib=0, state_mib=0, round_mib=0)
        return replace(instant, costs=costs, links=replace(instant.links, mib=0))


def _scaled(products: tuple[int, int], memory: tuple[int, int], link: tuple[int, int]) -> Costs:
    """The H200's costs times ratios (numerator, denominator) of its peak rates to another GPU's.

    Attention and dense products follow the rate of products, element-wise code and the recurrence that of memory.
    """

    def times(value: int, ratio: tuple[int, int]) -> int:
        return value * ratio[0] // ratio[1]

    def table(rows: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((size, times(cost, products)) for size, cost in rows)

    return replace(
        H200,
        tile_forward=table(H200.tile_forward),
        tile_backward=table(H200.tile_backward),
        query_tile_forward=times(H200.query_tile_forward, products),
        query_tile_backward=times(H200.query_tile_backward, products),
        tera_product=times(H200.tera_product, products),
        chunk_forward=times(H200.chunk_forward, memory),
        chunk_backward=times(H200.chunk_backward, memory),
        chunk_summary=times(H200.chunk_summary, memory),
        chunk_states=times(H200.chunk_states, memory),
        chunk_output=times(H200.chunk_output, memory),
        chunk_both_passes=times(H200.chunk_both_passes, memory),
        chunk_dqkwg=times(H200.chunk_dqkwg, memory),
        chunk_adjoint=times(H200.chunk_adjoint, memory),
        fold_mib=times(H200.fold_mib, memory),
        round_mib=times(H200.round_mib, memory),
        memory_mib=times(H200.memory_mib, memory),
        head_rows_mib=times(H200.head_rows_mib, memory),
        pull_mib=times(H200.pull_mib, link),
        all_to_all_mib=times(H200.all_to_all_mib, link),
        send_mib=times(H200.send_mib, link),
        state_mib=times(H200.state_mib, link),
    )


# Published dense bf16 TFLOP/s by the words of a card's name; the first that occurs in it counts.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GB200": 2500,
    "B200": 2250,
    "A100": 312,
}


def peak_flops(device_name: str | None, dtype: str) -> float | None:
    """Peak FLOP/s of a card (`torch.cuda.get_device_name`) in bfloat16; None for others, other dtypes and CPUs."""
    if device_name is None or dtype != "bfloat16":
        return None
    return next((1e12 * tera for words, tera in PEAK_TFLOPS.items() if words in device_name), None)


# Memory TB/s and NVLink GB/s one way: H200 4.8, 450; H100 3.35, 450; B200 8, 900.
MACHINES = {
    "h200": Machine(name="h200", costs=H200, memory_bytes=141 * 10**9, measured=True),
    "h100": Machine(name="h100", costs=_scaled((1, 1), (480, 335), (1, 1)), memory_bytes=80 * 10**9, measured=False),
    "b200": Machine(
        name="b200",
        costs=_scaled((PEAK_TFLOPS["H200"], PEAK_TFLOPS["B200"]), (48, 80), (1, 2)),
        memory_bytes=180 * 10**9,
        measured=False,
    ),
}


def machine(device: str, cp: int, nodes: int | None, gpus_per_node: int | None) -> Machine:
    """The machine of the command's options; without ``nodes`` there are as many hosts as the ranks need.

    Raises:
        ValueError: for more ranks than GPUs.
    """
    chosen = MACHINES[device]
    if gpus_per_node is not None:
        chosen = replace(chosen, links=replace(chosen.links, ranks=gpus_per_node))
    if nodes is not None and nodes * chosen.gpus_per_node < cp:
        raise ValueError(
            f"{cp} context-parallel ranks need {cp} GPUs, but --nodes {nodes} with {chosen.gpus_per_node} GPUs each "
            f"(--gpus-per-node) has {nodes * chosen.gpus_per_node}: at least {chosen.hosts(cp)} nodes are needed"
        )
    return chosen
