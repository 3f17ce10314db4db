"""The gates of Gated DeltaNet layers: Triton's kernels in the interpreter, compiled for Hopper, and on a GPU.

The interpreter has to be switched on before Triton is imported, so its cases run in a process of their own.
"""

import pytest
import torch
import torch.nn.functional as F

from cp_engine.kernels.gates import choose, gated_norm, input_gates, triton
from tests.gdn_oracle import relative_errors
from tests.in_interpreter import pass_in_the_interpreter
from tests.kernels.compiled import compile_for_hopper, is_tuned_compiler

EPS = 1e-6


def test_in_the_interpreter():
    pass_in_the_interpreter("tests/kernels/interpreted_gates.py")


def test_cpus_and_float64_keep_the_reference():
    assert choose(torch.zeros(1, dtype=torch.bfloat16)) == "reference"
    a = torch.tensor([[-1.0, 2.0]], dtype=torch.float64)
    g, beta = input_gates(a, a, torch.zeros(2, dtype=torch.float64), torch.zeros(2))
    assert g.dtype == torch.float32 and beta.dtype == torch.float64


NORM = {"D": 128, "DP": 128, "EPS": EPS, "ROUND": True, "ROWS": triton.ROWS}
GATES = {"H": 32, "HP": 32, "ROWS": triton.ROWS, "IDENTITY": triton.SOFTPLUS_IDENTITY}
TYPES = dict.fromkeys(("g", "dg", "parts", "decay_rate", "dt_bias"), "*fp32") | {"rows": "i32"}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("_norm_kernel", NORM),
        ("_norm_backward_kernel", NORM | {"ROWS": triton.BACKWARD_ROWS, "PROGRAMS": triton.NORM_PROGRAMS}),
        ("_gates_kernel", GATES),
        ("_gates_backward_kernel", GATES | {"PROGRAMS": triton.GATE_PROGRAMS}),
    ],
)
def test_compiles_for_hopper_without_spills(kernel, constants):
    made = compile_for_hopper(getattr(triton, kernel), constants, TYPES, triton.WARPS)
    assert made.spilled == 0
    if is_tuned_compiler():
        # Four programs of 128 threads on a multiprocessor at least, with loads and stores of 16 bytes a thread.
        assert made.registers <= 128
        assert "ld.global.v4" in made.ptx and "st.global.v4" in made.ptx


def exact_norm(x, gate, weight):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * F.silu(gate)


def library_norm(x, gate, weight):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    norm = Qwen3_5RMSNormGated(x.shape[1], EPS)
    return torch.func.functional_call(norm, {"weight": weight}, (x, gate))


def fused_norm(x, gate, weight):
    return gated_norm(x, gate, weight, EPS)


def eager_gates(a, b, decay_rate, dt_bias):
    return -decay_rate.exp() * F.softplus(a + dt_bias), b.sigmoid()


def run(function, leaves, cotangents, precision) -> list[torch.Tensor]:
    """Results and gradients, computed in ``precision`` from the same numbers."""
    leaves = [leaf.to(precision).requires_grad_() for leaf in leaves]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(out, leaves, [c.to(o.dtype) for c, o in zip(cotangents, out, strict=True)])
    return [*out, *grads]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 33, 70_000])
def test_on_a_gpu(rows, dtype):
    """Against float64: a rounding of the largest value, and for the norm at most 1.25 times the library's error."""
    made = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=made).to(dtype)

    rounding = torch.finfo(dtype).eps
    leaves, cotangents = (normal(rows, 128), normal(rows, 128), 1 + normal(128)), (normal(rows, 128),)
    truth = run(exact_norm, leaves, cotangents, torch.float64)
    found, eager = (relative_errors(run(f, leaves, cotangents, dtype), truth) for f in (fused_norm, library_norm))
    assert all(f <= max(rounding, 1.25 * e) for f, e in zip(found, eager, strict=True)), (found, eager)

    leaves, cotangents = (normal(rows, 32), normal(rows, 32), normal(32) - 3, normal(32) - 2), [normal(rows, 32)] * 2
    truth = run(eager_gates, leaves, cotangents, torch.float64)
    found = relative_errors(run(input_gates, leaves, cotangents, dtype), truth)
    assert found[0] <= 1e-5 and max(found) <= rounding, found  # g is float32
    again = run(input_gates, leaves, cotangents, dtype)
    assert all(torch.equal(a, b) for a, b in zip(again, run(input_gates, leaves, cotangents, dtype), strict=True))
