"""Triton kernels on a CPU: import this before anything that imports Triton."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402


def allow_loop_bounds_of_new_numpy() -> None:
    """Triton 3.6's interpreter holds scalars in arrays of one element and turns a loop bound into an int with int(),
    which NumPy refuses from 2.4 on."""
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


allow_loop_bounds_of_new_numpy()
