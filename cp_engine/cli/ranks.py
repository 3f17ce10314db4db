"""The `--cp` option of commands that run on context-parallel ranks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cp_engine.distributed.ranks import Ranks


def local_ranks(args: argparse.Namespace) -> int:
    """How many rank processes ``--cp`` asks for; 1 where it is left out."""
    if args.cp is None:
        return 1
    if args.cp < 1:
        raise ValueError(f"--cp must be at least 1, got {args.cp}")
    return args.cp


def join_cp_ranks(args: argparse.Namespace) -> Ranks:
    """Join the process group; its size has to be ``--cp`` where that is given."""
    from cp_engine.distributed.ranks import join_ranks

    ranks = join_ranks()
    if args.cp is not None and ranks.world != args.cp:
        raise ValueError(f"--cp is {args.cp} but {ranks.world} rank processes run")
    return ranks
