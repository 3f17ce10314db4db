"""The start scripts as they are: torchrun on one machine, on two that meet, and what Slurm is asked to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "launch/configs/cpu_grpo.yaml"
OURS = ("NODES", "MAIN_HOST", "PORT", "RUN_ID", "LOCAL_ADDR", "RANKS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CONFIG")


def environment(**variables) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in OURS and not name.startswith("SLURM_")}
    base = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return env | base | {name: str(value) for name, value in variables.items()}


def script(name: str, *arguments, **variables) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", f"launch/{name}", *map(str, arguments)],
        cwd=ROOT, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def cp_of(out: Path) -> int:
    return json.loads((out / "config.json").read_text())["parallel"]["cp"]


def test_one_machine_trains_on_two_cpu_ranks(tmp_path):
    code, errors = ended(script("one_machine.sh", CONFIG, f"output_dir={tmp_path}", "steps=1", RANKS=2))
    assert code == 0, errors
    assert "one_machine: 2 ranks, gloo" in errors
    assert steps(tmp_path) == [1] and cp_of(tmp_path) == 2


def test_two_machines_meet_and_train_together(tmp_path):
    """Both are this host, so its name need not resolve."""
    meeting = {"NODES": 2, "MAIN_HOST": "127.0.0.1", "PORT": free_port(), "LOCAL_ADDR": "127.0.0.1", "RANKS": 1}
    arguments = (CONFIG, f"output_dir={tmp_path}", "steps=1")
    both = [script("many_machines.sh", *arguments, RUN_ID="two", **meeting) for _ in range(2)]
    for code, errors in map(ended, both):
        assert code == 0, errors
        assert "1 ranks here on one of 2 machines, gloo" in errors
    assert steps(tmp_path) == [1] and cp_of(tmp_path) == 2


@pytest.mark.parametrize(
    ("name", "arguments", "variables", "message"),
    [
        ("one_machine.sh", (), {}, "usage: bash launch/one_machine.sh CONFIG.yaml"),
        ("one_machine.sh", (CONFIG,), {"RANKS": "two"}, "RANKS must be a whole number of at least 1, got 'two'"),
        ("one_machine.sh", (CONFIG,), {"PYTHON": "/bin/false"}, "/bin/false cannot import torch"),
        ("many_machines.sh", (CONFIG,), {}, "many_machines: set NODES MAIN_HOST, for example: NODES=2"),
        ("many_machines.sh", (CONFIG,), {"NODES": 2}, "many_machines: set MAIN_HOST, for example"),
        ("many_machines.sh", (CONFIG,), {"NODES": "a", "MAIN_HOST": "x"}, "NODES must be a whole number of at least 1"),
        ("many_machines.sh", (), {"NODES": 2, "MAIN_HOST": "x"}, "usage: NODES=2 MAIN_HOST=node1"),
        ("slurm.sbatch", (CONFIG,), {}, "slurm: this script runs under Slurm; submit it with: sbatch"),
        (
            "slurm.sbatch",
            (CONFIG,),
            {"SLURM_JOB_ID": 1, "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": "/"},
            "slurm: submit from the repository root; there is no launch/many_machines.sh in /",
        ),
    ],
)
def test_what_is_missing_is_named_and_nothing_starts(name, arguments, variables, message):
    code, errors = ended(script(name, *arguments, **variables))
    assert code == 2 and message in errors, errors


def test_slurm_runs_one_torchrun_on_each_machine(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    fakes = {
        "scontrol": '[[ "$*" == "show hostnames gpu[07-08]" ]] && printf "gpu07\\ngpu08\\n"',
        # As torchrun's interpreter would be called on each machine.
        "srun": f'printf "%s\\n" "$@" > {tmp_path}/srun; while [[ "$1" == --* ]]; do '
        '[[ "$1" == *=* ]] && shift || shift 2; done; exec "$@"',
        "python": f'[[ "$1" == -c ]] && {{ echo 4; exit; }}; printf "%s\\n" "$@" > {tmp_path}/python',
    }
    for name, text in fakes.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": 71234, "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_SUBMIT_DIR": ROOT}
    path = f"{tools}:{os.environ['PATH']}"
    code, errors = ended(script("slurm.sbatch", CONFIG, "steps=3", PATH=path, PYTHON=tools / "python", **job))
    assert code == 0, errors
    asked = (tmp_path / "srun").read_text().split()
    assert asked == [
        "--ntasks", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=1", "bash", "launch/many_machines.sh",
        CONFIG, "steps=3",
    ]  # fmt: skip
    assert (tmp_path / "python").read_text().split() == [
        "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "gpu07:21234", "--rdzv-id", "71234", "-m", "cp_engine", "train", CONFIG, "steps=3",
    ]  # fmt: skip
    assert "4 ranks here on one of 2 machines, nccl, meeting at gpu07:21234" in errors
