"""The training command with sharded weights: it goes on from a checkpoint on another mesh, and ends with code 0."""

import argparse
import json

import pytest
import torch

from cp_engine.cli import train as train_command
from cp_engine.cli.main import guarded
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


def train_here(tmp_path, *overrides) -> int:
    """Exit code of the command on one rank, in this process."""
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(sample=SAMPLE, out=tmp_path / "run"))
    overrides = ["optimizer.schedule=constant", "optimizer.warmup_steps=0", "checkpoint.every=1", *overrides]
    args = argparse.Namespace(config=str(config), overrides=overrides, cp=None, dp=None, json=False)
    return guarded(train_command.run, args)


def test_a_run_does_not_go_on_with_what_would_train_something_else(tmp_path, capfd):
    assert train_here(tmp_path, "steps=2") == 0
    metrics, weights = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "final" / "model.safetensors"
    before, written = metrics.read_bytes(), weights.stat().st_mtime_ns
    capfd.readouterr()

    assert train_here(tmp_path, "steps=3", "loss.name=sft", "data.groups_per_step=1") == 2
    told = capfd.readouterr().err
    assert "is of another run: loss.name was 'grpo' and is 'sft'; data.groups_per_step was 2 and is 1; choose" in told
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[1:]))
    assert train_here(tmp_path, "steps=3", f"data.rollouts={fewer}") == 2
    assert "data.rollouts was '18 rollouts with digest " in capfd.readouterr().err
    assert train_here(tmp_path, "steps=1") == 2
    assert "steps is 1, but the newest checkpoint" in (told := capfd.readouterr().err) and "is of step 2" in told
    assert (metrics.read_bytes(), weights.stat().st_mtime_ns) == (before, written)

    # An unchanged run whose last weights may have been lost, and a longer one; the file may have another name.
    assert train_here(tmp_path, "steps=2") == 0
    assert "all 2 steps are done: only the weights are written again" in capfd.readouterr().err
    moved = tmp_path / "moved.jsonl"
    moved.write_text(SAMPLE.read_text())
    assert train_here(tmp_path, "steps=3", f"data.rollouts={moved}") == 0
    assert "going on after step 2 of 3" in (told := capfd.readouterr().err) and "other settings" not in told
    assert metrics.read_bytes().startswith(before) and len(metrics.read_text().splitlines()) == 3


def test_places_that_a_run_would_spoil_are_refused_before_it_trains(tmp_path, capfd):
    out = tmp_path / "run"
    (out / "adapter").mkdir(parents=True)
    (out / "adapter" / "note.txt").write_text("mine")
    assert train_here(tmp_path, "lora.r=2") == 2
    assert "run/adapter' exists and is not a model folder; choose another place" in capfd.readouterr().err
    (out / "config.json").write_text('{"model_type": "qwen3"}')
    assert train_here(tmp_path) == 2
    assert "output_dir '" in (told := capfd.readouterr().err) and "run' is a model folder, and the run's" in told
    assert sorted(path.name for path in out.iterdir()) == ["adapter", "config.json"]


def test_another_learning_rate_is_told(tmp_path, caplog):
    assert train_here(tmp_path, "steps=1") == 0
    assert train_here(tmp_path, "steps=2", "optimizer.lr=1e-4") == 0
    (told,) = (record.getMessage() for record in caplog.records if record.name == "cp_engine.checkpoint")
    assert told.endswith("with other settings: optimizer.lr was 0.001 and is 0.0001")
