"""Whether GRPO on the coin game learns from random weights: the greedy policy's reward before and after.

    python -m benchmarks.game [--models tiny-qwen3 tiny-qwen3.5] [--seeds 0 1 2] [--record] [key.sub=value ...]

Runs the loop of `launch/play.py` with launch/configs/game.yaml, once for each model and seed. Exit status 1 when a
greedy reward ends less than `GAIN` above its start.
"""

from __future__ import annotations

import argparse

from benchmarks.record import ROOT, append, stamp
from cp_engine.cli.main import guarded
from cp_engine.distributed.ranks import join_ranks, shutdown
from launch.play import Play, Result, read_settings, train

CONFIG = ROOT / "launch" / "configs" / "game.yaml"
GAIN = 0.3


def record(model: str, seed: int, ranks: int, play: Play, result: Result) -> dict:
    return {
        "bench": "game",
        "workload": f"level {play.level}",
        "model": model,
        "seed": seed,
        "P": ranks,
        "games_per_step": play.groups * play.rollouts,
        "steps": len(result.rewards),
        "start": round(result.start, 4),
        "end": round(result.end, 4),
        "rewards": [round(reward, 3) for reward in result.rewards],
        "flat_over_tree": round(result.flat_tokens / result.tree_tokens, 3),
        "sampler_gap": result.sampler_gap,
        "seconds": round(result.seconds, 1),
        "cpu_seconds": round(result.cpu_seconds, 1),
    }


def run(args: argparse.Namespace) -> int:
    play, ranks, learned = Play(), join_ranks(), True
    versions = stamp("torch", "transformers") if ranks.is_first else {}
    for model in args.models:
        for seed in args.seeds:
            config = read_settings(CONFIG, [*args.overrides, f"model.path={model}"], seed)
            _, result = train(config, play, ranks, lambda metrics: None)
            learned &= result.end >= result.start + GAIN
            if ranks.is_first:
                found = record(model, seed, ranks.world, play, result)
                print(found, flush=True)
                if args.record:
                    append([found], versions)
    return 0 if learned else 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.game", description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    parser.add_argument("--models", nargs="+", default=["tiny-qwen3", "tiny-qwen3.5"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    shutdown(guarded(run, parser.parse_intermixed_args()))


if __name__ == "__main__":
    main()
