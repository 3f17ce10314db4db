"""Ranks of a real training command that were given different rollouts: all of them end at once, none hangs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.ranks import free_port

ROOT = Path(__file__).parent.parent.parent
SAMPLE = ROOT / "launch" / "data" / "sample.jsonl"
CONFIG = """
model: {path: tiny-qwen3, vocab_size: 512}
loss: {name: sft}
parallel: {cp: 2}
steps: 1
"""
# The command itself, and when its first step began.
PROGRAM = """
import sys, time
from cp_engine.cli.main import main
from cp_engine.engine import Engine
step = Engine.train_step
def stamped(engine, *rollouts):
    print(time.time(), flush=True)
    return step(engine, *rollouts)
Engine.train_step = stamped
sys.exit(main(sys.argv[1:]))
"""


def other_rollouts(path: Path) -> Path:
    """The sample with one token of its last rollout changed."""
    lines = SAMPLE.read_text().splitlines()
    last = json.loads(lines[-1])
    last["input_ids"][-1] = (last["input_ids"][-1] + 1) % 256
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    return path


def test_ranks_with_other_rollouts_exit_with_2_within_5_seconds(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    files = [SAMPLE, other_rollouts(tmp_path / "other.jsonl")]
    env = dict(os.environ, PYTHONPATH=str(ROOT), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "train", str(config)]
            + [f"data.rollouts={file}", f"output_dir={tmp_path / 'out'}"],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    began = max(float(rank.stdout.readline()) for rank in ranks)
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    took = time.time() - began
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert took < 5
    assert all("ranks [1] have another step than rank 0" in error for error in errors), errors
    assert not (tmp_path / "out").exists()
