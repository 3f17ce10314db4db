"""Launch options of the state pass and its adjoint, and work that runs beside other work.

Shapes: K and V head sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch

from cp_engine.kernels.gdn.triton.primitives import Sizes
from cp_engine.kernels.shared.triton import padded

# A program holds K x columns of the state in float32 registers, and reads all of w, k (and q) for them. Few chains
# leave multiprocessors idle unless a state is cut small; many keep them busy, and then larger cuts read less. With 2
# stages a chunk's loads are issued when the one before is done, and only another program hides their time (in backward
# one of the other pass): two of them fit a multiprocessor. With 3 a program hides them itself, and has it alone.
STATE = Sizes(32, 4, 2)
WIDE_STATE = Sizes(64, 4, 2)
ALONE = 3
# States (chains x heads) of a launch from which on two programs with wide cuts stand on each of 132 multiprocessors.
WIDE_FROM = 132
# Of larger keys the backward fills a multiprocessor with 2 stages and narrow cuts (217 of 227 KiB).
LARGEST_KEYS = 128
# float32 products are exact (no tf32), without matrix units: more columns spill.
FLOAT32 = Sizes(16, 8, 1)


def state_sizes(key_dim: int, value_dim: int, dtype: torch.dtype, states: int, alone: bool) -> Sizes:
    """Sizes of the state pass and its backward for a launch over so many states; ``alone`` if no other pass runs."""
    small = key_dim <= LARGEST_KEYS
    chosen = WIDE_STATE if small and states >= WIDE_FROM else STATE
    chosen = FLOAT32 if dtype == torch.float32 else chosen
    stages = ALONE if small and alone and chosen is STATE else chosen.stages
    return Sizes(min(chosen.columns, padded(value_dim)), chosen.warps, stages)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """Runs a call on a second stream, at the same time as what the current stream does until `join`.

    What the call writes is allocated before, and nothing that it reads or writes is freed before `join`. On a CPU the
    call runs at once.
    """

    def __init__(self, call: Callable[[], None], device: torch.device):
        self.stream = _second_stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            call()

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
