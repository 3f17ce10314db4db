"""Tests of Triton kernels on a CPU, in a process of their own: Triton's interpreter has to be switched on before Triton
is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pass_in_the_interpreter(cases: str) -> None:
    """Run a file of tests, given by its path in the repository, and fail with what it prints; skip without Triton."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cases]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
