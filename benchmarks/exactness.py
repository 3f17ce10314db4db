"""The exactness matrix: `verify` on real rollouts for every model, CP size, exchange, loss and precision.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.exactness run \\
        --rollouts ../shared/data/tokens/mini.jsonl --limit 24 --dtype float64 --out benchmarks/exactness.jsonl
    python -m benchmarks.exactness page

It runs on CPU ranks; smaller CP sizes use the first of them. The flat rows of a (model, loss, precision) run once
and are compared with every tree run, so it takes minutes, not hours. `python -m cp_engine verify` is the same code.
Every result is appended to a file at once, and what is there already is not run again; `page` writes docs/exactness.md
from it and from that of `benchmarks.exactness_losses`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from benchmarks import exactness_losses
from cp_engine.distributed.ranks import Ranks, join_ranks, shutdown
from cp_engine.rollouts import read_rollouts
from cp_engine.verify.run import VerifyOptions, run_flat, verify_tree

RESULTS = Path(__file__).parent / "exactness.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "exactness.md"
MODELS = ("tiny-qwen3", "tiny-qwen3.5")
LOSSES = ("sft", "grpo")
QUERY_HEADS = 8  # of the presets; ulysses deals them to the ranks


def exchanges(cp: int) -> tuple[str, ...]:
    return ("gather", "ring", "ulysses") if cp > 1 and QUERY_HEADS % cp == 0 else ("gather", "ring")


def cases(sizes: list[int], model: str):
    """All (cp, exchange, gdn_exchange) of a model."""
    for cp in sizes:
        gdn = ("affine", "ulysses") if model == "tiny-qwen3.5" and "ulysses" in exchanges(cp) else ("affine",)
        yield from ((cp, exchange, g) for exchange, g in itertools.product(exchanges(cp), gdn))


def run(args, ranks: Ranks, groups: list[Ranks | None]) -> bool:
    """Run the matrix and append each result to ``args.out``; returns whether all were ok."""
    rollouts = read_rollouts(args.rollouts, limit=args.limit, limit_per_group=args.limit_per_group)
    selection = f"--limit {args.limit}" if args.limit else f"--limit-per-group {args.limit_per_group}"
    cores, ok = os.cpu_count() or 1, True
    same = {"selection": selection, "layout": args.layout, "ok": True}
    done = {case_of(r) for r in read_results(args.out) if same.items() <= r.items()}
    for model, loss in itertools.product(args.model or MODELS, args.loss or LOSSES):
        # Each loss is verified with another aggregation and temperature, so that both are covered.
        extra = {"aggregation": "seq-mean-token-mean", "temperature": 0.7} if loss == "grpo" else {}
        chosen = {"model": model, "dtype": args.dtype, "loss": loss, "layout": args.layout, **extra}
        wanted = [c for c in cases(args.cp, model) if (model, args.dtype, loss, *c) not in done]
        if not wanted:
            continue
        torch.set_num_threads(max(1, cores // ranks.world))
        flat = run_flat(rollouts, VerifyOptions(**chosen), ranks)
        for cp, exchange, gdn in wanted:
            torch.set_num_threads(max(1, cores // cp))
            if groups[cp] is not None:
                options = VerifyOptions(exchange=exchange, gdn_exchange=gdn, **chosen)
                result = verify_tree(flat, options, groups[cp])
                ok &= result["ok"]
                if ranks.is_first:
                    append(args.out, selection, result)
            dist.barrier()
    return ok


def case_of(row: dict) -> tuple:
    return tuple(row[k] for k in ("model", "dtype", "loss_name", "cp", "exchange", "gdn_exchange"))


def read_results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(out: Path, selection: str, result: dict) -> None:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    row = {"selection": selection, **result, "versions": versions, "date": time.strftime("%Y-%m-%d")}
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{selection} {row['model']} {row['dtype']} {row['loss_name']} cp {row['cp']} {row['exchange']}/"
        f"{row['gdn_exchange']}: ok {row['ok']}, log-prob {row['max_logprob_err']:.1e}, "
        f"gradient {row['max_grad_err']:.1e} ({row['tree_seconds']:.1f} s)",
        flush=True,
    )


INTRODUCTION = """# Exactness on real rollouts

