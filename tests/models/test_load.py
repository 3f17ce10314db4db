import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.load import check_save_place, folder_vocabulary, load_model, prepare_for_trees, save_model
from cp_engine.models.presets import PRESETS
from tests.models.folders import save_vision_model

IDS = torch.arange(1, 12)[None]


def perturb(model, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)


def source_tensors(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def add_side_files(folder):
    (folder / "tokenizer.json").write_text("tokens")
    (folder / "chat_template.jinja").write_text("template")
    (folder / "extra").mkdir()
    (folder / "extra" / "note.txt").write_text("note")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": True}))


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    save_vision_model(folder)
    add_side_files(folder)
    return folder


@pytest.mark.parametrize("preset", PRESETS)
def test_a_prepared_model_saves_as_a_plain_folder_that_generates(preset, tmp_path):
    model = load_model(preset, torch.float32, seed=2)
    plain = load_model(preset, torch.float32, seed=2)
    prepare_for_trees(model)
    save_model(model, tmp_path / "out")
    assert "cp_engine" not in (tmp_path / "out" / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == type(plain).__name__ and loaded.dtype == torch.float32
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    make_cpu_runnable(loaded)
    generated = loaded.generate(IDS, max_new_tokens=5, do_sample=False)
    make_cpu_runnable(plain)
    assert torch.equal(generated, plain.generate(IDS, max_new_tokens=5, do_sample=False))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rope_frequencies_stay_float32(vision_folder):
    for model in (load_model("tiny-qwen3.5", torch.float64), load_model(vision_folder, torch.bfloat16)):
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_the_text_part_of_a_vision_folder_goes_back_into_it(vision_folder, tmp_path):
    model = load_model(vision_folder, torch.float32)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    prepare_for_trees(model)
    frozen = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    perturb(model)
    model.model.layers[0].mlp.up_proj.weight.data.copy_(frozen)
    save_model(model, tmp_path / "out", source=vision_folder)

    before, after = source_tensors(vision_folder), source_tensors(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert before.keys() == after.keys()
    trained = {name.replace("model.", "model.language_model.", 1): t for name, t in model.state_dict().items()}
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        if name in trained and "layers.0.mlp.up_proj" not in name:
            assert torch.equal(tensor, trained[name].to(tensor.dtype)) and not torch.equal(tensor, before[name]), name
        else:
            assert torch.equal(tensor, before[name]), name
    assert any("visual" in name for name in after) and sum(name in trained for name in after) == len(trained)

    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "extra/note.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (vision_folder / name).read_bytes(), name
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()

    whole, info = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    text = load_model(tmp_path / "out", torch.bfloat16)
    assert torch.equal(text.model.norm.weight, whole.model.language_model.norm.weight)
    make_cpu_runnable(text)
    assert text.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 14)


MOE = ("tiny-qwen3-moe", "tiny-qwen3.5-moe", "tiny-qwen3-next")


@pytest.mark.parametrize("stacked", [False, True], ids=["one tensor an expert", "stacked experts"])
@pytest.mark.parametrize("preset", MOE)
def test_one_trained_expert_goes_back_into_a_folder_however_it_stores_experts(preset, stacked, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    first = load_model(preset, torch.bfloat16, vocab_size=32)
    save_model(first, source)
    if stacked:
        save_file(first.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
    model = load_model(source, torch.float32)
    prepare_for_trees(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[3] += 1
        model.model.layers[2].mlp.gate.weight += 1
    save_model(model, out, source=source)
    before, after = source_tensors(source), source_tensors(out)
    assert before.keys() == after.keys()
    changed = {name.split("layers.")[1] for name in after if not torch.equal(before[name], after[name])}
    trained = ["gate_up_proj"] if stacked else ["3.gate_proj.weight", "3.up_proj.weight"]
    assert changed == {*("0.mlp.experts." + name for name in trained), "2.mlp.gate.weight"}
    loaded = load_model(out, torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor.to(first.state_dict()[name].dtype).float()), name


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe"])
def test_tied_embeddings_stay_tied_through_a_folder(preset, tmp_path):
    config = PRESETS[preset](32)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source", torch.float32)
    prepare_for_trees(model)
    perturb(model)
    save_model(model, tmp_path / "new")
    save_model(model, tmp_path / "back", source=tmp_path / "source")
    for folder in ("new", "back"):
        loaded = load_model(tmp_path / folder, torch.float32)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        assert "lm_head.weight" not in source_tensors(tmp_path / folder)


def test_tensors_that_did_not_change_keep_their_bits_through_a_narrower_dtype(tmp_path):
    save_model(load_model("tiny-qwen3", torch.float32), tmp_path / "source")
    model = load_model(tmp_path / "source", torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight += 1
    save_model(model, tmp_path / "out", source=tmp_path / "source")
    before, after = source_tensors(tmp_path / "source"), source_tensors(tmp_path / "out")
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["lm_head.weight"]


def test_tied_heads_are_no_lacking_tensors(tmp_path):
    config = PRESETS["tiny-qwen3"](64)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source", torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    perturb(model)
    save_model(model, tmp_path / "out", source=tmp_path / "source")
    assert torch.equal(load_model(tmp_path / "out", torch.float32).lm_head.weight, model.lm_head.weight)


def test_saving_over_a_model_replaces_it_and_a_failure_leaves_it(tmp_path, monkeypatch):
    out = tmp_path / "out"
    model = load_model("tiny-qwen3", torch.float32, vocab_size=32)
    save_model(model, out)
    perturb(model)
    save_model(model, out, source=out)  # into the folder it came from
    assert torch.equal(load_model(out, torch.float32).lm_head.weight, model.lm_head.weight)

    def full_disk(folder, state_dict):
        (folder / "config.json").write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(model, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_model(model, out)
    assert torch.equal(load_model(out, torch.float32).lm_head.weight, model.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_saving_refuses_folders_that_are_no_models(tmp_path):
    (tmp_path / "keep.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not a model folder; choose another place"):
        save_model(load_model("tiny-qwen3", torch.float32, vocab_size=32), tmp_path)
    assert (tmp_path / "keep.txt").read_text() == "precious"
    with pytest.raises(ValueError, match="cannot save to .*: '.*keep.txt' is a file, not a folder"):
        check_save_place(tmp_path / "keep.txt" / "run" / "final")
    check_save_place(tmp_path / "not" / "there" / "yet")


def test_saving_refuses_a_source_of_another_model(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(load_model("tiny-qwen3", torch.float32, vocab_size=32), source)
    with pytest.raises(ValueError, match="is not this model's source: it lacks model.layers.0.linear_attn"):
        save_model(load_model("tiny-qwen3.5", torch.float32, vocab_size=32), out, source=source)
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \[33, 64\], but \[32, 64\] in the source"):
        save_model(load_model("tiny-qwen3", torch.float32, vocab_size=33), out, source=source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no safetensors weights"):
        save_model(load_model("tiny-qwen3", torch.float32, vocab_size=32), out, source=source)
    assert not out.exists()


def test_loading_errors_say_what_was_expected(tmp_path):
    with pytest.raises(ValueError, match=r"'qwen' is neither a preset \(tiny-llama, .*tiny-qwen3-next\) nor a local"):
        load_model("qwen", torch.float32)
    save_model(load_model("tiny-qwen3", torch.float32, vocab_size=32), tmp_path / "whole")
    run = tmp_path / "run"
    save_model(load_model("tiny-qwen3", torch.float32, 8), run / "final")
    (run / "config.json").write_text('{"steps": 3}')
    with pytest.raises(ValueError, match="is the output_dir of a run, whose weights are in '.*/run/final'"):
        load_model(run, torch.float32)
    assert folder_vocabulary(run) is None and folder_vocabulary(run / "final") == 8
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="it holds adapters alone, which a run has merged in the folder `final`"):
        load_model(tmp_path / "adapter", torch.float32)
    with pytest.raises(ValueError, match="nothing is downloaded: fetch the model first"):
        load_model("Qwen/Qwen3-8B", torch.float32)
    with pytest.raises(ValueError, match="a vocabulary of 7 was asked for, but the folder .* has its own"):
        load_model(tmp_path / "whole", torch.float32, vocab_size=7)
    file = tmp_path / "whole" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys() if name != "model.norm.weight"}
        metadata = opened.metadata()
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ValueError, match="lacks the weights model.norm.weight"):
        load_model(tmp_path / "whole", torch.float32)
    file.unlink()
    with pytest.raises(ValueError, match="cannot load the folder '.*whole': .*no file named model.safetensors"):
        load_model(tmp_path / "whole", torch.float32)
    (tmp_path / "whole" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot load the folder '.*whole': .*is not a valid JSON file"):
        load_model(tmp_path / "whole", torch.float32)


def test_an_unsupported_model_is_refused_before_it_is_changed():
    model = load_model("tiny-qwen3", torch.float32)
    model.config.attention_dropout = 0.5
    with pytest.raises(ValueError, match="attention_dropout is 0.5"):
        prepare_for_trees(model)
    assert model.config._attn_implementation != "cp_engine"
