"""Which optional packages there are."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def installed(module: str) -> bool:
    """Whether a module can be imported. Looked up once, since kernels ask at every call of a layer."""
    package = module.rpartition(".")[0]
    return (not package or installed(package)) and importlib.util.find_spec(module) is not None
