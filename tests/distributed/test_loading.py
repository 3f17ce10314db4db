"""Weights that the first rank reads and the others are sent: the same bits everywhere, and whole on no other rank."""

import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from cp_engine.distributed import choose, first_rank, fsdp2
from cp_engine.distributed.first_rank import load_configured, load_on_first_rank
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.models.blueprint import blueprint_of
from cp_engine.models.load import load_model, save_model
from cp_engine.models.lora import add_lora
from cp_engine.models.presets import PRESETS
from tests.distributed.engine_cases import sample, this_rank, tiny_config
from tests.models.folders import save_vision_model
from tests.ranks import free_port, run_ranks
from tests.storages import HostBytes

VOCAB = 36


def run_config(path, dtype: str, world: int, **sections):
    model = {"path": str(path), "seed": 3, "vocab_size": VOCAB if str(path) in PRESETS else None}
    engine = {"name": "fsdp2"} | sections.pop("engine", {})
    return tiny_config({"model": model, "dtype": dtype, "parallel": {"cp": world}, "engine": engine} | sections)


def engine_of_first_rank(config, ranks: Ranks | None = None, only_scores: bool = False) -> Engine:
    """An engine whose other ranks cannot read a model."""
    ranks = ranks or this_rank()
    with pytest.MonkeyPatch.context() as patch:
        if not ranks.is_first:
            patch.delattr(first_rank, "load_model")
        return Engine(config, ranks, only_scores=only_scores)


def whole_model(config) -> torch.nn.Module:
    """The model as this rank reads it for itself."""
    model = load_model(config.model.path, getattr(torch, config.dtype), config.model.vocab_size, config.model.seed)
    if config.lora is not None:
        add_lora(model, config.lora, config.seed)
    return model


