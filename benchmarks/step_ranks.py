"""A training step on several GPUs against one of them, in the same run: weak scaling of context parallelism."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from benchmarks import clock
from benchmarks.step_flops import PEAK_TFLOPS
from benchmarks.step_run import Setup, StepRun, differences, within_bounds
from benchmarks.step_workloads import workload_rollouts
from cp_engine.distributed.ranks import Ranks


def compare(setup: Setup, workload: str, arguments: argparse.Namespace, ranks: Ranks) -> dict:
    """The record of one workload: all ranks share a step of ``world`` times the rollouts that one GPU trains, as
    ``arguments.more`` says.

    Every rank calls it. One GPU runs on every rank at once, with whole weights. That the ranks compute the same is
    checked on one GPU's rollouts, by loss, entropy and gradient norm.
    """
    began = time.perf_counter()

    def rollouts(times: int, vocab_size: int):
        many = {"prompts": times} if arguments.more == "prompts" else {"copies": times}
        return workload_rollouts(workload, vocab_size, most_tokens=arguments.limit_tokens, data=arguments.data, **many)

    # Sharded adapters start from zeros, as everywhere: drawn ones would not be those of one GPU.
    setup = replace(setup, draw_adapters=setup.engine == "plain")
    run = StepRun(replace(setup, engine="plain"), Ranks(0, 1, None, ranks.device))
    of_one = rollouts(1, run.engine.vocab_size)
    one_work, dtype = run.work(of_one), run.engine.dtype
    one_flops = run.flops(one_work)
    one = run.steps(of_one, arguments.repeats, warm=1)
    del run
    clock.release(ranks.device)
    run = StepRun(setup, ranks)
    one = replace(one, seconds=run.slowest(one.seconds))
    of_all = rollouts(ranks.world, run.engine.vocab_size)
    found = differences(run.steps(of_one), replace(one, gradients={}))
    several, work = run.steps(of_all, arguments.repeats, warm=1), run.work(of_all)
    rate, one_rate = work.tokens / several.seconds / ranks.world, one_work.tokens / one.seconds
    flops = run.flops(work)
    peak, right = PEAK_TFLOPS * 1e12, within_bounds(found, dtype)
    return {
        "bench": "step",
        "workload": workload,
        "model": setup.title,
        "weights": setup.weights,
        "method": "tree",
        "gpus": ranks.world,
        "engine": setup.engine,
        "recompute": run.recompute,
        "exchange": several.metrics["exchange"],
        "more": arguments.more,
        "rollouts": len(of_all),
        "tree_tokens": work.tokens,
        "one_gpu_tree_tokens": one_work.tokens,
        "tree_ms": round(1e3 * several.seconds, 2),
        "one_gpu_ms": round(1e3 * one.seconds, 2),
        "tokens_per_s_gpu": round(rate),
        "one_gpu_tokens_per_s": round(one_rate),
        "mfu": round(flops[0] / several.seconds / ranks.world / peak, 4),
        "hfu": round(flops[1] / several.seconds / ranks.world / peak, 4),
        "one_gpu_mfu": round(one_flops[0] / one.seconds / peak, 4),
        "tree_gib": several.peak_gib,
        "one_gpu_gib": one.peak_gib,
        **balance_and_waits(several.metrics),
        **{name: float(f"{error:.3g}") for name, error in found.items()},
        "right": right,
        "efficiency": round(rate / one_rate, 3) if right else None,
        "seconds": round(time.perf_counter() - began, 1),
    }


def balance_and_waits(metrics: dict) -> dict[str, float]:
    """What the engine says of a step's ranks, for a record."""
    waits = {name: round(metrics[name], 2) for name in ("exchange_wait_ms", "plan_wait_ms")}
    return {name: metrics[name] for name in ("token_imbalance", "pair_imbalance")} | waits
