"""The (dp, cp) mesh of ranks: CP groups of neighbouring ranks share each pack, DP groups get different packs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_engine.distributed.ranks import Ranks
from cp_engine.sharding.hosts import ONE_HOST, Hosts


@dataclass(frozen=True)
class Mesh:
    """This rank's place on the mesh. Rank r is CP rank ``r % cp`` of DP rank ``r // cp``."""

    everyone: Ranks
    context: Ranks  # the ranks of this CP group
    dp: int
    hosts: Hosts = ONE_HOST  # where the ranks of a CP group stand, for its plans; the same for every group

    @property
    def cp(self) -> int:
        return self.context.world

    @property
    def dp_rank(self) -> int:
        return self.everyone.rank // self.cp


def make_mesh(ranks: Ranks, dp: int, cp: int, timeout_s: int) -> Mesh:
    """Lay ``ranks`` out on a mesh; every rank calls it.

    Args:
        timeout_s: seconds that a rank waits for the others of its CP group.

    Raises:
        ValueError: when the number of ranks is not ``dp * cp``.
    """
    if dp * cp != ranks.world:
        sizes = f"parallel.cp is {cp}" if dp == 1 else f"parallel.dp x parallel.cp is {dp} x {cp} = {dp * cp}"
        raise ValueError(
            f"{sizes} but {ranks.world} rank processes run: start {dp * cp} "
            f"(torchrun --nproc-per-node {dp * cp} or --dp {dp} --cp {cp})"
        )
    hosts = _hosts(ranks, cp)
    if dp == 1:
        return Mesh(ranks, ranks, dp, hosts)
    group = None
    if cp > 1:
        # Not by a device mesh: its groups have torch's timeouts instead of the run's.
        neighbours = [list(range(first, first + cp)) for first in range(0, ranks.world, cp)]
        group, _ = dist.new_subgroups_by_enumeration(neighbours, timeout=timedelta(seconds=timeout_s))
    return Mesh(ranks, Ranks(ranks.rank % cp, cp, group, ranks.device), dp, hosts)


def _hosts(ranks: Ranks, cp: int) -> Hosts:
    """Where CP ranks stand, as all ranks see it: machines may run different numbers of ranks, and plans must be equal.

    Groups larger than a machine that begin in the middle of one are planned for on equal parts of machines.
    """
    if ranks.group is None:
        return ONE_HOST
    mine = torch.tensor([ranks.per_node or ranks.world])  # in host memory: no wait for the device
    found = [torch.empty_like(mine) for _ in range(ranks.world)]
    dist.all_gather(found, mine, group=ranks.group)
    per_node = [int(count) for count in found]
    return ONE_HOST if cp <= min(per_node) else Hosts(ranks=math.gcd(cp, *per_node))


def require_process_group(ranks: Ranks) -> None:
    """Give a single rank that no launcher started the process group that sharding libraries ask for."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def shard_mesh(ranks: Ranks, within_node: bool, timeout_s: int) -> DeviceMesh:
    """The mesh over which parameters are sharded: all ranks, or (machines that replicate, ranks of a machine).

    Args:
        timeout_s: seconds that a rank waits for the others of its copies or its machine.

    Raises:
        ValueError: if machines run different numbers of ranks.
    """
    per_node = ranks.per_node or ranks.world
    if not within_node or per_node == ranks.world:
        require_process_group(ranks)
        return init_device_mesh(ranks.device.type, (ranks.world,))
    if ranks.world % per_node:
        raise ValueError(
            f"engine.shard: node needs equally many ranks on every machine; {ranks.world} ranks run, {per_node} of "
            "them on this machine"
        )
    mesh = torch.arange(ranks.world).view(-1, per_node)
    # Not by `init_device_mesh`: see `make_mesh`.
    groups = [
        dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timedelta(seconds=timeout_s))[0]
        for lines in (mesh.T, mesh)
    ]
    return DeviceMesh.from_group(groups, ranks.device.type, mesh=mesh, mesh_dim_names=("copies", "shards"))
