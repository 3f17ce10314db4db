"""cp_engine: exact training on packed prefix trees over context-parallel ranks.

The package is lazy: planning (`cp_engine.sharding`) imports no torch, and names such as `Engine` load on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path

__version__ = "0.1.0"

# In a checkout the folders `kernels/` and `sharding/` stand beside this package, not inside it. Installed, they are
# inside. Appending the repository root makes both cases one: `cp_engine.kernels`, `cp_engine.sharding`.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "sharding").is_dir():
    __path__.append(str(_ROOT))

_LAZY = {
    "Config": "cp_engine.config",
    "Engine": "cp_engine.engine",
    "Rollout": "cp_engine.rollouts",
    "read_rollouts": "cp_engine.rollouts",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'cp_engine' has no attribute {name!r}")