def differing(engine: Engine) -> list[str]:
    """Parameters and buffers that are not, bit by bit, what this rank reads for itself, or float32 masters of it."""
    truth, ours = whole_model(engine.config), engine.model.causal_lm
    expected = dict(truth.named_parameters()) | dict(truth.named_buffers())
    found = dict(ours.named_parameters()) | dict(ours.named_buffers())
    assert found.keys() == expected.keys() and any(name.endswith("inv_freq") for name in found)
    return [name for name, tensor in found.items() if not same_bits(tensor, expected[name])]


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.requires_grad and expected.dtype == torch.bfloat16:
        expected = expected.float()
    if isinstance(found, DTensor):  # its shards may lie in host memory
        found = found.to(found.device_mesh.device_type).full_tensor()
    found = found.detach().cpu().contiguous()
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(found.view(torch.uint8), expected.detach().contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Experts that the library stacks when it reads them, a head that is the embedding, and a vision tower."""
    place = tmp_path_factory.mktemp("models")
    save_model(load_model("tiny-qwen3-moe", torch.bfloat16, VOCAB), place / "moe")
    tied = PRESETS["tiny-qwen3"](VOCAB)
    tied.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(tied).save_pretrained(place / "tied")
    save_vision_model(place / "vision")
    return place


def of_cases(folders, ranks: Ranks | None = None) -> dict[str, list[str]]:
    """By case, what differs on this rank."""
    ranks = ranks or this_rank()
    halves = replace(ranks, per_node=ranks.world // 2)
    cases = {
        "dense": (run_config("tiny-qwen3", "float64", ranks.world), ranks),
        "hybrid": (run_config("tiny-qwen3.5", "bfloat16", ranks.world), ranks),
        "shards of a machine": (run_config("tiny-qwen3.5", "bfloat16", ranks.world, engine={"shard": "node"}), halves),
        "in host memory": (run_config("tiny-qwen3-next", "bfloat16", ranks.world, engine={"offload": "cpu"}), ranks),
        "experts": (run_config(folders / "moe", "bfloat16", ranks.world), ranks),
        "tied": (run_config(folders / "tied", "float32", ranks.world), ranks),
        "vision": (run_config(folders / "vision", "bfloat16", ranks.world), ranks),
        "scores": (run_config("tiny-qwen3.5-moe", "bfloat16", ranks.world), ranks),
    }
    found = {}
    for name, (config, of_case) in cases.items():
        engine = engine_of_first_rank(config, of_case, only_scores=name == "scores")
        found[name] = differing(engine)
        causal_lm = engine.model.causal_lm
        tied = causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight
        assert tied == (name == "tied")
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_has_the_bits_that_it_would_have_read(world, folders):
    for found in run_ranks(world, of_cases, folders):
        assert found == dict.fromkeys(found, []) and len(found) == 8


def of_adapters(folders) -> list[str]:
    sections = {"lora": {"r": 3, "targets": "all-linear"}}
    paths = ("tiny-qwen3.5", folders / "moe")
    return [differing(engine_of_first_rank(run_config(p, "bfloat16", this_rank().world, **sections))) for p in paths]


def test_adapters_begin_with_the_same_bits(folders):
    assert run_ranks(2, of_adapters, folders) == [[[], []]] * 2


def first_losses(path) -> list[list[float]]:
    """Losses of two steps, with weights sent and with weights that every rank read."""
    config = run_config(path, "float64", this_rank().world)
    engines = engine_of_first_rank(config), Engine(config, this_rank(), causal_lm=whole_model(config))
    return [[engine.train_step(sample())["loss"] for _ in range(2)] for engine in engines]


def test_steps_are_those_of_weights_that_every_rank_read(folders):
    for sent, read in run_ranks(2, first_losses, "tiny-qwen3.5-moe"):
        assert sent == read


def forgotten() -> str:
    """The message on this rank when no unit's parameters are received."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2, "_receive_unit", lambda unit, ignored, ranks: None)
        try:
            engine_of_first_rank(run_config("tiny-qwen3", "float32", this_rank().world))
        except AssertionError as error:
            return str(error)
    return "no error"


def not_sent() -> list[str]:
    """What differs where parameters and buffers that other ranks make room for, here with NaN, are not sent."""
    make_room = first_rank._empty

    def poisoned(tensor, device):
        return make_room(tensor, device).detach().fill_(float("nan")).requires_grad_(tensor.requires_grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_rank, "_empty", poisoned)
        patch.setattr(first_rank.dist, "broadcast", lambda *args, **kwargs: None)
        engine = engine_of_first_rank(run_config("tiny-qwen3.5", "bfloat16", this_rank().world))
    return differing(engine)


def test_planted_faults_are_seen():
    first, other = run_ranks(2, forgotten)
    assert first == "no error" and other.startswith("without values: ['causal_lm.model.embed_tokens.weight', ")
    for wrong in run_ranks(2, not_sent):
        assert "model.embed_tokens.weight" in wrong and "model.layers.0.mlp.up_proj.weight" in wrong
    assert {"model.rotary_emb.inv_freq", "model.layers.0.linear_attn.A_log"} <= set(wrong)  # of the last rank


def refusals(path) -> list[str]:
    """What this rank is told of a model that cannot be read, does not follow from its config, or is another one."""
    ranks, told = this_rank(), []

    def refused(config, **options):
        with pytest.raises(ValueError) as error:
            Engine(config, ranks, **options)
        told.append(str(error.value))

    refused(run_config(path, "float32", ranks.world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_rank, "load_model", with_attribute)
        refused(run_config("tiny-qwen3", "float32", ranks.world))
    other = load_model("tiny-qwen3", torch.float32, VOCAB + ranks.rank)
    refused(run_config("tiny-qwen3", "float32", ranks.world), causal_lm=other)
    empty = blueprint_of(load_model("tiny-qwen3", torch.float32, VOCAB)).build()
    refused(run_config("tiny-qwen3", "float32", ranks.world), causal_lm=empty)
    refused(run_config("tiny-qwen3", "float32", ranks.world), causal_lm=other if ranks.is_first else None)
    refused(run_config("tiny-qwen3", "float32", ranks.world), only_scores=ranks.is_first)
    return told


def with_attribute(*args) -> torch.nn.Module:
    """A model with a parameter that its config does not tell of."""
    model = load_model(*args)
    model.model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    return model


def test_all_ranks_are_told_what_the_first_one_found(tmp_path):
    save_model(load_model("tiny-qwen3", torch.float32, VOCAB), tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    first, other = run_ranks(2, refusals, tmp_path / "cut")
    assert first == other
    assert first[0].startswith("cannot load the folder ")
    assert first[1].startswith("model.scale of Qwen3ForCausalLM do not follow from its config, so the weights cannot")
    assert first[2].startswith("ranks [1] have another model than rank 0")
    assert first[3].startswith("causal_lm.model.embed_tokens.weight, causal_lm.model.layers.0.")
    assert " of the first rank's model are on the meta device" in first[3]
    for message in first[4:]:
        assert message.startswith("ranks [1] have another causal_lm (given or None) or only_scores than rank 0")


def damaged(path) -> tuple[str, str]:
    """Type and message of what this rank raises."""
    with pytest.raises(Exception) as error:
        engine_of_first_rank(run_config(path, "float32", this_rank().world))
    return type(error.value).__name__, str(error.value)


def test_no_rank_waits_for_a_model_whose_file_is_cut_short(tmp_path):
    save_model(load_model("tiny-qwen3", torch.float32, VOCAB), tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    first, other = run_ranks(2, damaged, tmp_path / "cut")
    assert first[0] == "SafetensorError"
    assert other == ("RuntimeError", f"the first rank could not load the model: SafetensorError: {first[1]}")


def of_transposed_weights() -> list[str]:
    """What differs where matrices lie by columns in the first rank's memory."""
    ranks = this_rank()
    config = run_config("tiny-qwen3", "float32", ranks.world)
    model = whole_model(config)
    for parameter in model.parameters():
        if ranks.is_first and parameter.ndim == 2:
            parameter.data = parameter.data.T.contiguous().T
    return differing(Engine(config, ranks, causal_lm=model))


def test_weights_arrive_whichever_way_they_lie_in_memory():
    assert run_ranks(2, of_transposed_weights) == [[], []]


def test_a_tensor_that_is_no_parameter_is_refused(monkeypatch):
    model = load_model("tiny-qwen3", torch.float32, VOCAB)
    build = type(model)._from_config

    def with_tensor(config):
        built = build(config)
        built.model.table = torch.arange(3)
        return built

    monkeypatch.setattr(type(model), "_from_config", with_tensor)
    with pytest.raises(ValueError, match="^model.table of Qwen3ForCausalLM do not follow"):
        blueprint_of(model)


def loading_bytes(path, everywhere: bool, ranks: Ranks | None = None) -> tuple[int, int, int, int]:
    """Of making a bfloat16 engine: most bytes held in host memory, and in float32 this rank's shards, the largest unit
    and the whole model.

    Args:
        everywhere: every rank reads the model, as a fault.
    """
    ranks, held = ranks or this_rank(), HostBytes()

    def counted(config, ranks):
        model = load_configured(config, ranks.device) if everywhere else load_on_first_rank(config, ranks)
        held.add(model.parameters())
        return model

    with pytest.MonkeyPatch.context() as patch, held:
        patch.setattr(choose, "load_on_first_rank", counted)
        engine = Engine(run_config(path, "bfloat16", ranks.world), ranks)
    units: dict[str, int] = {}
    for name, parameter in engine.model.causal_lm.named_parameters():
        unit = ".".join(name.split(".")[:3]) if ".layers." in name else "root"
        units[unit] = units.get(unit, 0) + 4 * parameter.numel()
    shards = sum(4 * parameter.to_local().numel() for parameter in engine.model.parameters())
    return held.most, shards, max(units.values()), sum(units.values())


def save_deep_model(folder) -> None:
    """A model whose decoder layers are small beside it."""
    config = PRESETS["tiny-qwen3"](VOCAB)
    deep = type(config)(**config.to_diff_dict() | {"num_hidden_layers": 16, "layer_types": None})
    AutoModelForCausalLM.from_config(deep, dtype=torch.bfloat16).save_pretrained(folder)


def test_other_ranks_hold_their_shards_and_one_unit(tmp_path):
    save_deep_model(tmp_path)
    first, *others = run_ranks(4, loading_bytes, tmp_path, False)
    for most, shards, unit, whole in others:
        assert shards + 0.9 * unit < most < shards + 1.1 * unit < 0.33 * whole
    # The model is there once, in bfloat16, and gives way to shards.
    assert 0.5 * first[3] < first[0] < 0.5 * first[3] + first[1] + 1.1 * first[2]
    for most, _, _, whole in run_ranks(4, loading_bytes, tmp_path, True)[1:]:
        assert most > 0.5 * whole


def gpu_rank(rank: int, port: int, folders, out) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, dist.group.WORLD, device)
    found = of_cases(folders, ranks), loading_bytes(out, False, ranks)
    (out / str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_same_bits_and_nothing_passes_through_the_second_ones_host_memory(folders, tmp_path):
    save_deep_model(tmp_path)
    torch.multiprocessing.spawn(gpu_rank, (free_port(), folders, tmp_path), nprocs=2)
    (first, _), (second, (most, _, _, whole)) = (pickle.loads((tmp_path / n).read_bytes()) for n in "01")
    assert first == second == dict.fromkeys(first, [])
    assert most < 0.05 * whole
