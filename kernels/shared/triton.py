"""Triton, or what lets the kernels' modules be imported where it is not installed; and what their launches share."""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:

    class _Missing:
        """Decorates nothing: `why_not` refuses a call before it gets to a kernel."""

        @staticmethod
        def jit(function=None, **_options):
            return function if function is not None else lambda undecorated: undecorated

    triton, tl = _Missing(), None

LOG2_E = 1.4426950408889634  # kernels cannot read it: it is passed to them, or they repeat it


def padded(size: int) -> int:
    """The size of a head inside a kernel: a power of two that matrix units accept."""
    return max(16, triton.next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    """Of products: float32 ones are exact."""
    return "ieee" if dtype == torch.float32 else "tf32"
