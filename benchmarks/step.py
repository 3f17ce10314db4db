"""One whole training step (forward, backward, optimizer): packed prefix trees against flat rows, same weights.

    python -m benchmarks.step --model qwen3-8b-layer --workloads dualkv_8k_mb16 dualkv_16k_mb8 dualkv_32k_mb4 --record
    python -m benchmarks.step --model qwen3-8b --layers 9 --workloads p8k_r2k_n16 p8k_r2k_n32 \\
        --recompute layers_keep_mixers --flat-tokens 81920 --repeats 1 --record
    torchrun --nproc-per-node 2 -m benchmarks.step --model qwen3-8b --layers 9 --workloads p8k_r2k_n16 --record

Flat is the same model, engine, objective, head on trained tokens and recompute, on every rollout as a row of its own in
micro-batches, with the fastest of FA4, cuDNN and FA2; GDN layers of flat rows run on our kernels. Both compute the same
gradients, which are compared: where they differ there is no speed-up. Times are of whole `Engine.train_step` calls, by
the wall clock, with the device's work done.

MFU: model FLOPs (`cp_engine.flops`) a second over the card's dense bf16 rate by its data sheet. HFU: with what is
computed again. On several GPUs: the same step with as many times the rollouts, of each prompt or of as many times the
prompts (`--more`), against one GPU in the same run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import clock, step_layer, step_ranks
from benchmarks.attention import installed
from benchmarks.attention_workloads import DATA
from benchmarks.record import RESULTS, append, stamp
from benchmarks.step_flat import FLAT_CALLS, KEEPING, RIVALS
from benchmarks.step_flops import PEAK_TFLOPS
from benchmarks.step_models import MODELS
from benchmarks.step_run import ENGINES, Measured, Setup, StepRun, differences, within, within_bounds
from benchmarks.step_workloads import SETS, WORKLOADS, unshared, workload_rollouts
from cp_engine.distributed.ranks import Ranks, join_ranks, shutdown
from cp_engine.flops import Work
from cp_engine.rollouts import Rollout

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "nvidia-cudnn-frontend",
    "flash-attn-4",
    "flash-linear-attention",
    "liger_kernel",
)
RECOMPUTE = ("none", "layers", "layers_keep_mixers")
ROOF_SIZE = 8192
MOST_COPIES = 16  # as many times the rollouts of a workload the search for the largest number may come to
LAYER = "qwen3-8b-layer"


def roof_tflops(device: torch.device, size: int = ROOF_SIZE) -> float | None:
    """Rate of a square bf16 product in this run; None on a CPU."""
    if device.type != "cuda":
        return None
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return round(2 * size**3 / clock.median_ms(lambda: a @ a, device) / 1e9, 1)


def compare(run: StepRun, workload: str, arguments: argparse.Namespace) -> dict:
    """The record of one workload on one device."""
    began = time.perf_counter()
    rollouts = workload_rollouts(workload, run.engine.vocab_size, 1, arguments.limit_tokens, arguments.data)
    rows = unshared(rollouts)
    run.use_trees()
    tree, tree_work = run.steps(rollouts, arguments.repeats, warm=1), run.work(rollouts)
    say(
        f"{workload}: tree {1e3 * tree.seconds:.0f} ms, {tree.peak_gib} GiB, {time.perf_counter() - began:.0f} s so far"
    )
    attention, times, tokens, warm = flat_micro_batch(run, rows, arguments)
    flat, flat_work = run.steps(rows, arguments.repeats, warm=1), run.work(rows)
    say(
        f"{workload}: flat {1e3 * flat.seconds:.0f} ms, {flat.peak_gib} GiB, {time.perf_counter() - began:.0f} s so far"
    )
    found = differences(tree, flat)
    shared = len(within(rows, tokens))
    run.use_trees()
    same = run.steps(rollouts[:shared])
    about = {
        "bench": "step",
        "workload": workload,
        "model": run.setup.title,
        "weights": run.setup.weights,
        "method": "tree",
        "gpus": 1,
        "engine": run.setup.engine,
        "recompute": run.recompute,
        "rollouts": len(rollouts),
        "flat_attention": attention,
        "flat_attention_ms": times,
        "flat_micro_batch_tokens": tokens,
        "same_micro_batch": {"rollouts": shared, "tree_gib": same.peak_gib, "flat_gib": warm.peak_gib},
    }
    record = about | figures(run, tree, tree_work, flat, flat_work)
    record |= {name: float(f"{error:.3g}") for name, error in found.items()}
    judge(record, within_bounds(found, run.engine.dtype))
    if arguments.largest:
        many = workload_rollouts(workload, run.engine.vocab_size, MOST_COPIES, arguments.limit_tokens, arguments.data)
        record["largest"] = largest_rollouts(run, many, attention, shared)
    return record | {"seconds": round(time.perf_counter() - began, 1)}


def flat_micro_batch(
    run: StepRun, rows: list[Rollout], arguments: argparse.Namespace
) -> tuple[str, dict[str, float], int, Measured]:
    """Make ready for flat steps: attention, its times, tokens of a micro-batch, and one step of a micro-batch.

    Without ``--flat-tokens`` the micro-batch is the whole step, halved until it fits.
    """
    tokens = arguments.flat_tokens or sum(row.length for row in rows)
    rivals = KEEPING if run.setup.recompute == "layers_keep_mixers" else RIVALS
    names = rivals if arguments.flat == "auto" else (arguments.flat,)
    longest = max(row.length for row in rows)
    attention, times = run.choose_flat(names, within(rows, min(tokens, 20 * longest)))
    while True:
        run.use_rows(attention, max(tokens, longest))
        try:
            return attention, times, max(tokens, longest), run.steps(within(rows, tokens))
        except torch.cuda.OutOfMemoryError:
            if arguments.flat_tokens or tokens <= longest:
                raise
            run.engine.distributed.zero_grad()
            tokens //= 2


def figures(run: StepRun, tree: Measured, tree_work: Work, flat: Measured, flat_work: Work) -> dict:
    """Times, FLOPs, rates and memory of both."""
    tree_flops, flat_flops = run.flops(tree_work), run.flops(flat_work)

    def share(count: int, measured: Measured) -> float:
        return round(count / measured.seconds / (PEAK_TFLOPS * 1e12), 4)

    return {
        "tree_tokens": tree_work.tokens,
        "flat_tokens": flat_work.tokens,
        "token_ratio": round(flat_work.tokens / tree_work.tokens, 4),
        "pair_ratio": round(flat_work.pairs / tree_work.pairs, 4),
        "flop_ratio": round(flat_flops[0] / tree_flops[0], 4),
        "tree_tflop": float(f"{tree_flops[0] / 1e12:.4g}"),
        "tree_ms": round(1e3 * tree.seconds, 2),
        "flat_ms": round(1e3 * flat.seconds, 2),
        # Tokens of the rollouts a second: what a trainer waits for.
        "tree_tokens_per_s": round(flat_work.tokens / tree.seconds),
        "flat_tokens_per_s": round(flat_work.tokens / flat.seconds),
        "peak_tflops": PEAK_TFLOPS,
        "mfu": share(tree_flops[0], tree),
        "hfu": share(tree_flops[1], tree),
        "flat_mfu": share(flat_flops[0], flat),
        "flat_hfu": share(flat_flops[1], flat),
        "tree_gib": tree.peak_gib,
        "flat_gib": flat.peak_gib,
        "tree_packs": tree.metrics["packs"],
        "flat_packs": flat.metrics["packs"],
        "plan_ms": round(tree.metrics["plan_ms"], 2),
        "plan_wait_ms": round(tree.metrics["plan_wait_ms"], 2),
    }


def judge(record: dict, right: bool) -> None:
    """Add the speed-up, over the FLOP ratio too; None where tree and flat disagree."""
    speedup = record["flat_ms"] / record["tree_ms"]
    record["right"] = right
    record["speedup"] = round(speedup, 3) if right else None
    record["speedup_over_flop_ratio"] = round(speedup / record["flop_ratio"], 3) if right else None


def largest_rollouts(run: StepRun, rollouts: list[Rollout], attention: str, shared: int) -> dict[str, int]:
    """Rollouts that one micro-batch can take, trees and flat rows; found by doubling or halving.

    Args:
        rollouts: of one prompt, as many as the search may come to.
        shared: flat rows that a micro-batch takes.
    """

    def fits_tree(count: int) -> bool:
        run.use_trees()
        return run.fits(rollouts[:count])

    def fits_flat(count: int) -> bool:
        run.use_rows(attention, sum(rollout.length for rollout in rollouts[:count]))
        return run.fits(unshared(rollouts[:count]))

    found = {}
    for kind, fits, start in (("tree", fits_tree, 2 * shared), ("flat", fits_flat, shared)):
        found[kind] = largest(fits, start, len(rollouts))
    return found


def largest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest of ``start`` times or over powers of two, at most ``most``, for which ``fits`` holds; 0 for none."""
    count = min(start, most)
    if fits(count):
        while 2 * count <= most and fits(2 * count):
            count *= 2
        return count
    while count and not fits(count := count // 2):
        pass
    return count


def say(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def show(record: dict) -> None:
    """One line a figure, of those that count first."""
    for key, value in record.items():
        say(f"  {key:<26} {value}")


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*MODELS, LAYER), required=True)
    parser.add_argument("--layers", type=int, help="only the first so many layers; the record says so")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, required=True)
    parser.add_argument("--flat", choices=("auto", *FLAT_CALLS), default="auto", help="attention of flat rows")
    parser.add_argument("--flat-tokens", type=int, help="tokens of a flat micro-batch; default: halved until it fits")
    parser.add_argument("--pack-tokens", type=int, help="tree tokens of a pack; default: the whole step")
    parser.add_argument("--limit-tokens", type=int, help="of a real set whole groups up to so many flat tokens")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of each kind")
    parser.add_argument("--engine", choices=ENGINES, default="plain")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="layers", help="memory.recompute, on both sides")
    parser.add_argument("--recompute-layers", type=int, help="only the first so many layers, on both sides")
    parser.add_argument("--liger", action="store_true", help="Liger's norms, SwiGLU and rotary, on both sides")
    parser.add_argument(
        "--more", choices=("rollouts", "prompts"), default="rollouts", help="of what several GPUs have more than one"
    )
    parser.add_argument("--largest", action="store_true", help="search the largest number of rollouts; takes minutes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real sets (holds tokens/)")
    parser.add_argument("--record", action="store_true", help="append to the file of results, workload by workload")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where --record appends")
    parser.add_argument("--commit", help="the commit to record, where this is a copy without history")
    return parser.parse_args(given)


