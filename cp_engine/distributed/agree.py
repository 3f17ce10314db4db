"""Checks that all ranks are about to do the same thing, before a collective could hang on it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_engine.distributed.ranks import Ranks


def require_equal_digests(digest: str, what: str, ranks: Ranks) -> None:
    """Raise on every rank when the ranks' hex digests of ``what`` differ.

    Raises:
        ValueError: names which ranks differ from rank 0.
    """
    if ranks.group is None:
        return
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=ranks.device)
    found = [torch.empty_like(mine) for _ in range(ranks.world)]
    dist.all_gather(found, mine, group=ranks.group)
    differing = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
    if differing:
        raise ValueError(
            f"ranks {differing} have another {what} than rank 0: every rank must be given the same rollouts in the "
            "same order and the same configuration"
        )
