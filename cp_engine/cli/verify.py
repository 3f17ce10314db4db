"""`python -m cp_engine verify`: is the tree engine exact for this model, these rollouts and this exchange?"""

from __future__ import annotations

import argparse

from cp_engine.cli.ranks import join_cp_ranks
from cp_engine.cli.ranks import local_ranks as local_ranks
from cp_engine.losses.settings import AGGREGATIONS, LOSSES
from cp_engine.rollouts import read_rollouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rollouts", required=True, help="JSONL or JSONL.gz file (docs/rollouts.md)")
    add(
        "--model",
        required=True,
        help="a random preset (README.md), such as tiny-qwen3.5, or a local folder",
    )
    add("--cp", type=int, help="context-parallel ranks (default: those of torchrun, else 1)")
    add("--layout", default="balanced", choices=("balanced", "contiguous"), help="which rank owns which tokens")
    exchanges = ("auto", "gather", "ring", "ulysses", "ulysses_gather")
    add("--exchange", default="auto", choices=exchanges, help="attention exchange")
    add("--ulysses-ranks", type=int, help="of ulysses_gather: so many ranks share the heads")
    add("--gdn-exchange", default="affine", choices=("affine", "ulysses"), help="GDN state exchange")
    add(
        "--gdn-layout", default="auto", choices=("auto", "same", "own"), help="whether GDN layers have their own layout"
    )
    add("--dtype", default="float64", choices=("float64", "float32"))
    add("--loss", default="sft", choices=LOSSES)
    add("--aggregation", choices=AGGREGATIONS, help="default: the loss's own (docs/losses.md)")
    add("--temperature", type=float, default=1.0)
    add("--router-aux-coef", type=float, help="weight of the routers' loss (default: 0.1 for a model with experts)")
    add("--share", default="batch", choices=("batch", "group"))
    add("--limit", type=int, help="the first so many rollouts of the file")
    add("--limit-per-group", type=int, help="the first so many rollouts of each group")
    add("--max-pack-tokens", type=int, help="cut the forest into packs of at most so many tree tokens")
    add("--seed", type=int, default=0, help="seed of the preset's weights and of the drawn values")
    add("--vocab", choices=("full",), help="full: keep the ids of a preset's rollouts instead of re-indexing them")
    add("--bound", type=float, help="largest error that is ok (default 1e-10 in float64, 2e-5 in float32)")
    add("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from cp_engine.models.load import folder_vocabulary
    from cp_engine.verify.run import VerifyOptions, verify

    ranks = join_cp_ranks(args)
    rollouts = read_rollouts(
        args.rollouts,
        vocab_size=folder_vocabulary(args.model),
        max_tokens=args.max_pack_tokens,
        limit=args.limit,
        limit_per_group=args.limit_per_group,
    )
    full = 1 + max(int(r.input_ids.max()) for r in rollouts) if args.vocab == "full" else None
    options = VerifyOptions(
        model=args.model,
        layout=args.layout,
        exchange=args.exchange,
        ulysses_ranks=args.ulysses_ranks,
        gdn_exchange=args.gdn_exchange,
        gdn_layout=args.gdn_layout,
        dtype=args.dtype,
        loss=args.loss,
        aggregation=args.aggregation,
        temperature=args.temperature,
        router_aux_coef=args.router_aux_coef,
        seed=args.seed,
        share=args.share,
        max_pack_tokens=args.max_pack_tokens,
        full_vocab=full,
        bound=args.bound,
    )
    result = verify(rollouts, options, ranks)
    if ranks.is_first:
        _print(result, args.json)
    return 0 if result["ok"] else 1


def _print(result: dict, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from cp_engine.trackers import strict_json

    table = Table(title="tree engine against flat rows", show_header=False)
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(stderr=as_json).print(table)
    if as_json:
        print(strict_json(result), flush=True)
