"""The commands as a user starts them: exit codes, the last line of stdout, and what they leave behind."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cp_engine.cli import logprobs
from cp_engine.cli.main import guarded, main
from cp_engine.models.load import load_model, save_model

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "launch" / "data" / "sample.jsonl"
VERIFY_KEYS = (
    "ok edges occurrences tree_tokens flat_tokens max_logprob_err loss_err max_grad_err worst_tensor state_half_life "
    "cp exchange dtype clipped_high clipped_low"
).split()


def command(*arguments, **environment) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    whole = [sys.executable, "-m", "cp_engine", *map(str, arguments)]
    return subprocess.run(whole, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)


def verify(*arguments) -> subprocess.CompletedProcess:
    return command("verify", "--rollouts", SAMPLE, "--limit", 6, *arguments)


def test_verify_on_two_local_ranks_ends_with_its_verdict():
    done = verify("--model", "tiny-qwen3.5", "--cp", 2, "--exchange", "ring", "--loss", "grpo", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(VERIFY_KEYS) <= set(result)
    assert result["ok"] and result["cp"] == 2 and result["exchange"] == "ring"


def test_verify_exits_with_1_when_it_is_not_ok():
    done = verify("--model", "tiny-qwen3", "--dtype", "float32", "--bound", 1e-30, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is False


def test_wrong_input_ends_every_rank_with_2_and_one_line(tmp_path):
    save_model(load_model("tiny-qwen3", torch.float32, vocab_size=100), tmp_path / "small")
    done = verify("--model", tmp_path / "small", "--cp", 2)
    assert done.returncode == 2, done.stderr
    assert "sample.jsonl, line 1: field input_ids: expected ids of the vocabulary, in [0, 100)" in done.stderr
    assert "Traceback" not in done.stderr
    # A launcher that started another number of ranks than asked for.
    done = command("verify", "--rollouts", SAMPLE, "--model", "tiny-qwen3", "--cp", 2, RANK="0", WORLD_SIZE="1")
    assert done.returncode == 2 and done.stderr.endswith("error: --cp is 2 but 1 rank processes run\n")


def test_train_on_two_local_ranks_writes_metrics_and_a_model(tmp_path):
    run = ("train", "launch/configs/quickstart.yaml", f"output_dir={tmp_path}/run", "data.groups_per_step=2")
    done = command(*run, "--cp", 2, "steps=2", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert json.loads(done.stdout.splitlines()[-1]) == lines[-1]
    assert "training" in done.stderr and "step 2: loss" in done.stderr
    trained, before = load_model(tmp_path / "run" / "final", torch.float32), load_model("tiny-qwen3.5", torch.float32)
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)

    # What cannot be saved at the end is refused at the start, and leaves the earlier run alone.
    (tmp_path / "run" / "final" / "config.json").unlink()
    done = command(*run, "--cp", 1, "steps=1")
    assert done.returncode == 2 and "exists and is not a model folder" in done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_setting_given_as_an_option_is_told_its_form(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "run.yaml", "--lr", "3e-4"])
    assert "--lr 3e-4; settings have the form key.sub=value, such as optimizer.lr=3e-4" in capsys.readouterr().err


def test_torchrun_decides_how_many_ranks_there_are_but_does_not_contradict():
    done = command("train", "launch/configs/quickstart.yaml", "parallel.cp=2", RANK="0", WORLD_SIZE="1")
    assert done.returncode == 2 and "parallel.cp is 2 but 1 rank processes run" in done.stderr


def test_logprobs_takes_packs_by_memory(capfd):
    parser = argparse.ArgumentParser()
    logprobs.add_arguments(parser)
    run = ["--rollouts", str(SAMPLE), "--model", "tiny-qwen3", "--out", "o.jsonl", "--max-pack-tokens"]
    assert [parser.parse_args([*run, budget]).max_pack_tokens for budget in ("auto", "120")] == ["auto", 120]
    assert guarded(logprobs.run, parser.parse_args([*run, "auto"])) == 2
    assert (
        "auto is chosen from the memory of a GPU, and these ranks run on CPUs: give a number" in capfd.readouterr().err
    )
    with pytest.raises(SystemExit):
        parser.parse_args([*run, "all"])
    assert "expected a whole number of at least 2, or auto; got 'all'" in capfd.readouterr().err


def test_an_interrupted_command_ends_with_130_and_one_word(capfd):
    def interrupted(_):
        raise KeyboardInterrupt

    assert guarded(interrupted, None) == 130
    assert capfd.readouterr().err == "interrupted\n"
