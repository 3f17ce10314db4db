"""Unmodified models on the CPU: each in a new process, because transformers binds fla when it is imported."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # import fails, as if it were not installed
import torch
from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.load import load_model
model = load_model("tiny-qwen3.5", torch.float32)
make_cpu_runnable(model)
ids = torch.arange(70)[None]
model(input_ids=ids).logits.sum().backward()
print(model.generate(ids, max_new_tokens=4, do_sample=False)[0, 70:].tolist())
"""


def generate(*hidden: str) -> str:
    run = subprocess.run([sys.executable, "-c", SCRIPT, *hidden], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def expected() -> str:
    return generate()


@pytest.mark.parametrize("hidden", [["fla"], ["triton"]], ids=["fla hidden", "triton hidden"])
def test_runs_forward_backward_and_generate_whatever_is_installed(expected, hidden):
    assert expected.startswith("[") and generate(*hidden) == expected
