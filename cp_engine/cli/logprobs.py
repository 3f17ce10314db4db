"""`python -m cp_engine logprobs`: add a model's log-probs of the trained tokens to a rollout file."""

from __future__ import annotations

import argparse

from cp_engine.cli.ranks import join_cp_ranks
from cp_engine.cli.ranks import local_ranks as local_ranks
from cp_engine.config import parse_config
from cp_engine.rollout_files import add_field, check_out_file
from cp_engine.rollouts import read_rollouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rollouts", required=True, help="JSONL or JSONL.gz file (docs/rollouts.md)")
    add(
        "--model",
        required=True,
        help="a random preset (README.md), such as tiny-qwen3.5, or a local folder",
    )
    add("--out", required=True, help="where the rollouts go with the new field (.jsonl or .jsonl.gz)")
    add("--field", default="old_logprobs", choices=("old_logprobs", "ref_logprobs"))
    add("--cp", type=int, help="context-parallel ranks (default: those of torchrun, else 1)")
    add("--dtype", default="float32", choices=("float32", "float64", "bfloat16"), help="as in training")
    add("--engine", default="plain", choices=("plain", "fsdp2"), help="weights whole on every rank, or sharded")
    add("--temperature", type=float, default=1.0, help="logits are divided by it, as in training")
    add(
        "--max-pack-tokens",
        type=_tokens_or_auto,
        metavar="M",
        help="cut the forest into packs of at most so many tree tokens, or, with auto, of as many as are predicted to "
        "fit into a GPU's memory (default: one pack)",
    )
    add("--vocab-size", type=int, help="vocabulary of a preset, as model.vocab_size in training")
    add("--seed", type=int, default=0, help="seed of a preset's weights, as model.seed in training")


def run(args: argparse.Namespace) -> int:
    from cp_engine.engine import Engine

    out = check_out_file(args.out)
    ranks = join_cp_ranks(args)
    config = parse_config(
        {
            "model": {"path": args.model, "vocab_size": args.vocab_size, "seed": args.seed},
            "parallel": {"cp": ranks.world},
            "packing": {"max_pack_tokens": args.max_pack_tokens},
            "loss": {"name": "sft", "temperature": args.temperature},
            "engine": {"name": args.engine},
            "dtype": args.dtype,
        },
        "logprobs",
    )
    engine = Engine(config, ranks, only_scores=True)
    rollouts = read_rollouts(args.rollouts, vocab_size=engine.vocab_size, max_tokens=engine.packing.max_pack_tokens)
    values = engine.logprobs(rollouts)
    if ranks.is_first:
        add_field(args.rollouts, out, args.field, values)
        print(f"{out}: {args.field} of {len(values)} rollouts")
    return 0


def _tokens_or_auto(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and int(text) >= 2):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 2, or auto; got {text!r}")
    return text if text == "auto" else int(text)
