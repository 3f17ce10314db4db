"""``packing.max_pack_tokens: auto``."""

from dataclasses import replace

import pytest
import torch

from cp_engine.config import parse_config
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.memory import RESERVED, predict_memory, state_bytes
from cp_engine.memory_setup import MemorySetup, Traffic
from cp_engine.model_sizes import model_sizes
from cp_engine.models.load import load_model
from cp_engine.models.lora import add_lora
from cp_engine.pack_budget import fewest_layers, pack_budget, run_sizes

ALONE = Ranks(0, 1, None, torch.device("cpu"))
H200 = 140 * 2**30


def config(**sections):
    return parse_config({"model": {"path": "tiny-qwen3.5", "vocab_size": 64}} | sections)


def test_a_budget_fits_and_follows_memory_ranks_and_recompute():
    model = model_sizes("qwen3-8b")

    def budget(capacity=H200, cp=1, recompute="layers", **parallel):
        setup = MemorySetup(engine="fsdp2", shards=8, recompute=recompute)
        return pack_budget(capacity, config(parallel={"cp": cp, **parallel}), model, setup)

    alone = budget()
    setup = MemorySetup(engine="fsdp2", shards=8, recompute="layers")
    peak = predict_memory(alone, model, setup, Traffic()).peak
    assert 0.8 * (H200 - RESERVED) < peak < H200 - RESERVED
    assert budget(capacity=H200 // 2) < alone and budget(recompute="none") < alone / 3
    assert alone < budget(cp=4) < 4 * alone
    assert budget(cp=4) < budget(cp=4, max_exchange_mib=64) < 4 * alone
    with pytest.raises(ValueError, match="found no room for a pack: weights, .* of 20.0 GiB; shard over more"):
        budget(capacity=20 * 2**30)


def test_a_run_says_what_its_memory_depends_on():
    sections = {"dtype": "bfloat16", "lora": {"r": 4}, "memory": {"recompute": "layers"}, "engine": {"name": "fsdp2"}}
    run, model = config(**sections), load_model("tiny-qwen3.5", torch.bfloat16, 64)
    whole = sum(parameter.numel() for parameter in model.parameters())
    add_lora(model, run.lora, 0)
    adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    sizes, setup = run_sizes(run, model, ALONE)
    assert (sizes.parameters, setup.adapter_parameters, sizes.shape.element_bytes) == (whole, adapters, 2)
    assert (setup.engine, setup.recompute, setup.shards, setup.optimizer_moments) == ("fsdp2", "layers", 1, 2)
    adapted = sum(hasattr(module, "lora_A") for module in model.modules())
    assert setup.adapter_width == 4 * adapted // 4 > 0


def test_a_model_that_only_scores_has_weights_and_no_training_states():
    run, model = config(dtype="bfloat16"), load_model("tiny-qwen3.5", torch.bfloat16, 64)
    trained = run_sizes(run, model, ALONE)
    scoring = run_sizes(run, model.requires_grad_(False), ALONE)
    assert scoring[0] == trained[0] and trained[1].adapter_parameters is None
    assert (scoring[1].adapter_parameters, scoring[1].recompute) == (0, "layers")
    assert state_bytes(*scoring) == (2 * scoring[0].parameters, 0, 0)
    # Of Qwen3-8B an H200 has room for rows beside the weights that it would not have beside what training holds.
    sizes = model_sizes("qwen3-8b")
    assert pack_budget(H200, run, sizes, scoring[1]) > 100_000
    with pytest.raises(ValueError, match="found no room for a pack"):
        pack_budget(H200, run, sizes, trained[1])


def test_as_few_layers_are_recomputed_as_fit():
    model = model_sizes("qwen3-8b")
    setup = MemorySetup(adapter_parameters=40_000_000, adapter_width=112, recompute="layers_keep_mixers")

    def layers(tokens, cp=1, capacity=H200):
        run = config(parallel={"cp": cp}, packing={"max_pack_tokens": tokens})
        return fewest_layers(capacity, run, model, setup)

    assert layers(1024) == 0
    found = [layers(tokens) for tokens in (16_384, 24_576, 32_768, 40_960, 49_152)]
    assert found == sorted(set(found)) and 0 < found[0] and found[-1] < 36
    for tokens, count in zip((16_384, 40_960), (found[0], found[3]), strict=True):
        budgets = [pack_budget(H200, config(), model, replace(setup, recompute_layers=n)) for n in (count - 1, count)]
        assert budgets[0] < tokens <= budgets[1]
    assert layers(40_960, capacity=H200 // 2) > found[3] and 0 < layers(4 * 24_576, cp=4) > found[1]
    with pytest.raises(ValueError, match="packs of 400,000 tokens fit into 140.0 GiB: at most .* tokens are predicted"):
        layers(400_000)


def test_a_run_says_how_many_layers_are_recomputed():
    memory = {"recompute": "layers", "recompute_layers": 3}
    run = parse_config({"model": {"path": "tiny-qwen3.5", "vocab_size": 64}, "memory": memory})
    assert run_sizes(run, load_model("tiny-qwen3.5", torch.bfloat16, 64), ALONE)[1].recompute_layers == 3


def test_cpus_and_other_words_are_refused():
    with pytest.raises(ValueError, match="recompute_layers: auto is chosen from the memory of a GPU, and these ranks"):
        memory = {"recompute": "layers", "recompute_layers": "auto"}
        Engine(config(packing={"max_pack_tokens": 100}, memory=memory), ALONE)
    with pytest.raises(ValueError, match="auto is chosen from the memory of a GPU, and these ranks run on CPUs"):
        Engine(config(packing={"max_pack_tokens": "auto"}), ALONE)
    for value in ("all", 1, -5, [8], 8.5, float("inf"), True):
        with pytest.raises(
            ValueError, match="tokens: expected a whole number of at least 2, auto, or null; got [^;]*$"
        ):
            config(packing={"max_pack_tokens": value})
