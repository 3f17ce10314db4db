"""Compiling the kernels of the gated delta rule in parallel, and trying their launch options in less time.

fla tries all options of a kernel at its first call, one after the other: minutes, most of them compilation. Here one
process a share of the options compiles into Triton's cache first; then all of them are timed, but for less long.

    python -m benchmarks.gdn_tuning SHARE  (what `compile_in_parallel` starts)
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.record import ROOT

AUTOTUNE = "all options, 5 + 20 ms each"  # as it stands in the records
SHARES = 9  # most options of one of fla's kernels
SWEEP = [(columns, warps, stages) for columns in (32, 64) for warps in (4, 8) for stages in (1, 2, 3)]
TRUNK, BRANCHES = 130, (70, 64)  # tokens of a tree on which all kernels run


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


def set_sizes(kernel: str, columns: int, warps: int, stages: int) -> None:
    """Launch options of our kernels: ``states`` (both directions of the state pass) or ``dqkwg``."""
    from cp_engine.kernels.gdn.triton import dqkwg, primitives

    if kernel == "states":
        primitives.STATE = primitives.Sizes(columns, warps, stages)
    else:
        dqkwg.BLOCK_KEYS = dqkwg.BLOCK_VALUES = columns
        dqkwg.WARPS, dqkwg.STAGES = warps, stages


def sizes_of(kernel: str) -> tuple[int, int, int]:
    """Columns, warps and stages as `set_sizes` takes them."""
    from cp_engine.kernels.gdn.triton import dqkwg, primitives

    if kernel == "states":
        return primitives.STATE.columns, primitives.STATE.warps, primitives.STATE.stages
    assert dqkwg.BLOCK_KEYS == dqkwg.BLOCK_VALUES
    return dqkwg.BLOCK_KEYS, dqkwg.WARPS, dqkwg.STAGES


def compile_in_parallel(sweep: bool = False) -> None:
    """Fill Triton's cache on this machine; with ``sweep`` also with all options of our kernels."""
    shares = range(SHARES + (len(SWEEP) if sweep else 0))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "benchmarks.gdn_tuning"]
    started = [subprocess.Popen([*command, str(share)], cwd=ROOT, **quiet) for share in shares]
    failed = [share for share, process in zip(shares, started, strict=True) if process.wait()]
    # A share that fails (options beyond the shared memory) is compiled, or left out, when its turn comes.
    if failed:
        print(f"not compiled ahead: shares {failed}", flush=True)


def compile_share(share: int) -> None:
    from benchmarks.gdn_rivals import Fla, Ours, fla_refusal_lifted
    from benchmarks.gdn_workloads import HEADS, draw, sequences
    from cp_engine.sharding.forest import build_forest

    rows = [np.append(np.arange(TRUNK), np.full(length, TRUNK + i)) for i, length in enumerate(BRANCHES)]
    forest = build_forest(np.concatenate(rows), np.cumsum([0] + [len(row) for row in rows]))
    inputs, dout = draw(forest.tokens, HEADS, "cuda", torch.bfloat16)
    if share >= SHARES:
        keep_option(0)
        for kernel in ("states", "dqkwg"):
            set_sizes(kernel, *SWEEP[share - SHARES])
        runs = [Ours(forest, inputs, dout)]
    else:
        keep_option(share)
        flat = sequences(forest.segment_length)
        runs = [Ours(forest, inputs, dout), Fla(forest, inputs, dout), Fla(flat, inputs, dout)]
    with fla_refusal_lifted():
        for run in runs:
            run.forward()
            run.backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    compile_share(int(sys.argv[1]))
