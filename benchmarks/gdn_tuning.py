"""Compiling the kernels of the gated delta rule in parallel, and trying their launch options in less time.

fla tries all options of a kernel at its first call, one after the other: minutes, most of them compilation. Here one
process a share of the options compiles into Triton's cache first; then all of them are timed, but for less long.

    python -m benchmarks.gdn_tuning KIND SHARE  (what `compile_in_parallel` starts)
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch

from benchmarks.gdn_workloads import CONV_WIDTH, HEADS, draw, sequences
from benchmarks.record import ROOT
from cp_engine.kernels.gdn import api
from cp_engine.kernels.gdn.triton.primitives import Sizes
from cp_engine.layers.gdn_tables import GdnHeads, gdn_tables
from cp_engine.sharding.forest import Forest, build_forest
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import contiguous_layout

AUTOTUNE = "all options, 5 + 20 ms each"  # as it stands in the records
SHARES = 9  # most options of one of fla's kernels
# Columns, warps, stages. What earlier sweeps have decided is no option any more (docs/log.md).
SWEEP = {"output": [Sizes(128, 4, 2), Sizes(64, 4, 3), Sizes(128, 8, 2)]}
SWEEP_SHARES = 1 + max(len(options) for options in SWEEP.values())  # the first holds the options in use
# Tokens of the segments of a tree on which all kernels run: three levels, so that the middle one has a state before
# and after it; and those of its last level where all of its chains have several chunks.
TRUNK, BRANCHES, TWIGS = 130, (80, 10), (64, 20)
LONG_TWIGS = (70, 66)
PACKED = 20  # tokens of each of two sequences that share a chunk


def fla_autotuners() -> Iterator:
    """The autotuners of fla's gated delta rule, once each."""
    import fla.ops.gated_delta_rule  # noqa: F401
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    seen = set()
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for value in vars(module).values():
            while isinstance(value, KernelInterface):
                if isinstance(value, Autotuner) and id(value) not in seen:
                    seen.add(id(value))
                    yield value
                value = getattr(value, "fn", None)


def shorten_autotuning() -> None:
    """Time each launch option for 20 ms after 5 ms, not for 100 after 25."""
    from triton.testing import do_bench

    for tuner in fla_autotuners():
        tuner._do_bench = functools.partial(do_bench, warmup=5, rep=20)


def keep_option(share: int) -> None:
    """Leave every autotuner one option, which it then takes without timing it."""
    for tuner in fla_autotuners():
        tuner.configs = [tuner.configs[share % len(tuner.configs)]]


def _constants(kernel: str) -> tuple[ModuleType, str]:
    """The module that holds the launch options of one of `SWEEP`, and their name."""
    from cp_engine.kernels.gdn.triton import output

    return {"output": (output, "OUTPUT")}[kernel]


def set_sizes(kernel: str, sizes: Sizes) -> None:
    module, name = _constants(kernel)
    setattr(module, name, sizes)


def sizes_of(kernel: str) -> Sizes:
    module, name = _constants(kernel)
    return getattr(module, name)


# Shares of each kind of work.
KINDS = {"kernels": SHARES, "sweep": SWEEP_SHARES, "layer": 2 * SHARES, "whole_layer": SHARES}


def compile_in_parallel(*kinds: str) -> None:
    """Fill Triton's cache on this machine, with some of `KINDS`; ranks of a machine split the shares."""
    shares = [(kind, str(share)) for kind in kinds for share in range(KINDS[kind])]
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "benchmarks.gdn_tuning"]
    started = [subprocess.Popen([*command, *share], cwd=ROOT, **quiet) for share in shares[rank::ranks]]
    failed = [share for share, process in zip(shares[rank::ranks], started, strict=True) if process.wait()]
    # A share that fails (options beyond the shared memory) is compiled, or left out, when its turn comes.
    if failed:
        print(f"not compiled ahead: {failed}", flush=True)


def small_tree(lengths: tuple[int, ...] = TWIGS) -> Forest:
    trunk, branches = np.arange(TRUNK), [np.full(length, TRUNK + i) for i, length in enumerate(BRANCHES)]
    twigs = [np.full(length, TRUNK + len(BRANCHES) + i) for i, length in enumerate(lengths)]
    rows = [np.concatenate([trunk, *path]) for path in (branches[:1], *((branches[1], twig) for twig in twigs))]
    return build_forest(np.concatenate(rows), np.cumsum([0] + [len(row) for row in rows]))


