"""The gates of Gated DeltaNet layers by Triton in its interpreter; `test_gates.py` runs this file."""

from tests.kernels import interpreted  # noqa: F401  # isort: skip  # before anything that imports Triton

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cp_engine.engine import Engine
from cp_engine.kernels import gates
from cp_engine.kernels.gates import api, gated_norm, input_gates, triton
from cp_engine.models.hf_gdn import gdn_layers
from tests.distributed.engine_cases import sample, this_rank, tiny_config, whole_gradients
from tests.gdn_oracle import relative_errors
from tests.kernels.attention_oracle import poisoned_memory
from tests.models.liger_cases import engine_of, errors, gradients_of
from tests.ranks import run_ranks

BOUND = 1e-5  # float32; see the log for what is seen
EPS = 1e-6


def normal(*shape, scale: float = 1.0):
    return scale * torch.randn(*shape, dtype=torch.float64)


def run(function, leaves, cotangents, dtype):
    """Results and gradients of all leaves."""
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    with poisoned_memory():
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(out, leaves, [c.to(o.dtype) for c, o in zip(cotangents, out, strict=True)])
    return [x.detach() for x in (*out, *grads)]


def plain_gates(a, b, decay_rate, dt_bias):
    return -decay_rate.exp() * F.softplus(a + dt_bias), b.sigmoid()


def plain_norm(x, gate, weight):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * F.silu(gate)


def fused_norm(x, gate, weight):
    return gated_norm(x, gate, weight, EPS)


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(api, "choose", lambda x: "triton")
    monkeypatch.setattr("cp_engine.kernels.gates.choose", lambda x: "triton")


def gates_case(rows: int, heads: int):
    torch.manual_seed(rows)
    # Steps from -30 (a decay of 1 - 1e-13) to beyond the threshold of softplus.
    a = normal(rows, heads, scale=2.0) + torch.linspace(-28, 24, max(rows, 1), dtype=torch.float64)[:rows, None]
    leaves = a, normal(rows, heads, scale=4.0), normal(heads) - 2, normal(heads)
    return leaves, (normal(rows, heads), normal(rows, heads))


def norm_case(rows: int, size: int):
    torch.manual_seed(rows + size)
    scales = torch.logspace(-4, 3, max(rows, 1), dtype=torch.float64)[:rows, None]
    return (scales * normal(rows, size), normal(rows, size, scale=4.0), 1 + normal(size)), (normal(rows, size),)


@pytest.mark.parametrize("programs", [1, 3, triton.GATE_PROGRAMS])
@pytest.mark.parametrize(("rows", "heads"), [(1, 4), (33, 3), (200, 8)])
def test_input_gates(rows, heads, programs, fused, monkeypatch):
    monkeypatch.setattr(triton, "GATE_PROGRAMS", programs)
    leaves, cotangents = gates_case(rows, heads)
    found = run(input_gates, leaves, cotangents, torch.float32)
    truth = run(plain_gates, leaves, cotangents, torch.float64)
    worst = dict(zip(("g", "beta", "da", "db", "ddecay_rate", "ddt_bias"), relative_errors(found, truth), strict=True))
    print(worst)
    assert max(worst.values()) <= BOUND, worst


def test_slow_decays_keep_their_digits(fused):
    """softplus(-30) is 9.4e-14, which 1 + e^x loses in float32; between, the logarithm of a number near 1."""
    a = torch.linspace(-30, 25, 1000, dtype=torch.float64)[:, None]
    zero = torch.zeros(1, dtype=torch.float64)
    (g, _), (true, _) = (f(*(x.to(d) for x in (a, a, zero, zero))) for f, d in (
        (input_gates, torch.float32), (plain_gates, torch.float64)))  # fmt: skip
    assert float(((g - true) / true).abs().max()) < 5e-6


