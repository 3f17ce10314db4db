"""Triton kernels compiled for Hopper, and other cards, on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Compiled(NamedTuple):
    ptx: str
    ttgir: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack
    shared: int  # bytes of a program


def is_tuned_compiler() -> bool:
    """Whether this is the Triton that kernels are tuned with: others choose other registers and widths of loads."""
    return pytest.importorskip("triton").__version__.startswith("3.6.")


def compile_for_hopper(
    kernel, constants: dict, types: dict[str, str], warps: int, stages: int = 3, **options: int
) -> Compiled:
    """`compile_for` sm_90."""
    return compile_for(90, kernel, constants, types, warps, stages, **options)


def compile_for(
    capability: int, kernel, constants: dict, types: dict[str, str], warps: int, stages: int, **options: int
) -> Compiled:
    """A kernel in machine code; skips the test where Triton, or its tool that counts registers, is missing.

    Args:
        capability: the card's, 90 for 9.0.
        constants: of the kernel's arguments; those that it does not have are left out.
        types: of the other arguments, in Triton's words; the rest are pointers to bfloat16.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, places, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "*bf16")
        if name in constants:
            places[(place,)] = constants[name]
        elif signature[name].startswith("*"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages} | options,
    )
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton comes without cuobjdump")
    binary = Path(made.metadata_group[next(name for name in made.metadata_group if name.endswith(".cubin"))])
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Compiled(made.asm["ptx"], made.asm["ttgir"], int(registers), int(stack), made.metadata.shared)
