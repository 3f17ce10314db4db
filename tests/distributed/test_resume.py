"""The training command with sharded weights: it goes on from a checkpoint on another mesh, and ends with code 0."""

import json

import pytest
import torch

from cp_engine.models.load import load_model
from tests.test_cli import SAMPLE, command

CONFIG = """
model: {{path: tiny-qwen3.5, vocab_size: 260}}
data: {{rollouts: {sample}, groups_per_step: 2, limit_per_group: 3}}
packing: {{max_pack_tokens: 130}}
loss: {{name: grpo}}
optimizer: {{lr: 1.0e-3, schedule: linear, warmup_steps: 1}}
checkpoint: {{every: 2}}
steps: 4
dtype: float64
output_dir: {out}
"""


def train(tmp_path, name: str, *options) -> list[dict]:
    """Metrics of every step after the command."""
    config = tmp_path / f"{name}.yaml"
    config.write_text(CONFIG.format(sample=SAMPLE, out=tmp_path / name))
    done = command("train", config, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]


def test_training_goes_on_with_the_same_rollouts_schedule_and_loss(tmp_path):
    whole = train(tmp_path, "whole")
    assert len({step["tree_tokens"] for step in whole}) > 1
    # A run whose later steps were lost: its checkpoint is that of step 2.
    train(tmp_path, "cut", "--cp", 2, "engine.name=fsdp2", "checkpoint.asynchronous=true")
    checkpoints = tmp_path / "cut" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000004"]
    (checkpoints / "step-00000004").rename(checkpoints / ".step-00000004.partial")
    resumed = train(tmp_path, "cut", "--dp", 2, "engine.name=fsdp2")
    for step, truth in zip(resumed, whole, strict=True):
        for exact in ("step", "lr", "flat_tokens", "occurrences"):
            assert step[exact] == truth[exact]
        assert step["tree_tokens"] >= truth["tree_tokens"]  # packs for two groups replay more
        # float32 casts inside transformers are the same but for the order of sums.
        assert step["loss"] == pytest.approx(truth["loss"], rel=1e-4, abs=1e-7)
        assert step["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-3)
    ours, theirs = (
        dict(load_model(tmp_path / n / "final", torch.float64).named_parameters()) for n in ("cut", "whole")
    )
    assert max(float((ours[name] - theirs[name]).detach().abs().max()) for name in theirs) < 1e-3
