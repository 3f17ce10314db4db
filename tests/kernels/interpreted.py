"""Triton kernels on a CPU: import this before anything that imports Triton."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402
from triton.runtime.jit import KernelInterface  # noqa: E402


def allow_loop_bounds_of_new_numpy() -> None:
    """Triton 3.6's interpreter holds scalars in arrays of one element and turns a loop bound into an int with int(),
    which NumPy refuses from 2.4 on."""
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def single_configurations() -> None:
    """fla's autotuners ask for a GPU driver unless there is nothing to choose."""
    import fla.ops.common.chunk_o
    import fla.ops.gated_delta_rule  # noqa: F401

    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for value in vars(module).values():
            while isinstance(value, KernelInterface):
                if isinstance(value, Autotuner):
                    value.configs = value.configs[:1]
                value = getattr(value, "fn", None)


allow_loop_bounds_of_new_numpy()
