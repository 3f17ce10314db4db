"""Tree attention over ranks on the Triton backend, in the interpreter.

It has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/layers/interpreted_attention.py"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
