"""The Gated DeltaNet layer on the Triton backend: in the interpreter against every rollout alone, and by the bounds of
the GPU tests.

The interpreter has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("cases", ["interpreted_gdn", "interpreted_gdn_bounds"])
def test_in_the_interpreter(cases):
    pytest.importorskip("triton")
    pytest.importorskip("fla")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/layers/{cases}.py"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
