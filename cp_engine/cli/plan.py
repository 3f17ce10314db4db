"""`python -m cp_engine plan`: what a rollout file becomes on CP ranks, without a model, a process group or torch."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from cp_engine.rollouts import FlatRollouts, flatten_rollouts, read_rollouts
from cp_engine.sharding.layout import contiguous_layout, imbalance
from cp_engine.sharding.packing import SHARES, Pack, pack_rollouts
from cp_engine.sharding.plan import ShardPlan, shard_plan

# The command knows no model; a hybrid's plan holds a dense model's, and Qwen's GDN layers convolve over 4 tokens.
CONV_WIDTH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rollouts", required=True, metavar="F", help="a .jsonl or .jsonl.gz file of rollouts")
    parser.add_argument("--cp", type=_positive, required=True, metavar="N", help="context-parallel ranks")
    parser.add_argument("--share", choices=SHARES, default="batch", help="one trie over all rollouts, or one a group")
    parser.add_argument(
        "--max-pack-tokens", type=_positive, metavar="M", help="tree tokens of a pack (default: one pack)"
    )
    parser.add_argument("--limit", type=_positive, metavar="K", help="only the first K rollouts of the file")
    parser.add_argument(
        "--limit-per-group", type=_positive, metavar="K", help="only the first K rollouts of each group"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    """Print the plan of a file; returns the exit status.

    Raises:
        ValueError: for a file that cannot be read or a rollout over the budget.
    """
    rollouts = read_rollouts(
        args.rollouts, max_tokens=args.max_pack_tokens, limit=args.limit, limit_per_group=args.limit_per_group
    )
    report = plan_report(flatten_rollouts(rollouts), args.cp, args.share, args.max_pack_tokens)
    if args.json:
        print(json.dumps(report))
    else:
        _print_tables(report)
    return 0


def plan_report(flat: FlatRollouts, cp: int, share: str, max_pack_tokens: int | None) -> dict:
    """The figures of `plan --json`.

    The figures of the batch are of one forest over all its rollouts; packs replay shared ancestors, so theirs add up to
    ``replayed_tokens`` more. ``share_key_tokens`` are the tree tokens that only share keys keep apart; ``plan_ms``
    covers packing and the plans of all ranks, in milliseconds.
    """
    began = time.perf_counter()
    packs = pack_rollouts(
        flat.token,
        flat.row_start,
        flat.group,
        flat.loss_mask,
        share=share,
        share_key=flat.share_key,
        max_pack_tokens=max_pack_tokens,
    )
    plans = [_rank_plans(pack, cp) for pack in packs]
    plan_ms = 1000 * (time.perf_counter() - began)
    forest = flat.forest(share)
    return {
        "rollouts": flat.rollouts,
        "groups": flat.groups,
        "flat_tokens": forest.flat_tokens,
        "tree_tokens": forest.tokens,
        "tree_tokens_per_group": flat.forest("group").tokens,
        "share_key_tokens": forest.tokens - flat.forest(share, use_share_key=False).tokens,
        "segments": forest.segments,
        "max_depth": forest.max_depth,
        "flat_pairs": forest.flat_pairs,
        "tree_pairs": forest.tree_pairs,
        "replayed_tokens": sum(pack.replayed_tokens for pack in packs),
        "plan_ms": round(plan_ms, 3),
        "packs": [_pack_report(pack, ranks) for pack, ranks in zip(packs, plans, strict=True)],
    }


def _rank_plans(pack: Pack, cp: int) -> list[ShardPlan]:
    layout = contiguous_layout(pack.forest, cp)
    return [shard_plan(pack.forest, layout, rank, pack.loss_mask, conv_width=CONV_WIDTH) for rank in range(cp)]


def _pack_report(pack: Pack, plans: list[ShardPlan]) -> dict:
    return {
        "tree_tokens": pack.tokens,
        "replayed_tokens": pack.replayed_tokens,
        "token_imbalance": imbalance(np.array([plan.tokens for plan in plans])),
        "pair_imbalance": imbalance(np.array([plan.attention.pairs for plan in plans])),
        "ranks": [
            {
                "tokens": plan.tokens,
                "pairs": plan.attention.pairs,
                "pieces": plan.pieces,
                "fragments": plan.gdn.fragments,
                "rows_in": plan.attention.fetch.rows_in,
                "rows_out": plan.attention.fetch.rows_out,
            }
            for plan in plans
        ],
    }


def _print_tables(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    summary = Table("figure", "value", title="rollouts", title_justify="left")
    summary.columns[1].justify = "right"
    for name, value in report.items():
        if name != "packs":
            summary.add_row(name, f"{value:,}")
    console.print(summary)
    columns = ("tokens", "pairs", "pieces", "fragments", "rows_in", "rows_out")
    for index, pack in enumerate(report["packs"]):
        title = (
            f"pack {index}: {pack['tree_tokens']:,} tree tokens, max over mean "
            f"{pack['token_imbalance']:.3f} in tokens, {pack['pair_imbalance']:.3f} in pairs"
        )
        table = Table("rank", *columns, title=title, title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for rank, figures in enumerate(pack["ranks"]):
            table.add_row(str(rank), *(f"{figures[name]:,}" for name in columns))
        console.print(table)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