The tree engine against every rollout run alone through the unmodified `transformers` model, on rollouts of the real
agent sets (`mini.jsonl`). Each row holds the largest error over all its runs: every CP size with the exchanges gather,
ring and, where the 8 query heads divide by the ranks, ulysses; on the hybrid each of them with `gdn_exchange` affine
and, there too, ulysses. Log-probs: absolute error. Gradients: max norm of the worst parameter over max(its own maximum,
1e-3 × the model's largest gradient). GRPO rows use seq-mean-token-mean and temperature 0.7.

Written by `python -m benchmarks.exactness page` from `benchmarks/exactness.jsonl`; the module's docstring has the
command that measures. gloo ranks on CPUs; {versions}.

| rollouts | layout | model | dtype | loss | cp | tree / flat tokens | edges / occurrences | clipped above / below \
| runs ok | bound | log-prob | loss | gradient | worst run, tensor |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(results: list[dict]) -> str:
    """The page of all results: one row per (selection, model, dtype, loss)."""
    versions = "; ".join(sorted({f"{r['versions']} ({r['date']})" for r in results}))
    text = INTRODUCTION.format(versions=versions)
    key = ("selection", "layout", "model", "dtype", "loss_name")
    rows: dict[tuple, dict[tuple, dict]] = {}
    for result in results:  # a run that was repeated counts once, with its last result
        case = (result["cp"], result["exchange"], result["gdn_exchange"])
        rows.setdefault(tuple(result[k] for k in key), {})[case] = result
    for group, found in sorted(rows.items()):
        text += "| " + " | ".join([*(f"`{group[0]}`", *group[1:]), *_cells(list(found.values()))]) + " |\n"
    return text


def _cells(rows: list[dict]) -> list[str]:
    worst = max(rows, key=lambda r: r["max_grad_err"])
    clipped = "–" if worst["loss_name"] == "sft" else f"{worst['clipped_high']:.2f} / {worst['clipped_low']:.2f}"
    return [
        ", ".join(map(str, sorted({r["cp"] for r in rows}))),
        f"{worst['tree_tokens']:,} / {worst['flat_tokens']:,}",
        f"{worst['edges']:,} / {worst['occurrences']:,}",
        clipped,
        f"{sum(r['ok'] for r in rows)} of {len(rows)}",
        f"{worst['bound']:g}",
        *(f"{max(r[k] for r in rows):.1e}" for k in ("max_logprob_err", "loss_err", "max_grad_err")),
        f"cp {worst['cp']} {worst['exchange']}/{worst['gdn_exchange']}, `{worst['worst_tensor']}`",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run")
    measure.add_argument("--rollouts", required=True)
    selection = measure.add_mutually_exclusive_group(required=True)
    selection.add_argument("--limit", type=int)
    selection.add_argument("--limit-per-group", type=int)
    measure.add_argument("--dtype", choices=("float64", "float32"), required=True)
    measure.add_argument("--model", choices=MODELS, action="append", help="only these (default: all)")
    measure.add_argument("--loss", choices=LOSSES, action="append", help="only these (default: all)")
    measure.add_argument("--layout", choices=("contiguous", "balanced"), default="balanced")
    measure.add_argument("--cp", type=int, nargs="+", default=[1, 2, 3, 4], help="CP sizes, at most the ranks started")
    measure.add_argument("--out", type=Path, default=RESULTS)
    commands.add_parser("page")
    args = parser.parse_args()
    if args.command == "page":
        PAGE.write_text(page(read_results(RESULTS)) + exactness_losses.section(exactness_losses.read()))
        return
    ranks = join_ranks()
    groups: list[Ranks | None] = [None]
    for cp in range(1, ranks.world + 1):
        group = dist.new_group(list(range(cp)))
        member = Ranks(ranks.rank, cp, group if cp > 1 else None, ranks.device)
        groups.append(member if ranks.rank < cp else None)
    shutdown(0 if run(args, ranks, groups) else 1)


if __name__ == "__main__":
    main()
