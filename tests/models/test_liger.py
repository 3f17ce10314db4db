"""Liger's kernels in place of the library's: a stand-in in float64; the package in Triton's interpreter and on GPUs."""

import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from benchmarks import step
from benchmarks.step_run import StepRun
from cp_engine import engine as engine_module
from cp_engine.checkpoint import Checkpoints
from cp_engine.models.liger import use_liger
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from tests.distributed.engine_cases import this_rank
from tests.in_interpreter import pass_in_the_interpreter
from tests.models.liger_cases import engine_of, errors, gradients_of, library_module, step_on_gpu
from tests.test_step_benchmark import arguments

GPU = torch.device("cuda")
MODELS = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """A stand-in for the package, of the same signatures: the equations in the dtype that comes. Counts its calls."""
    found = Counter()

    def liger_rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True):
        found["norm"] += 1
        assert casting_mode == ("gemma" if offset else "llama") and not in_place
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)

    def liger_swiglu(a, b):
        found["swiglu"] += 1
        return F.silu(a) * b

    def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        found["rope"] += 1
        size = cos.shape[-1]
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

        def turned(x):
            first, second = x[..., : size // 2], x[..., size // 2 : size]
            halves = torch.cat([-second, first], -1)
            return torch.cat([x[..., :size] * cos + halves * sin, x[..., size:]], -1)

        return turned(q), turned(k)

    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for function in (liger_rms_norm, liger_swiglu, liger_rope):
        setattr(sys.modules[names[-1]], function.__name__, function)
    return found


@pytest.fixture
def load(monkeypatch):
    """Loads a model; its library's rotary embedding comes back after the test."""

    def loaded(name: str, dtype: torch.dtype = torch.float64):
        model = load_model(name, dtype, vocab_size=36)
        module = library_module(model)
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
        return model

    return loaded


def both(name: str, load, recompute: str = "none") -> dict[str, float]:
    """What the gradients of a model with and without the stand-in differ by."""
    sections = {"memory": {"recompute": recompute}}
    with keep_float64():
        truth = gradients_of(engine_of(name, "float64", causal_lm=load(name), **sections))
        model = load(name)
        use_liger(model, torch.float32, GPU)
        return errors(gradients_of(engine_of(name, "float64", causal_lm=model, **sections)), truth)


@pytest.mark.parametrize("name", MODELS)
def test_every_supported_model_computes_the_same(name, load, calls):
    worst = both(name, load)
    assert max(worst.values()) < 1e-10, worst
    config = load(name).config
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    attention = kinds.count("full_attention")
    own_norms = 0 if name == "tiny-llama" else 2 * attention
    mlps = len(config.mlp_only_layers) if name == "tiny-qwen3-moe" else layers
    # Routed experts and the gated norms of GDN layers are the library's.
    assert calls == Counter(norm=2 * layers + own_norms + 1, rope=attention, swiglu=mlps)


def test_it_runs_in_recomputed_layers_too(load, calls):
    assert max(both("tiny-qwen3.5", load, "layers").values()) < 1e-10


@pytest.mark.parametrize(("name", "fault"), [("tiny-qwen3.5", "offset"), ("tiny-qwen3", "gate")])
def test_faults_are_seen(name, fault, load, calls, monkeypatch):
    """Planted: norms without the 1 of 1 + weight, and SwiGLU with gate and up exchanged."""
    functional = sys.modules["liger_kernel.transformers.functional"]
    norm, swiglu = functional.liger_rms_norm, functional.liger_swiglu
    if fault == "offset":
        monkeypatch.setattr(functional, "liger_rms_norm", lambda x, w, eps, *_: norm(x, w, eps, in_place=False))
    else:
        monkeypatch.setattr(functional, "liger_swiglu", lambda a, b: swiglu(b, a))
    assert max(both(name, load).values()) > 1e-2


@pytest.mark.parametrize(
    ("name", "dtype", "device", "hidden_act", "message"),
    [
        ("tiny-qwen3", torch.float64, GPU, "silu", "model.liger: its kernels compute in float32, and dtype is float64"),
        ("tiny-qwen3", torch.float32, torch.device("cpu"), "silu", "need GPUs, and these ranks run on cpu; leave it"),
        ("tiny-qwen3", torch.float32, GPU, "gelu", "SiLU as activation, and the model's hidden_act is 'gelu'; leave"),
        ("tiny-qwen3", torch.float32, GPU, "silu", r"needs its package: pip install 'cp-engine\[liger\]'"),
    ],
)
def test_what_it_cannot_do_is_refused(name, dtype, device, hidden_act, message, load, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    model = load(name, torch.float32)
    model.config.hidden_act = hidden_act
    with pytest.raises(ValueError, match=message):
        use_liger(model, dtype, device)


def on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "use_liger", lambda model, dtype, device: use_liger(model, dtype, GPU))


def test_the_setting_reaches_the_model_and_may_change_between_runs(load, calls, monkeypatch, tmp_path):
    load("tiny-qwen3")
    on_a_gpu(monkeypatch)
    engine = engine_of("tiny-qwen3", "float32", liger=True)
    gradients_of(engine)
    assert calls["rope"] == engine.model.causal_lm.config.num_hidden_layers
    Checkpoints(tmp_path, 1).save(engine)
    assert Checkpoints(tmp_path, 1).resume(engine_of("tiny-qwen3", "float32"))


def test_adapters_inside_its_mlp_are_trained(load, calls, monkeypatch):
    load("tiny-qwen3")
    on_a_gpu(monkeypatch)
    pytest.importorskip("peft", reason="adapters are peft's (pip install 'cp-engine[lora]')")
    truth, found = (gradients_of(engine_of("tiny-qwen3", "float32", liger=on, lora={"r": 3})) for on in (False, True))
    assert calls["swiglu"] > 0 and any("gate_proj" in name for name in found)
    assert max(errors(found, truth).values()) < 2e-5


def test_the_step_benchmark_has_it_on_both_sides(load, calls, monkeypatch):
    load("tiny-qwen3")
    on_a_gpu(monkeypatch)
    run, seen = StepRun(step.setup_of(arguments(liger=True)), this_rank()), {}
    for side in ("use_trees", "use_rows"):
        plain = getattr(run, side)

        def counted(*given, plain=plain, side=side):
            plain(*given)
            seen[side] = calls.total()

        setattr(run, side, counted)
    record = step.compare(run, "tiny", arguments(liger=True))
    assert record["model"] == "tiny-qwen3, Liger" and record["right"]
    assert 0 < seen["use_rows"] < seen["use_trees"] < calls.total()


def test_in_the_interpreter():
    pytest.importorskip("liger_kernel", reason="Liger is not installed (pip install 'cp-engine[liger]')")
    pass_in_the_interpreter("tests/models/interpreted_liger.py")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [("tiny-qwen3", "float32", 1e-4), ("tiny-qwen3.5", "float32", 1e-4), ("tiny-qwen3", "bfloat16", 5e-2)],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_is_the_same_within_rounding(name, dtype, bound, load):
    pytest.importorskip("liger_kernel", reason="Liger is not installed (pip install 'cp-engine[liger]')")
    load(name, torch.float32)
    truth, found = (step_on_gpu(name, dtype, liger=on) for on in (False, True))
    assert found["loss"] == pytest.approx(truth["loss"], rel=bound, abs=bound)
    assert found["entropy"] == pytest.approx(truth["entropy"], rel=bound)
    assert found["grad_norm"] == pytest.approx(truth["grad_norm"], rel=bound)
