"""Shipped configurations really train: small ones as they are, those for real work with a tiny model of their kind."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_engine.config import read_config
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
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
        [f"model.path={TINY[name]}", "model.vocab_size=260", "optimizer.warmup_steps=0", *mesh],
    )
    return Engine(config, ranks).train_step(pairs())


@pytest.mark.parametrize("name", TINY)
def test_configurations_for_real_work_take_a_step(name):
    config = read_config(CONFIGS / f"{name}.yaml")
    assert name.endswith("_lora") == (config.lora is not None) and config.loss.name in name
    if "_cp" in name:
        # The name says it all: rollouts of so many tokens fit a pack, on so many ranks.
        tokens, ranks = name.split("k_cp")[0].rsplit("_", 1)[1], name.split("_cp")[1].split("_")[0]
        assert (config.packing.max_pack_tokens, config.parallel.cp) == (1024 * int(tokens), int(ranks))
    figures = run_ranks(2, rehearse, name)[0]
    assert figures["occurrences"] > 0 and figures["grad_norm"] > 0 and not figures["skipped"]


def test_the_small_ones_train_as_they_are(tmp_path):
    """cpu_grpo is started by the tests of the start scripts, quickstart by those of the command line."""
    done = command("train", "launch/configs/cpu_moe_sft_lora.yaml", f"output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and steps[0]["grad_norm"] > 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    resolved = json.loads((tmp_path / "config.json").read_text())
    assert resolved["parallel"]["dp"] == 2 and resolved["loss"]["aggregation"] == "token-mean"
