"""Host memory of tensors, counted by the storages that operators make."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostBytes(TorchDispatchMode):
    """Most bytes that tensors made inside this context held in host memory at one time, as ``most``.

    Unlike the profiler it sees what other threads free, such as those of a process group.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come here themselves
        out = func(*args, **(kwargs or {}))
        self.add(value for value in tree_leaves(out) if isinstance(value, torch.Tensor))
        return out

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that another thread made, such as those of the library's loader."""
        for storage in (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.alive += size
                self.most = max(self.most, self.alive)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size
