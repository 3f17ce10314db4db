"""Starting, agreeing and ending of rank processes."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cp_engine.distributed.agree import require_equal_digests
from cp_engine.distributed.gradients import clip_gradients, sum_gradients
from cp_engine.distributed.mesh import make_mesh, shard_mesh
from cp_engine.distributed.ranks import Ranks, _require_backends, join_ranks
from cp_engine.sharding.hosts import ONE_HOST
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent


def this_rank() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))


def _agree(digests):
    try:
        require_equal_digests(digests[dist.get_rank()], "pack plan", this_rank())
    except ValueError as error:
        return str(error)
    return "equal"


def test_ranks_that_differ_raise_on_every_rank():
    assert run_ranks(3, _agree, ["ab" * 16] * 3) == ["equal"] * 3
    messages = run_ranks(3, _agree, ["ab" * 16, "cd" * 16, "ab" * 16])
    assert all(m.startswith("ranks [1] have another pack plan than rank 0") for m in messages)


def _shard_groups(timeout_s: int) -> list[tuple[float, list[int]]]:
    mesh = shard_mesh(replace(this_rank(), per_node=2), within_node=True, timeout_s=timeout_s)
    groups = [mesh.get_group(name) for name in ("copies", "shards")]
    return [
        (group._get_backend(torch.device("cpu")).options._timeout.total_seconds(), dist.get_process_group_ranks(group))
        for group in groups
    ]


def test_groups_of_shards_have_the_timeout_of_the_run():
    found = run_ranks(4, _shard_groups, 77)
    assert found[1] == [(77.0, [1, 3]), (77.0, [0, 1])] and found[2] == [(77.0, [0, 2]), (77.0, [2, 3])]


def _group_timeouts(timeout_s: int) -> tuple[float, list[int]]:
    group = make_mesh(this_rank(), 2, 2, timeout_s).context.group
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds(), dist.get_process_group_ranks(group)


def test_context_parallel_groups_are_neighbours_and_have_the_timeout_of_the_run():
    assert run_ranks(4, _group_timeouts, 77) == [(77.0, [0, 1])] * 2 + [(77.0, [2, 3])] * 2


def _hosts_of(cp: int, per_node: list[int]) -> int:
    """Ranks of a host for the plans; ``per_node``: ranks on each rank's machine."""
    ranks = this_rank()
    ranks = replace(ranks, per_node=per_node[ranks.rank] or None)
    return make_mesh(ranks, ranks.world // cp, cp, timeout_s=60).hosts.ranks


@pytest.mark.parametrize(
    ("cp", "per_node", "host"),
    [
        (4, [0] * 4, ONE_HOST.ranks),
        (2, [2] * 4, ONE_HOST.ranks),
        (4, [2] * 4, 2),
        (4, [3, 3, 3, 1], 1),
        (2, [1, 1, 2, 2], 1),  # one group on two machines, the other on one: both plan alike
    ],
)
def test_all_ranks_plan_for_the_same_hosts(cp, per_node, host):
    assert run_ranks(4, _hosts_of, cp, per_node) == [host] * 4


def _joined_again() -> tuple[int, int, bool]:
    first, second = join_ranks(), join_ranks()
    return second.rank, second.world, first.group is second.group is dist.group.WORLD


def test_a_process_group_that_the_program_has_made_is_used():
    assert run_ranks(2, _joined_again) == [(0, 2, True), (1, 2, True)]


def test_a_process_group_without_a_backend_for_host_tensors_is_refused_with_the_way_on():
    for present in ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl,xpu:xccl"):
        _require_backends(present, "cpu:gloo,cuda:nccl")
    _require_backends("cpu:gloo,cuda:gloo", "gloo")
    with pytest.raises(ValueError, match=r"has the backends cuda:nccl, .*init_process_group\('cpu:gloo,cuda:nccl'\)"):
        _require_backends("cuda:nccl", "cpu:gloo,cuda:nccl")
    with pytest.raises(ValueError, match="has the backends cpu:gloo,cuda:gloo, and the engine needs"):
        _require_backends("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl")


def _summed():
    ranks = this_rank()
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    model.weight.grad = torch.full((2, 2), float(ranks.rank + 1), dtype=torch.float64)
    # The bias has no gradient on any rank but rank 1.
    if ranks.rank == 1:
        model.bias.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    sum_gradients(model.parameters(), ranks)
    norm = clip_gradients(model.parameters(), 1.0)
    return model.weight.grad.tolist(), model.bias.grad.tolist(), norm


def test_gradients_are_summed_and_clipped_by_the_global_norm():
    norm = (4 * 36 + 25) ** 0.5
    for weight, bias, got in run_ranks(3, _summed):
        assert got == pytest.approx(norm, rel=1e-14)
        assert weight[0][0] == pytest.approx(6 / (norm + 1e-6), rel=1e-12)
        assert bias == pytest.approx([3 / (norm + 1e-6), 4 / (norm + 1e-6)], rel=1e-12)


_FAILED_RANK = """
import time
import torch.distributed as dist
from cp_engine.distributed.ranks import shutdown
dist.is_initialized = lambda: True
# NCCL waits here for what peers never join.
dist.destroy_process_group = lambda: time.sleep(60)
shutdown(3)
"""


def test_a_failed_rank_ends_without_its_peers():
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    assert subprocess.run([sys.executable, "-c", _FAILED_RANK], env=env, timeout=45).returncode == 3


_SCRIPT = """
import sys
from cp_engine.distributed.launch import run_local_ranks
import cp_engine.distributed.launch as launch
launch._GRACE_S = 3.0
start = launch.subprocess.Popen
# The command is replaced by a plain program: the launcher's own behaviour is what is tested.
launch.subprocess.Popen = lambda argv, **kw: start([sys.executable, "-c", {program!r}], **kw)
sys.exit(run_local_ranks(3, []))
"""


@pytest.mark.parametrize(
    ("program", "code", "lines"),
    [
        ("import os; print('rank', os.environ['RANK'])", 0, ["rank 0"]),
        ("import os, sys; sys.exit(5 if os.environ['RANK'] == '1' else 0)", 5, []),
        # The other ranks would wait forever for the one that failed.
        ("import os, sys, time; sys.exit(4) if os.environ['RANK'] == '2' else time.sleep(60)", 4, []),
        # A rank that loses its peer fails too, a little later and in its own way: the cause is what counts.
        (
            "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '1' else 1); "
            "sys.exit(2 if os.environ['RANK'] == '1' else 3)",
            2,
            [],
        ),
    ],
    ids=["all well", "one fails", "others hang", "others follow"],
)
def test_local_launcher_returns_the_failing_code(program, code, lines):
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    env.pop("RANK", None)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(program=program)], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == lines


def test_terminating_the_local_launcher_ends_its_ranks():
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    launcher = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT.format(program=program)], env=env, stdout=subprocess.PIPE, text=True
    )
    rank = int(launcher.stdout.readline())
    launcher.terminate()
    assert launcher.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
