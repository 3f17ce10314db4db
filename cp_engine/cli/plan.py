"""`python -m cp_engine plan`: what a rollout file becomes on CP ranks, without a model, a process group or torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from cp_engine.machines import MACHINES, machine
from cp_engine.memory_setup import RECOMPUTE
from cp_engine.model_sizes import model_sizes
from cp_engine.plan_memory import ENGINES
from cp_engine.plan_picture import check_picture, write_picture
from cp_engine.plan_report import PlanSettings, plan_report
from cp_engine.plan_tables import print_plan, print_sweep
from cp_engine.prediction import EXCHANGE_CHOICES, LAYOUT_CHOICES
from cp_engine.rollouts import FlatRollouts, flatten_rollouts, read_rollouts
from cp_engine.scaling import SYNTHETIC, parse_sweep, sweep, synthetic_rollouts
from cp_engine.sharding.cost import PRESETS
from cp_engine.sharding.gdn_layout import GDN_LAYOUTS
from cp_engine.sharding.packing import SHARES

MOST_RANKS = 4096  # a plan holds tables of what moves between every two ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rollouts", metavar="F", help="a .jsonl or .jsonl.gz file of rollouts")
    source.add_argument("--synthetic", choices=SYNTHETIC, help="a made batch of about a million tree tokens instead")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--cp", type=_positive, metavar="N", help="context-parallel ranks")
    ranks.add_argument("--sweep", metavar="cp=N,N", help="predict weak and strong scaling at these rank counts")
    parser.add_argument("--share", choices=SHARES, default="batch", help="one trie over all rollouts, or one a group")
    parser.add_argument(
        "--max-pack-tokens", type=_positive, metavar="M", help="tree tokens of a pack (default: one pack)"
    )
    parser.add_argument("--limit", type=_positive, metavar="K", help="only the first K rollouts of the file")
    parser.add_argument(
        "--limit-per-group", type=_positive, metavar="K", help="only the first K rollouts of each group"
    )
    parser.add_argument("--layout", choices=LAYOUT_CHOICES, default="balanced", help="who owns which tokens")
    parser.add_argument(
        "--gdn-layout",
        choices=GDN_LAYOUTS,
        default="auto",
        help="whether GDN layers have their own (default: the faster)",
    )
    parser.add_argument(
        "--exchange", choices=EXCHANGE_CHOICES, default="auto", help="how keys and values move (default: the fastest)"
    )
    parser.add_argument(
        "--model",
        default=next(iter(PRESETS)),
        metavar="M",
        help=f"predict for {', '.join(PRESETS)}, or a Hugging Face config.json (default: %(default)s)",
    )
    parser.add_argument("--device", choices=MACHINES, default="h200", help="predict for this GPU")
    parser.add_argument("--dp", type=_positive, default=1, metavar="N", help="data-parallel groups of the --cp ranks")
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2", help="predict memory with this engine")
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, default="layers", help="what layers compute again in backward"
    )
    parser.add_argument(
        "--recompute-layers", type=_positive, metavar="N", help="of only the first N layers (default: of all)"
    )
    parser.add_argument("--nodes", type=_positive, metavar="K", help="hosts (default: as many as the ranks need)")
    parser.add_argument("--gpus-per-node", type=_positive, metavar="G", help="GPUs of a host (default: 8)")
    parser.add_argument("--picture", metavar="OUT", help="draw who owns what and what moves: .svg, .html or .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    """Print the plan of a file; returns the exit status.

    Raises:
        ValueError: for a file that cannot be read, a rollout over the budget, or options that do not go together.
    """
    if args.picture is not None:
        check_picture(args.picture)
    counts = [args.cp] if args.sweep is None else parse_sweep(args.sweep)
    if max(counts) > MOST_RANKS:
        raise ValueError(
            f"at most {MOST_RANKS:,} ranks are planned, got {max(counts):,}: ask for fewer (--cp, --sweep)"
        )
    model, layers = model_sizes(args.model), args.recompute_layers
    if layers is not None and (args.recompute == "none" or layers > model.layers):
        raise ValueError(
            f"--recompute-layers is {layers} with --recompute {args.recompute} and a model of {model.layers} layers: "
            "give at most so many, and something to recompute"
        )
    settings = PlanSettings(
        cp=max(counts),
        model=model,
        machine=machine(args.device, max(counts), args.nodes, args.gpus_per_node),
        share=args.share,
        max_pack_tokens=args.max_pack_tokens,
        layout=args.layout,
        gdn_layout=args.gdn_layout,
        exchange=args.exchange,
        dp=args.dp,
        engine=args.engine,
        recompute=args.recompute,
        recompute_layers=layers,
    )
    if args.sweep is not None:
        return _run_sweep(args, counts, settings)
    report, planned = plan_report(_read(args), settings)
    if args.picture is not None:
        write_picture(Path(args.picture), planned)
    if args.json:
        print(json.dumps(report))
    else:
        print_plan(report)
    return 0


def _run_sweep(args: argparse.Namespace, counts: list[int], settings: PlanSettings) -> int:
    for option in ("picture", "max_pack_tokens"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"--sweep takes all rollouts as one pack and prints a table; leave --{option.replace('_', '-')} out"
            )
    rows = list(sweep(_read(args), counts, settings))
    if args.json:
        print(json.dumps({"model": settings.model.name, "device": args.device, "sweep": [asdict(row) for row in rows]}))
    else:
        print_sweep(rows, settings)
    return 0


def _read(args: argparse.Namespace) -> FlatRollouts:
    if args.synthetic is None:
        rollouts = read_rollouts(
            args.rollouts, max_tokens=args.max_pack_tokens, limit=args.limit, limit_per_group=args.limit_per_group
        )
        return flatten_rollouts(rollouts)
    if args.limit is not None or args.limit_per_group is not None:
        raise ValueError("--limit and --limit-per-group choose rollouts of a file; leave them out with --synthetic")
    return synthetic_rollouts(args.synthetic)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