def setup_of(arguments: argparse.Namespace) -> Setup:
    return Setup(
        model=arguments.model,
        layers=arguments.layers,
        engine=arguments.engine,
        recompute=arguments.recompute,
        recompute_layers=arguments.recompute_layers,
        pack_tokens=arguments.pack_tokens,
        replay=any(workload in SETS for workload in arguments.workloads),
        dtype=arguments.dtype,
        liger=arguments.liger,
    )


def measure(arguments: argparse.Namespace, ranks: Ranks):
    """The records of the workloads asked for, one after the other."""
    if arguments.model == LAYER:
        yield from step_layer.records(arguments, ranks.device)
    elif ranks.world > 1:
        for workload in arguments.workloads:
            yield step_ranks.compare(setup_of(arguments), workload, arguments, ranks)
    else:
        run, roof = StepRun(setup_of(arguments), ranks), roof_tflops(ranks.device)
        for workload in arguments.workloads:
            yield compare(run, workload, arguments) | {"roof_tflops": roof}


def main(given: list[str] | None = None) -> None:
    arguments, began = arguments_of(given), time.perf_counter()
    ranks = join_ranks()
    card = torch.cuda.get_device_name() if ranks.device.type == "cuda" else None
    stamped = stamp(*installed(PACKAGES), card=card, commit=arguments.commit) if arguments.record else None
    for record in measure(arguments, ranks):
        show(record)
        if stamped is not None and ranks.is_first:
            append([record], stamped, arguments.results)
    say(f"{time.perf_counter() - began:.0f} s in all")
    if ranks.group is not None:
        shutdown(0)


if __name__ == "__main__":
    main()
