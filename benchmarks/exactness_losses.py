"""Every loss with every aggregation against flat rows, over packs that were cut, with whole and with sharded weights.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.exactness_losses
    python -m benchmarks.exactness page

`verify` in float64 on the first 20 rollouts of the sample that comes with the repository. The flat rows of a case run
once. Results are appended to `benchmarks/exactness_losses.jsonl`; `page` puts the last of each case into
docs/exactness.md.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.record import append, stamp
from cp_engine.distributed.ranks import Ranks, join_ranks, shutdown
from cp_engine.losses.settings import AGGREGATIONS, LOSSES
from cp_engine.rollouts import read_rollouts
from cp_engine.verify.run import VerifyOptions, run_flat, verify_tree

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "exactness_losses.jsonl"
ROLLOUTS, LIMIT, PACK_TOKENS = "launch/data/sample.jsonl", 20, 120
MODELS = ("tiny-qwen3", "tiny-qwen3.5")
TREE_RUNS = (("plain", 1), ("plain", 2), ("fsdp2", 2))  # engine and CP ranks
CASE = ("model", "loss_name", "aggregation", "engine", "cp")


def run(ranks: Ranks) -> list[dict]:
    """All results, on the first rank."""
    rollouts, found = read_rollouts(ROOT / ROLLOUTS, limit=LIMIT), []
    alone = Ranks(0, 1, None, ranks.device)
    for model, loss, aggregation in itertools.product(MODELS, LOSSES, AGGREGATIONS):
        case = {"model": model, "loss": loss, "aggregation": aggregation, "max_pack_tokens": PACK_TOKENS}
        flat = run_flat(rollouts, VerifyOptions(**case), ranks)
        for engine, cp in TREE_RUNS:
            if cp == ranks.world or ranks.is_first:
                of_cp = ranks if cp == ranks.world else alone
                found.append(verify_tree(flat, VerifyOptions(**case, engine=engine), of_cp))
            dist.barrier()
        if ranks.is_first:
            print(*(f"{found[-1][key]}" for key in CASE[:3]), *(r["ok"] for r in found[-3:]), flush=True)
    return found


def table(results: list[dict]) -> str:
    """Rows of (model, loss): the largest errors over aggregations, engines and ranks."""
    last = {tuple(row[key] for key in CASE): row for row in results}
    rows: dict[tuple[str, str], list[dict]] = {}
    for row in last.values():
        rows.setdefault((row["model"], row["loss_name"]), []).append(row)
    text = "| model | loss | aggregations | packs | clipped above / below | runs ok | bound | log-prob | loss "
    text += "| gradient | worst run, tensor |\n" + "|---" * 11 + "|\n"
    for (model, loss), found in rows.items():
        worst = max(found, key=lambda r: r["max_grad_err"])
        cells = [
            model,
            loss,
            len({r["aggregation"] for r in found}),
            min(r["packs"] for r in found),
            "–" if loss in ("sft", "dpo") else f"{worst['clipped_high']:.2f} / {worst['clipped_low']:.2f}",
            f"{sum(r['ok'] for r in found)} of {len(found)}",
            f"{worst['bound']:g}",
            *(f"{max(r[k] for r in found):.1e}" for k in ("max_logprob_err", "loss_err", "max_grad_err")),
            f"{worst['aggregation']}, {worst['engine']} cp {worst['cp']}, `{worst['worst_tensor']}`",
        ]
        text += "| " + " | ".join(map(str, cells)) + " |\n"
    return text


def section(results: list[dict]) -> str:
    """The part of docs/exactness.md."""
    stamps = {f"commit {r['commit']}, {_versions(r)} ({r['date']})" for r in results}
    engines = ", ".join(f"`{engine}` at cp {cp}" for engine, cp in TREE_RUNS)
    return f"""
## Every loss with every aggregation

In float64 on the first {LIMIT} rollouts of `{ROLLOUTS}`, cut into packs of at most {PACK_TOKENS} tree tokens:
{engines}. Each row holds the largest error over the four aggregations and
these runs. All parts that a loss has are on: KL, entropy bonus, sampler correction, and old log-probs drawn so that
clips are passed on both sides.

Written from `benchmarks/exactness_losses.jsonl`; {"; ".join(sorted(stamps))}.

{table(results)}"""


def _versions(row: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())


def read() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def main() -> None:
    ranks = join_ranks()
    if ranks.world != 2:
        raise SystemExit("exactness_losses: start 2 ranks, as its first lines say")
    torch.set_num_threads(1)
    found = run(ranks)
    if ranks.is_first:
        append(found, stamp("torch", "transformers"), RESULTS)
    shutdown(0 if all(r["ok"] for r in found) else 1)


if __name__ == "__main__":
    main()
