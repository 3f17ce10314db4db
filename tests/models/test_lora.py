"""Low-rank adapters: gradients of flat rows, targets that are refused, merging and saving."""

import pytest
import torch

import cp_engine.engine
import cp_engine.verify.run
from cp_engine.config import LoraSection
from cp_engine.engine import Engine
from cp_engine.models.load import load_model
from cp_engine.models.lora import add_lora, lora_layers, lora_targets
from cp_engine.models.precision import keep_float64
from tests.distributed.engine_cases import flat_oracle, gradients, sample, this_rank, tiny_config
from tests.distributed.test_engines import judged
from tests.ranks import run_ranks

pytest.importorskip("peft", reason="peft is not installed (pip install 'cp-engine[lora]')")

LORA = {"lora": {"r": 3, "alpha": 5.0}}
ALL = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
ALL += ("gate_proj", "up_proj", "down_proj")


def filled_lora(causal_lm, lora: LoraSection, seed: int) -> None:
    """Adapters whose B is not zero, so that A has gradients and a lost adapter shows."""
    add_lora(causal_lm, lora, seed)
    numbers = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, layer in lora_layers(causal_lm):
            weight = layer.lora_B["default"].weight
            weight.copy_(0.1 * torch.randn(weight.shape, generator=numbers, dtype=torch.float64))


def lora_model(*args, **kwargs):
    model = load_model(*args, **kwargs)
    filled_lora(model, LoraSection(**LORA["lora"]), 0)
    return model


def lora_gradients(*args):
    cp_engine.engine.add_lora = filled_lora
    try:
        return gradients(*args)
    finally:
        cp_engine.engine.add_lora = add_lora


@pytest.fixture(scope="module")
def flat():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cp_engine.verify.run, "load_model", lora_model)
        return flat_oracle()


@pytest.mark.parametrize(
    ("name", "dp", "cp"), [("plain", 1, 1), ("plain", 1, 2), ("fsdp2", 1, 2), ("fsdp2", 2, 1)], ids=str
)
def test_adapters_get_the_gradients_of_flat_rows(flat, name, dp, cp):
    sections = LORA | {"parallel": {"dp": dp, "cp": cp}, "engine": {"name": name}}
    results = run_ranks(dp * cp, lora_gradients, flat, {}, sections)
    judged(results, flat)
    names = {parameter.rsplit(".", 4)[1] for parameter in results[0][2]}
    assert names == set(ALL)
    assert all(gradient.abs().max() > 0 for gradient in results[0][2].values())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("conv1d", "'conv1d' is a Conv1d, not a linear module; the layers read its weight"),
        ("A_log", "'A_log' is a parameter, not a linear module"),
        ("embed_tokens", "'embed_tokens' is a Embedding, not a linear module"),
        ("qproj", "the model has no module 'qproj'; its linear modules are down_proj, gate_proj"),
    ],
)
def test_targets_that_could_not_work_are_refused(target, message):
    with pytest.raises(ValueError, match=message):
        lora_targets(load_model("tiny-qwen3.5", torch.float32, 36), ("q_proj", target))


def test_a_tied_head_is_refused_and_a_free_one_taken():
    model = load_model("tiny-qwen3", torch.float32, 36)
    assert lora_targets(model, ("lm_head", "up_proj"))[0] == "lm_head"
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="'lm_head' is tied to the embedding"):
        lora_targets(model, ("lm_head",))


def trained_and_saved(sections: dict, out):
    """A step, then both exports; the log-probs of the trained model."""
    with keep_float64():
        engine = Engine(tiny_config(sections), this_rank())
        frozen = {name: p.detach().clone() for name, p in engine.model.named_parameters() if not p.requires_grad}
        engine.train_step(sample())
        engine.save(out / "merged")
        engine.save(out / "adapter", adapter=True)
        if sections["engine"]["name"] == "plain":
            now = dict(engine.model.named_parameters())
            assert all(torch.equal(now[name], value) for name, value in frozen.items())
        return [name for name, _ in engine.named_full_weights(adapter=True)], engine.logprobs(sample())


@pytest.mark.parametrize("name", ["plain", "fsdp2"])
def test_exports_are_the_trained_model(name, tmp_path):
    from peft import PeftModel

    sections = LORA | {"parallel": {"dp": 2}, "engine": {"name": name}, "optimizer": {"lr": 0.05}}
    names, logprobs = run_ranks(2, trained_and_saved, sections, tmp_path)[0]
    assert len(names) == 2 * len(lora_targets(load_model("tiny-qwen3.5", torch.float32, 36), "all-linear"))
    # peft's own merge of the adapter is the merged folder.
    base = PeftModel.from_pretrained(load_model("tiny-qwen3.5", torch.float64, 36), tmp_path / "adapter")
    theirs = dict(base.merge_and_unload().named_parameters())
    ours = dict(load_model(tmp_path / "merged", torch.float64).named_parameters())
    assert ours.keys() == theirs.keys()
    original = dict(load_model("tiny-qwen3.5", torch.float64, 36).named_parameters())
    moved = [name for name in ours if not torch.equal(ours[name], original[name])]
    assert len(moved) == len(names) // 2
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)
    with keep_float64():
        engine = Engine(tiny_config({"model": {"path": str(tmp_path / "merged")}}), this_rank())
        for found, expected in zip(engine.logprobs(sample()), logprobs, strict=True):
            torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), equal_nan=True)


def test_saving_an_adapter_needs_one(tmp_path):
    engine = Engine(tiny_config({}), this_rank())
    with pytest.raises(ValueError, match="there is no adapter to save: the configuration has no lora section"):
        engine.save(tmp_path / "a", adapter=True)


def test_the_sum_inside_the_product_is_that_of_peft():
    """Outputs and gradients of every adapted layer, also where its input needs none and where it is a view."""
    model = lora_model("tiny-qwen3.5", seed=0, dtype=torch.float64)
    seen = 0
    for _, layer in lora_layers(model):
        x = torch.randn(2, 5, layer.in_features, dtype=torch.float64)
        weights = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        plain_b = torch.nn.Linear.forward
        for needs_grad in (True, False):
            x.requires_grad_(needs_grad)
            wanted = (*weights, x) if needs_grad else weights
            ours = layer(x)
            dout = torch.randn_like(ours)
            mine = torch.autograd.grad(ours, wanted, dout)
            low = plain_b(layer.lora_A["default"], x)
            true = plain_b(layer.base_layer, x) + plain_b(layer.lora_B["default"], low) * layer.scaling["default"]
            theirs = torch.autograd.grad(true, wanted, dout)
            for one, other in zip((ours, *mine), (true, *theirs), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        seen += 1
    assert seen >= len(ALL)
