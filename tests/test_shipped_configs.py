"""Shipped configurations really train: small ones as they are, those for real work with a tiny model of their kind."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_engine.config import read_config
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.memory_setup import MemorySetup
from cp_engine.model_sizes import model_sizes
from cp_engine.pack_budget import pack_budget
from cp_engine.rollouts import Rollout, read_rollouts
from tests.ranks import run_ranks
from tests.test_cli import command

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "launch" / "configs"
SAMPLE = ROOT / "launch" / "data" / "sample.jsonl"
TINY = {
    "qwen3_8b_grpo_64k_cp4": "tiny-qwen3",
    "qwen3_5_4b_grpo_128k_cp8": "tiny-qwen3.5",
    "qwen3_5_35b_a3b_dapo_128k_cp8_lora": "tiny-qwen3.5-moe",
    "qwen3_next_80b_sft_256k_cp16_lora": "tiny-qwen3-next",
    "llama3_8b_dpo": "tiny-llama",
}


def pairs() -> list[Rollout]:
    """Two rollouts with different rewards of two groups, with everything that a loss may ask for."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in read_rollouts(SAMPLE):
        chosen = groups.setdefault(rollout.group, [])
        if not chosen or (len(chosen) < 2 and rollout.reward != chosen[0].reward):
            chosen.append(rollout)
    found = [rollout for chosen in groups.values() if len(chosen) == 2 for rollout in chosen][:4]
    assert len(found) == 4
    given = [np.full(rollout.length, -5.5) for rollout in found]
    return [
        replace(rollout, old_logprobs=values, ref_logprobs=values, sampler_logprobs=values)
        for rollout, values in zip(found, given, strict=True)
    ]


def rehearse(name: str) -> dict:
    """A step of a configuration on two ranks, with a tiny model in place of its own."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    parallel = read_config(CONFIGS / f"{name}.yaml").parallel
    mesh = ["parallel.dp=2", "parallel.cp=1"] if parallel.dp > 1 else ["parallel.cp=2"]
    config = read_config(
        CONFIGS / f"{name}.yaml",
        [
            f"model.path={TINY[name]}",
            "model.vocab_size=260",
            "optimizer.warmup_steps=0",
            "packing.max_pack_tokens=4096",  # CPUs have no memory to choose from
            *mesh,
        ],
    )
    return Engine(config, ranks).train_step(pairs())


@pytest.mark.parametrize("name", TINY)
def test_configurations_for_real_work_take_a_step(name):
    config = read_config(CONFIGS / f"{name}.yaml")
    assert name.endswith("_lora") == (config.lora is not None) and config.loss.name in name
    assert config.memory.recompute == "layers"
    # auto makes packs as large as memory allows, which leaves nothing for other data-parallel groups.
    assert (config.packing.max_pack_tokens == "auto") == (config.parallel.dp == 1)
    figures = run_ranks(2, rehearse, name)[0]
    assert figures["occurrences"] > 0 and figures["grad_norm"] > 0 and not figures["skipped"]


RELEASED = {
    "qwen3_8b_grpo_64k_cp4": ("qwen3-8b", {}),
    "qwen3_5_35b_a3b_dapo_128k_cp8_lora": ("qwen3.5-35b-a3b", {"adapter_parameters": 50_000_000, "adapter_width": 256}),
    "qwen3_next_80b_sft_256k_cp16_lora": (
        "qwen3-next-80b-a3b",
        {"adapter_parameters": 50_000_000, "adapter_width": 128},
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_rollouts_of_the_promised_length_are_predicted_to_fit(name):
    """The name says it: so many tokens, on so many GPUs of 80 GiB."""
    config, (model, adapters) = read_config(CONFIGS / f"{name}.yaml"), RELEASED[name]
    tokens, ranks = name.split("k_cp")[0].rsplit("_", 1)[1], name.split("_cp")[1].split("_")[0]
    assert config.parallel.cp == int(ranks)
    setup = MemorySetup(engine=config.engine.name, shards=int(ranks), recompute=config.memory.recompute, **adapters)
    budget = partial(pack_budget, 80 * 2**30, config, model_sizes(model))
    assert budget(setup) > 1024 * int(tokens) > budget(replace(setup, recompute="none"))


def test_every_configuration_is_read():
    found = {path.stem: read_config(path) for path in CONFIGS.glob("*.yaml")}
    assert len(found) >= 10 and set(TINY) <= set(found)


def test_the_small_ones_train_as_they_are(tmp_path):
    """cpu_grpo is started by the tests of the start scripts, quickstart by those of the command line."""
    done = command("train", "launch/configs/cpu_moe_sft_lora.yaml", f"output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and steps[0]["grad_norm"] > 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    resolved = json.loads((tmp_path / "config.json").read_text())
    assert resolved["parallel"]["dp"] == 2 and resolved["loss"]["aggregation"] == "token-mean"
