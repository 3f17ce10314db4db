"""Visible key rows of query rows: on the host, for tensors of one device.

Shapes: Nq query rows, Nk key rows, U runs, E spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from cp_engine.kernels.shared.on_device import moved

_ARRAYS = ("run_row", "run_length", "span_ptr", "span_lo", "span_hi", "diag_lo", "diag_hi")


@dataclass(frozen=True, eq=False)
class Intervals:
    """Row ``run_row[u] + i`` of run u sees the spans of u and ``[diag_lo[u], diag_hi[u] + i)``.

    Runs ascend and do not overlap; rows outside every run see nothing. ``diag_lo[u] == -1`` means that the run has no
    diagonal. The intervals of one row do not overlap. With a sliding window the lower end of a run's first interval
    (its first span, else its diagonal) may move up by one key a row, as ``slide`` says; it is empty in no row.
    """

    rows: int  # Nq
    run_row: np.ndarray  # int64 [U] first query row of each run
    run_length: np.ndarray  # int64 [U]
    span_ptr: np.ndarray  # int64 [U + 1] spans of run u are span_ptr[u] .. span_ptr[u + 1]
    span_lo: np.ndarray  # int64 [E]
    span_hi: np.ndarray  # int64 [E]
    diag_lo: np.ndarray  # int64 [U]
    diag_hi: np.ndarray  # int64 [U] end of the first row's diagonal
    key_end: int  # one past the last key row that any query row sees: a call needs Nk >= key_end
    device: torch.device  # of the tensors of a call
    slide: np.ndarray | None = None  # bool [U] whether the lower end moves; None: there is no window
    _prepared: dict = field(default_factory=dict, repr=False)

    @classmethod
    def from_arrays(cls, arrays, device: torch.device | str = "cpu") -> Intervals:
        """Numpy intervals (any object with the arrays above) for calls on a device."""
        diagonal = np.where(arrays.diag_lo >= 0, arrays.diag_hi + arrays.run_length - 1, 0)
        key_end = max(int(arrays.span_hi.max(initial=0)), int(diagonal.max(initial=0)))
        # A tensor's device always has an index.
        device = torch.empty(0, device=device).device
        made = {name: np.asarray(getattr(arrays, name), np.int64) for name in _ARRAYS}
        return cls(rows=int(arrays.rows), key_end=key_end, device=device, slide=arrays.slide, **made)

    def prepared(self, backend: str, build: Callable[[Intervals], object]):
        """What a backend derives from these intervals, built at its first call and reused by every later layer.

        Tables are built on the host, where a planning thread may do it ahead; `on_device` moves them.
        """
        if backend not in self._prepared:
            self._prepared[backend] = build(self)
        return self._prepared[backend]

    def on_device(self, backend: str, build: Callable[[Intervals], object]):
        """What `prepared` gives, its tensors on the device of the calls."""
        return self.prepared(f"{backend} on the device", lambda made: moved(made.prepared(backend, build), self.device))
