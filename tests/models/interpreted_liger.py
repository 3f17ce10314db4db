"""Models on Liger's kernels in Triton's interpreter against the same models without; `test_liger.py` runs this file."""

from tests.kernels import interpreted  # noqa: F401  # isort: skip  # before anything that imports Triton

import importlib

import numpy as np
import pytest
import triton.language as tl
from liger_kernel.ops import rms_norm
from triton.runtime import interpreter

from tests.models.liger_cases import engine_of, errors, gradients_of

BOUND = 2e-5  # float32


@pytest.fixture(autouse=True, scope="module")
def scalars_are_tensors():
    """The interpreter leaves floats as they are, and Liger casts them; and it has no functions of CUDA's library."""
    convert, rsqrt = interpreter._implicit_cvt, rms_norm.rsqrt

    def converted(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    interpreter._implicit_cvt, rms_norm.rsqrt = converted, lambda x: tl.rsqrt(x)
    yield
    interpreter._implicit_cvt, rms_norm.rsqrt = convert, rsqrt


@pytest.fixture(autouse=True)
def rotary_embeddings_come_back(monkeypatch):
    for name in ("llama", "qwen3", "qwen3_5", "qwen3_next"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-next"])
def test_gradients_are_those_without(model):
    truth = gradients_of(engine_of(model, "float32"))
    found = gradients_of(engine_of(model, "float32", liger=True))
    worst = errors(found, truth)
    print(model, f"{max(worst.values()):.2e}")
    assert max(worst.values()) < BOUND, worst


def test_a_wrong_rotation_is_seen(monkeypatch):
    """Planted: q turned back instead of forth."""
    from liger_kernel.transformers import functional

    rope = functional.liger_rope
    monkeypatch.setattr(functional, "liger_rope", lambda q, k, cos, sin, *rest: rope(q, k, cos, -sin, *rest))
    truth = gradients_of(engine_of("tiny-qwen3", "float32"))
    found = gradients_of(engine_of("tiny-qwen3", "float32", liger=True))
    assert max(errors(found, truth).values()) > 100 * BOUND
