"""The exactness matrix: `verify` on real rollouts for every model, CP size, exchange, loss and precision.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.exactness \
        --rollouts ../shared/data/tokens/mini.jsonl --out docs/exactness.md

Four ranks run it; smaller CP sizes use the first ranks. The flat rows of a (model, loss, precision) run once and are
compared with every tree run, so the matrix takes minutes, not hours. `python -m cp_engine verify` is the same code.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from cp_engine.distributed.ranks import Ranks, join_ranks, shutdown
from cp_engine.rollouts import read_rollouts
from cp_engine.verify.run import VerifyOptions, run_flat, verify_tree

MODELS = ("tiny-qwen3", "tiny-qwen3.5")
# Exchanges that each CP size can run: the presets' 8 query heads do not divide by 3.
ALL = ("gather", "ring", "ulysses")
EXCHANGES = {1: ALL[:2], 2: ALL, 3: ALL[:2], 4: ALL}


def cases(world: int, model: str):
    for cp in range(1, world + 1):
        gdn = ("affine", "ulysses") if model == "tiny-qwen3.5" and "ulysses" in EXCHANGES[cp] else ("affine",)
        yield from ((cp, exchange, g) for exchange, g in itertools.product(EXCHANGES[cp], gdn))


def run(args, ranks: Ranks, groups: list[Ranks | None]) -> list[dict]:
    results = []
    selections = [{"limit": args.limit}, {"limit_per_group": args.limit_per_group}]
    for selection, model, dtype, loss in itertools.product(
        selections, MODELS, ("float64", "float32"), ("sft", "grpo")
    ):
        rollouts = read_rollouts(args.rollouts, **selection)
        # Each loss is verified with another aggregation and temperature, so that both are covered.
        extra = {"aggregation": "seq-mean-token-mean", "temperature": 0.7} if loss == "grpo" else {}
        base = VerifyOptions(model=model, dtype=dtype, loss=loss, **extra)
        started = time.perf_counter()
        flat = run_flat(rollouts, base, ranks)
        if ranks.is_first:
            print(f"{selection} {model} {dtype} {loss}: flat {time.perf_counter() - started:.0f} s", flush=True)
        for cp, exchange, gdn in cases(ranks.world, model):
            options = VerifyOptions(
                model=model, dtype=dtype, loss=loss, exchange=exchange, gdn_exchange=gdn, **extra
            )
            member = groups[cp]
            if member is not None:
                result = verify_tree(flat, options, member)
                if ranks.is_first:
                    results.append({"selection": "=".join(map(str, *selection.items())), **result})
                    print(
                        f"  cp {cp} {exchange} {gdn}: ok {result['ok']} log-prob {result['max_logprob_err']:.1e} "
                        f"grad {result['max_grad_err']:.1e} ({result['tree_seconds']:.1f} s)",
                        flush=True,
                    )
            dist.barrier()
    return results


def write_page(results: list[dict], out: Path, command: str) -> None:
    """One row per (selection, model, dtype, loss): the worst error over CP sizes and exchanges."""
    lines = [
        "# Exactness on real rollouts",
        "",
        "The tree engine against every rollout run alone through the unmodified `transformers` model: the largest",
        "error over all CP sizes and exchanges of a row. Log-probs: absolute. Gradients: max norm of the worst parameter",
        "over max(its own maximum, 1e-3 × the model's largest gradient). Written by `benchmarks/exactness.py`.",
        "",
        f"- command: `{command}`",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{ranks_text(results)}, {time.strftime('%Y-%m-%d')}",
        "",
        "| rollouts | model | dtype | loss | tree / flat tokens | edges / occurrences | runs ok | bound "
        "| log-prob | loss | gradient | worst run, tensor |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    key = ("selection", "model", "dtype", "loss_name")
    for group, rows in itertools.groupby(results, key=lambda r: tuple(r[k] for k in key)):
        rows = list(rows)
        worst = max(rows, key=lambda r: r["max_grad_err"])
        cells = [
            *group,
            f"{worst['tree_tokens']:,} / {worst['flat_tokens']:,}",
            f"{worst['edges']:,} / {worst['occurrences']:,}",
            f"{sum(r['ok'] for r in rows)} of {len(rows)}",
            f"{worst['bound']:g}",
            *(f"{max(r[k] for r in rows):.1e}" for k in ("max_logprob_err", "loss_err", "max_grad_err")),
            f"cp {worst['cp']} {worst['exchange']}/{worst['gdn_exchange']}, `{worst['worst_tensor']}`",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    runs = "; ".join(f"cp {cp}: {', '.join(exchanges)}" for cp, exchanges in EXCHANGES.items())
    lines += ["", f"Runs: {runs}; on the hybrid each with `gdn_exchange` affine, and ulysses too at cp 2 and 4."]
    lines += ["GRPO rows (seq-mean-token-mean, temperature 0.7): share of occurrences clipped above / below"]
    clipped = sorted({(round(r["clipped_high"], 2), round(r["clipped_low"], 2)) for r in results if r["clipped_high"]})
    lines += [", ".join(f"{high} / {low}" for high, low in clipped) + "."]
    out.write_text("\n".join(lines) + "\n")


def ranks_text(results: list[dict]) -> str:
    return f"gloo, up to {max(r['cp'] for r in results)} ranks on {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--limit-per-group", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ranks = join_ranks()
    groups: list[Ranks | None] = [None]
    for cp in range(1, ranks.world + 1):
        group = dist.new_group(list(range(cp)))
        member = Ranks(ranks.rank, cp, group if cp > 1 else None, ranks.device)
        groups.append(member if ranks.rank < cp else None)
    results = run(args, ranks, groups)
    if ranks.is_first:
        command = f"torchrun --nproc-per-node {ranks.world} -m benchmarks.exactness {' '.join(sys.argv[1:])}"
        write_page(results, args.out, command)
    shutdown(0 if all(r["ok"] for r in results) else 1)


if __name__ == "__main__":
    main()
