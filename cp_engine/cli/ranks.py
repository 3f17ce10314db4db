"""How many ranks a command runs on: the `--cp` option, and what torchrun has started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cp_engine.config import Config, read_config

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


def read_config_for_ranks(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """`read_config`, with ``parallel.cp`` filling the rank processes that a launcher started.

    Raises:
        ValueError: as `read_config`, and for rank processes that are no multiple of ``parallel.dp``.
    """
    overrides = list(overrides)
    config = read_config(path, overrides)
    if "WORLD_SIZE" not in os.environ or any(o.startswith("parallel.cp=") for o in overrides):
        return config
    world, dp = int(os.environ["WORLD_SIZE"]), config.parallel.dp
    if world % dp:
        raise ValueError(f"parallel.dp is {dp}, but {world} rank processes run, which is no multiple of it")
    return read_config(path, [*overrides, f"parallel.cp={world // dp}"])
