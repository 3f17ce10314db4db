"""Triton, or what lets the kernels' modules be imported where it is not installed."""

from __future__ import annotations

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

__all__ = ["tl", "triton"]