@pytest.mark.parametrize("programs", [1, 3, triton.NORM_PROGRAMS])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (50, 20), (100, 128)])
def test_gated_norm(rows, size, programs, monkeypatch):
    monkeypatch.setattr(triton, "NORM_PROGRAMS", programs)
    leaves, cotangents = norm_case(rows, size)
    found = run(fused_norm, leaves, cotangents, torch.float32)
    truth = run(plain_norm, leaves, cotangents, torch.float64)
    # Rows of 1e-4 beside rows of 1e3: dx row by row, since it goes with one over their size.
    worst = dict(
        zip(("out", "dgate", "dweight"), relative_errors([found[0], *found[2:]], [truth[0], *truth[2:]]), strict=True)
    )
    worst["dx"] = float(((found[1] - truth[1]).abs().amax(1) / truth[1].abs().amax(1)).max())
    print(worst)
    assert max(worst.values()) <= BOUND, worst


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_it_rounds_where_the_library_does(weight_dtype):
    """In float16, since the interpreter cuts bfloat16 off instead of rounding it."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    torch.manual_seed(0)
    norm = Qwen3_5RMSNormGated(128, EPS)
    norm.weight.data = (1 + normal(128)).to(weight_dtype)
    x, gate = normal(64, 128).half(), normal(64, 128).half()
    truth, found = norm(x, gate), gated_norm(x, gate, norm.weight, EPS)
    assert truth.dtype == found.dtype == torch.float16
    # Where float32 differs in its last place before a rounding.
    assert (found != truth).double().mean() < 2e-3
    unrounded = plain_norm(*(t.double() for t in (x, gate, norm.weight))).half()
    assert (unrounded != truth).double().mean() > 0.1  # planted: without the roundings between it shows


def test_the_norm_keeps_its_inputs_alone():
    x, gate, weight = (t.float().requires_grad_() for t in norm_case(20, 16)[0])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused_norm(x, gate, weight)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (x, gate, weight)]


def test_no_rows():
    leaves, cotangents = norm_case(0, 16)
    out, dx, dgate, dweight = run(fused_norm, leaves, cotangents, torch.float32)
    assert out.shape == dx.shape == dgate.shape == (0, 16) and not dweight.any()


def test_frozen_weights(fused):
    (x, gate, weight), _ = norm_case(20, 16)
    x = x.float().requires_grad_()
    fused_norm(x, gate.float(), weight.float()).sum().backward()
    (a, b, decay_rate, dt_bias), _ = gates_case(20, 4)
    a = a.float().requires_grad_()
    sum(out.sum() for out in input_gates(a, b.float(), decay_rate.float(), dt_bias.float())).backward()
    assert np.isfinite(float(x.grad.sum())) and a.grad.abs().max() > 0


@pytest.mark.parametrize("fault", ["lost part", "gate's slope", "norm's projection"])
def test_faults_are_seen(fault, monkeypatch):
    """Planted: a program's part of dweight, the second term of silu's derivative, the projection in dx."""
    leaves, cotangents = norm_case(64, 16)
    truth = run(plain_norm, leaves, cotangents, torch.float64)
    backward = triton.gated_norm_backward

    def spoiled(x, gate, weight, eps, dout):
        dx, dgate, dweight = backward(x, gate, weight, eps, dout)
        if fault == "lost part":
            return dx, dgate, backward(x[:48], gate[:48], weight, eps, dout[:48])[2]
        if fault == "gate's slope":
            normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            return dx, dout * weight * normalised * gate.sigmoid(), dweight
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return dout * weight * F.silu(gate) * inverse, dgate, dweight

    monkeypatch.setattr(triton, "gated_norm_backward", spoiled)
    assert max(relative_errors(run(fused_norm, leaves, cotangents, torch.float32), truth)) > 1e-2


@pytest.mark.parametrize("model", ["tiny-qwen3.5", "tiny-qwen3-next"])
def test_gradients_of_a_model_are_those_of_the_library(model, fused):
    engine, calls = engine_of(model, "float32"), []
    layers = list(gdn_layers(engine.model.causal_lm))
    for layer in layers:
        # As ZeRO-3 and FSDP2 do, which gather a module's weights when it is called.
        layer.norm.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    found = gradients_of(engine)
    assert layers and set(calls) == {layer.norm for layer in layers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "choose", lambda x: "reference")
        patch.setattr("cp_engine.kernels.gates.choose", lambda x: "reference")
        truth = gradients_of(engine_of(model, "float32"))
    worst = errors(found, truth)
    print(model, f"{max(worst.values()):.2e}")
    assert 0 < max(worst.values()) < 2e-5, worst


def rank_gradients(engine: str, backend: str):
    for module in (gates, api):
        module.choose = lambda x: backend
    model = Engine(
        tiny_config({"dtype": "float32", "parallel": {"dp": 1, "cp": 2}, "engine": {"name": engine}}), this_rank()
    )
    model.accumulate_gradients(model._prepare(sample()[:4]))
    return {name: gradient.clone() for name, gradient in whole_gradients(model).items()}


def test_weights_that_fsdp2_shards_are_whole_in_forward_and_backward():
    """Which fills the norm's weight, A_log and dt_bias when their modules are called, and frees them afterwards."""
    found = run_ranks(2, rank_gradients, "fsdp2", "triton")[0]
    truth = run_ranks(2, rank_gradients, "plain", "reference")[0]
    worst = errors(found, truth)
    print(f"{max(worst.values()):.2e}")
    assert max(worst.values()) < 2e-5, worst
