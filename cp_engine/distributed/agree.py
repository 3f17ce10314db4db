"""Checks that all ranks are about to do the same thing, before a collective could hang on it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_engine.distributed.ranks import Ranks


def require_equal_digests(digest: str, what: str, ranks: Ranks, block: int | None = None) -> None:
    """Raise on every rank when hex digests of ``what`` differ within a block of neighbouring ranks.

    Args:
        block: ranks that must agree with one another, such as those of a CP group; None for all of them.

    Raises:
        ValueError: names which ranks differ from the first one of their block.
    """
    if ranks.group is None:
        return
    block = block or ranks.world
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)  # in host memory: no wait for the device
    found = [torch.empty_like(mine) for _ in range(ranks.world)]
    dist.all_gather(found, mine, group=ranks.group)
    everyone = torch.stack(found).tolist()
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[rank - rank % block]]
    if differing:
        first = "rank 0" if block == ranks.world else f"the first of their {block} context-parallel ranks"
        raise ValueError(
            f"ranks {differing} have another {what} than {first}: every rank must be given the same rollouts in the "
            "same order and the same configuration"
        )
