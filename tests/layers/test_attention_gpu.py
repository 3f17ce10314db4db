"""Tree attention over two GPUs: every exchange, transport and backend; and the same code rehearsed on CPU ranks."""

import importlib.util
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.layers.attention_on_ranks import Found, Run, both_transports, branching_rows, chain_digests, findings
from tests.layers.shared_memory import use_stand_in
from tests.ranks import free_port, run_ranks

EXCHANGES = (("gather", 1), ("gather", 4), ("ring", None), ("ulysses", None))


def runs_of(backend: str, dtype: torch.dtype, exchanges) -> list[Run]:
    return [
        run for exchange, groups in exchanges for run in both_transports(Run(exchange, backend, dtype, "auto", groups))
    ]


def all_runs() -> list[Run]:
    teams = (("ulysses_gather:1", 2), ("ulysses_gather:2", None))
    runs = runs_of("reference", torch.float64, EXCHANGES + teams) + runs_of("triton", torch.bfloat16, EXCHANGES)
    if importlib.util.find_spec("cudnn") is not None:
        # Not ring: cudnn hands out partial results in bf16, so that merging them adds a rounding. `auto` knows.
        runs += runs_of("cudnn", torch.bfloat16, (("gather", 4), ("ulysses", None)))
        runs += runs_of("auto", torch.bfloat16, (("ring", None),))
    return runs


CHAINS = [
    chain
    for exchange, groups in (("gather", 4), ("ring", None), ("ulysses", None))
    for chain in both_transports(Run(exchange, "triton", torch.bfloat16, "auto", groups))
]


def gpu_rank(rank: int, port: int, folder: str) -> None:
    # The reference's products are deterministic only so; torch reads it when CUDA starts.
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    found = findings(all_runs(), branching_rows(4, 150, 33), device)
    chains = {run: chain_digests(run, branching_rows(4, 800, 120), device, 12) for run in CHAINS}
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump((found, chains), file)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gpu_findings(tmp_path_factory) -> list[tuple[dict[Run, Found], dict[Run, list[str]]]]:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(gpu_rank, (free_port(), str(folder)), nprocs=2)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2)]


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_are_exact_and_never_wait_for_the_host(gpu_findings):
    """A wait of the host raises inside; errors are those of design section 10."""
    for found, _ in gpu_findings:
        for run, each in found.items():
            if run.dtype == torch.float64:
                assert each.error < 1e-12, (run, each)
            else:
                assert each.segment_share <= 1 and each.whole_share <= 1, (run, each)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_repeat_bit_by_bit(gpu_findings):
    for found, _ in gpu_findings:
        for run, each in found.items():
            assert each.repeats, run
        pairs = [(found[run], found[other]) for run, other in paired(found)]
        assert pairs and all(one.digest == other.digest for one, other in pairs)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_many_layers_in_flight_do_not_overwrite_each_other(gpu_findings):
    for _, chains in gpu_findings:
        pairs = paired(chains)
        assert pairs
        for run, other in pairs:
            digests = chains[run]
            assert digests == chains[other] and digests[: len(digests) // 2] == digests[len(digests) // 2 :], run


def paired(runs) -> list[tuple[Run, Run]]:
    """Runs that differ in nothing but the transport."""
    return [tuple(both_transports(run)) for run in runs if run.transport == "peer"]


def rehearsal(runs: list[Run], chains: list[Run]):
    use_stand_in(dist.group.WORLD)
    rows, device = branching_rows(4, 34, 8), torch.device("cpu")
    return findings(runs, rows, device), {run: chain_digests(run, rows, device, 3) for run in chains}


def test_the_same_on_cpu_ranks():
    runs = runs_of("reference", torch.float64, EXCHANGES) + runs_of("reference", torch.bfloat16, EXCHANGES)
    chains = [run for run in runs if run.dtype == torch.bfloat16]
    ranks = run_ranks(2, rehearsal, runs, chains)
    test_two_gpus_are_exact_and_never_wait_for_the_host(ranks)
    test_two_gpus_repeat_bit_by_bit(ranks)
    test_many_layers_in_flight_do_not_overwrite_each_other(ranks)
