"""Keeping float64 runs in float64, where `transformers` casts to float32 inside."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


@contextmanager
def keep_float64():
    """Never let a float64 tensor be cast to float32 inside this context. For tests and `verify` only.

    `transformers` computes norms, decays, the delta rule and softmax in float32 whatever the model's dtype, so two
    mathematically equal float64 runs differ by 1e-7 to 1e-3. Under this context ``.float()``, ``.to(float32)``,
    ``.type(float32)``, ``.type_as(float32 tensor)`` and every ``dtype=float32`` argument beside a float64 tensor
    (softmax, log_softmax, sums, ...) keep float64. Other dtypes are untouched, so RoPE stays in float32: integer
    positions become float32, and that is a pure function of the position on both sides of a comparison.

    The context belongs to the thread that enters it, and holds in ``backward`` called inside it: recomputed
    activations and custom backward functions see it. That needs care, because such a mode is off while it handles a
    call, and ``backward`` is a call that it handles. On CUDA backward runs in threads of the autograd engine: enter the
    context inside a checkpointed function as well, as `same_precision` does for recomputed layers.
    """
    mode = _KeepFloat64()
    run_backward = torch.autograd._engine_run_backward

    def run_backward_in_mode(*args, **kwargs):
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_in_mode
    try:
        with mode:
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward


def same_precision() -> AbstractContextManager:
    """A context for work that another thread does later: `keep_float64` if it holds here, else nothing."""
    held = any(isinstance(mode, _KeepFloat64) for mode in _get_current_function_mode_stack())
    return _KeepFloat64() if held else nullcontext()


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.get("input")
        if not (isinstance(first, torch.Tensor) and first.dtype == torch.float64):
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            return first
        if func is torch.Tensor.type_as and args[1].dtype == torch.float32:
            return first
        if func is torch.Tensor.type and _is_float32(args[1] if len(args) > 1 else kwargs.get("dtype")):
            return first
        wide = _wider_target if func is torch.Tensor.to else _wider_dtype
        kwargs = {name: wide(value) for name, value in kwargs.items()}
        return func(first, *map(wide, args[1:]), **kwargs) if args else func(**kwargs)


def _is_float32(dtype) -> bool:
    return dtype in (torch.float32, torch.FloatTensor, "torch.FloatTensor", "torch.cuda.FloatTensor")


def _wider_dtype(value):
    """An argument with float64 in place of float32."""
    return torch.float64 if value is torch.float32 else value


def _wider_target(value):
    """An argument of ``Tensor.to``, where a tensor stands for its dtype and device."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.new_empty(0, dtype=torch.float64)
    return _wider_dtype(value)