def compile_kernels(share: int, heads: GdnHeads, device, dtype: torch.dtype) -> None:
    """What `benchmarks.gdn` runs, with one option a kernel."""
    from benchmarks.gdn_rivals import Fla, Ours, fla_refusal_lifted
    from cp_engine.kernels.gdn.triton import launch, packing

    keep_option(share)
    forest, long = small_tree(), small_tree(LONG_TWIGS)
    inputs, dout = draw(long.tokens, heads, device, dtype)
    mine = type(inputs)(*(x[: forest.tokens] for x in inputs)), dout[: forest.tokens]

    def run(run: Ours | Fla) -> None:
        run.forward()
        run.backward()

    with fla_refusal_lifted():
        for x in (forest, sequences([forest.tokens])):
            run(Fla(x, *mine))
    run(Ours(forest, *mine))
    run(Ours(long, inputs, dout))
    # What many chains, and what many short fragments take.
    launch.WIDE_FROM = 1
    run(Ours(forest, *mine))
    run(Ours(long, inputs, dout))
    packing.LEAST_SPARED = 0.0
    packed = Ours(sequences([PACKED, PACKED, forest.tokens - 2 * PACKED]), *mine)
    assert packed.tables.packed
    run(packed)


def compile_sweep(share: int, heads: GdnHeads, device, dtype: torch.dtype) -> None:
    """Our kernels with one of the options of each family of `SWEEP`, or with those in use.

    One family after the other: an option that does not compile spoils no other.
    """
    from benchmarks.gdn_rivals import Ours
    from cp_engine.kernels.gdn.triton import launch, packing

    keep_option(0)
    forest = small_tree()
    inputs, dout = draw(forest.tokens, heads, device, dtype)

    def run(forest: Forest) -> None:
        both = Ours(forest, inputs, dout)
        both.forward()
        both.backward()

    if not share:
        run(forest)
        # What many chains, and what many short fragments take.
        launch.WIDE_FROM, packing.LEAST_SPARED = 1, 0.0
        run(sequences([PACKED, PACKED, forest.tokens - 2 * PACKED]))
        return
    failed = []
    for kernel, options in SWEEP.items():
        kept = sizes_of(kernel)
        try:
            if share <= len(options):
                set_sizes(kernel, options[share - 1])
                run(forest)
        except Exception as error:  # noqa: BLE001
            failed.append(error)
        finally:
            set_sizes(kernel, kept)
    if failed:
        raise failed[0]


def compile_layer(share: int, heads: GdnHeads, device, dtype: torch.dtype) -> None:
    """What `benchmarks.gdn_ranks` runs: all heads, as in `benchmarks.gdn_layer`, a rank below an entry and above an
    exit; or the half of the heads that a rank has under ulysses."""
    from benchmarks import gdn_ranks

    keep_option(share)
    if share >= SHARES:
        heads = GdnHeads(heads.key_heads // 2, heads.value_heads // 2, heads.key_dim, heads.value_dim)
    module = gdn_ranks.layer_module(heads, gdn_ranks.HYBRID.hidden, device, dtype)
    keep_option(share)  # those of the norm, which the module has imported
    gdn_ranks.alone(module, gdn_ranks.Problem.make(small_tree(), module))
    if share >= SHARES:
        return
    # By maps over five ranks, and handed on over three; the rank in the middle has an entry and an exit.
    for world in (5, 3):
        plan = gdn_plan(small_tree(), contiguous_layout(small_tree(), world), 1, "affine", CONV_WIDTH)
        compile_crossing(gdn_tables(plan, 1, device).chains, bool(plan.rounds), heads, device, dtype)


def compile_crossing(tables: api.ChainTables, handed: bool, heads: GdnHeads, device, dtype: torch.dtype) -> None:
    inputs, dout = draw(tables.rows, heads, device, dtype)
    state, exits = (
        torch.zeros((count, heads.value_heads, heads.key_dim, heads.value_dim), device=device)
        for count in (tables.entries, tables.exits)
    )
    assert len(state) and len(tables.through_slot)
    stages = api.chunk_stages(inputs, tables)
    forward = api.forward(inputs, stages, tables)
    forward.run(0, None)
    if handed:
        forward.leaving(1, state)
    else:
        api.exit_summary(inputs, stages, tables)
    forward.run(1, state)
    forward.outputs()
    back = api.backward_stages(inputs, stages, dout, tables)
    if not handed:
        _, back = api.begin_backward(inputs, stages, back, state, tables)
    backward = api.backward(inputs, stages, back, state, tables)
    if handed:
        backward.entering(1, lambda: exits)
    backward.gradients(lambda: exits)


if __name__ == "__main__":
    layers = dict.fromkeys(("layer", "whole_layer"), compile_layer)
    work = ({"kernels": compile_kernels, "sweep": compile_sweep} | layers)[sys.argv[1]]
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    work(int(sys.argv[2]), HEADS, torch.device("cuda"), torch.bfloat16)
    torch.cuda.synchronize()
