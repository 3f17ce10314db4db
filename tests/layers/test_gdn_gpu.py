"""The Gated DeltaNet layer on GPUs in bf16: against float64 by segment on one, and two ranks against one on two.

Shapes: T tokens, HV value heads, V head size, C channels.
"""

import os
import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from cp_engine.layers.gdn import GdnHeads, gdn_tables, tree_gated_delta_rule
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import contiguous_layout, layout_from_cuts
from tests.gdn_oracle import forest_of_segments, layer_case
from tests.ranks import free_port, run_ranks

HEADS = GdnHeads(2, 4, 128, 128)
# A trunk over several chunks, branch points after segments of 1, 2 and 3 tokens, lengths around the chunk, two trees.
SEGMENTS = [(-1, 200), (0, 1), (1, 2), (2, 3), (3, 63), (3, 64), (2, 65), (0, 1), (0, 130), (8, 64), (8, 3), (-1, 70)]
SEGMENTS += [(11, 2), (11, 65), (13, 1)]
# Root mean square error of a segment over the tensor's root mean square: fla's bounds for its operator in bf16 with the
# rounding of the convolution's output and of the normalised keys (2^-9 each) on top.
BOUNDS = {"o": 1e-2, "dmixed": 1.6e-2, "dg": 3e-2, "dbeta": 3e-2}
WEIGHT_BOUND = 1.6e-2
TWO_RANKS = 3e-3  # fla's bound for its context parallelism against one GPU


@cache
def forest():
    return forest_of_segments(SEGMENTS)


def bf16_case(device: str):
    """`layer_case` with rows in bf16, decays and betas in float32: low-rank keys, alpha near 1, beta near 0."""
    case = layer_case(forest().tokens, 11, HEADS)
    rows = {name: getattr(case, name).to(device, torch.bfloat16) for name in ("mixed", "weight", "dout")}
    return replace(case, **rows, g=case.g.to(device, torch.float32), beta=case.beta.to(device, torch.float32))


def run(case, tables, dtype, backend: str, group=None, rows=slice(None)) -> dict[str, torch.Tensor]:
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [case.mixed[rows].to(dtype), case.weight.to(dtype), case.g[rows].to(gates), case.beta[rows].to(gates)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    o = tree_gated_delta_rule(*leaves, tables, group, HEADS, backend)
    o.backward(case.dout[rows].to(dtype))
    names = ("o", "dmixed", "dweight", "dg", "dbeta")
    return dict(zip(names, (o.detach(), *(x.grad for x in leaves)), strict=True))


def whole_tables(device: str):
    return gdn_tables(gdn_plan(forest(), contiguous_layout(forest(), 1), 0, "affine", 4), 0, device)


def segment_errors(got: dict, truth: dict) -> dict[str, float]:
    """The largest of a segment's root mean square errors over the tensor's root mean square; the weight's is whole."""
    found = {}
    for name, true in truth.items():
        square = (got[name].double() - true.double()).square()
        scale = true.double().square().mean().sqrt()
        parts = [square] if name == "dweight" else square.split(np.diff(forest().segment_start).tolist())
        found[name] = float(torch.stack([part.mean().sqrt() for part in parts]).max() / scale)
    return found


def within(found: dict[str, float]) -> bool:
    return found["dweight"] <= WEIGHT_BOUND and all(found[name] <= bound for name, bound in BOUNDS.items())


@pytest.fixture(scope="module")
def on_gpu():
    """The case on a GPU and its float64 truth by the reference, which `test_gdn.py` compares with every path alone."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = bf16_case("cuda")
    return case, run(case, whole_tables("cuda"), torch.float64, "reference")


@pytest.mark.gpu
def test_bf16_is_near_float64_in_every_segment(on_gpu):
    case, truth = on_gpu
    got = run(case, whole_tables("cuda"), torch.bfloat16, "auto")
    assert got["o"].dtype == got["dmixed"].dtype == torch.bfloat16
    found = segment_errors(got, truth)
    assert within(found), found


@pytest.mark.gpu
def test_no_host_synchronisation_and_equal_bits(on_gpu):
    case, _ = on_gpu
    tables = whole_tables("cuda")
    first = run(case, tables, torch.bfloat16, "triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(case, tables, torch.bfloat16, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first[name], second[name]) for name in first)


def without_entry_of_children(tables):
    """Chains start from zero instead of their branch point."""
    (wave,) = tables.waves
    starts = wave.chains.clone()
    starts[:, 2] = 0
    return replace(tables, waves=(replace(wave, chains=starts),))


def with_branch_points_swapped(tables):
    """Two branch points' children start from each other's state."""
    (wave,) = tables.waves
    starts = wave.chains.clone()
    first, second = starts[:, 2].unique()[-2:]
    slot = starts[:, 2].clone()
    starts[:, 2] = torch.where(slot == first, second, torch.where(slot == second, first, slot))
    return replace(tables, waves=(replace(wave, chains=starts),))


def without_last_branch_sum(tables):
    (wave,) = tables.waves
    ends = wave.reader_ptr.clone()
    ends[-1] -= 1
    return replace(tables, waves=(replace(wave, reader_ptr=ends),))


FAULTS = (without_entry_of_children, with_branch_points_swapped, without_last_branch_sum)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(on_gpu, fault):
    case, truth = on_gpu
    tables = whole_tables("cuda")
    vars(tables)["chains"] = fault(tables.chains)
    assert not within(segment_errors(run(case, tables, torch.bfloat16, "triton"), truth))


def two_rank_layout():
    """Both ranks hold parts of the trunk and parents of rows on the other. The trunk is cut between chunks, so that
    both runs round the same products."""
    start = forest().segment_start
    assert start[1] == 200
    return layout_from_cuts([0, 64, 128, int(start[3]), int(start[7]), forest().tokens], [0, 1, 0, 1, 0], 2)


def of_rank(rank: int, exchange: str, device, group, backend: str = "triton", dtype=torch.bfloat16):
    layout = two_rank_layout()
    tables = gdn_tables(gdn_plan(forest(), layout, rank, exchange, 4), rank, device)
    tokens = torch.as_tensor(layout.rank_tokens(rank))
    got = run(bf16_case(device), tables, dtype, backend, group, tokens.to(device))
    return {name: x.cpu() for name, x in got.items()}


def cpu_rank(exchange: str):
    rank, group = dist.get_rank(), dist.group.WORLD
    return {name: x.numpy() for name, x in of_rank(rank, exchange, "cpu", group, "reference", torch.float64).items()}


@pytest.mark.parametrize("exchange", ["affine", "ulysses"])
def test_the_same_on_cpu_ranks(exchange):
    ranks = [{name: torch.as_tensor(x) for name, x in part.items()} for part in run_ranks(2, cpu_rank, exchange)]
    one, two = run(bf16_case("cpu"), whole_tables("cpu"), torch.float64, "reference"), put_together(ranks)
    assert max(rms(two[name], one[name]) for name in one) <= 1e-12


def gpu_rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    found = {exchange: of_rank(rank, exchange, device, dist.group.WORLD) for exchange in ("affine", "ulysses")}
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(found, file)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def put_together(parts: list[dict]) -> dict[str, torch.Tensor]:
    out = {}
    for name in parts[0]:
        if name == "dweight":
            out[name] = sum(part[name].double() for part in parts)
            continue
        out[name] = torch.empty((forest().tokens, *parts[0][name].shape[1:]), dtype=torch.float64)
        for rank, part in enumerate(parts):
            out[name][torch.as_tensor(two_rank_layout().rank_tokens(rank))] = part[name].double()
    return out


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt() / b.double().square().mean().sqrt())


@pytest.mark.multi_gpu
def test_two_ranks_equal_one(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(gpu_rank, (free_port(), str(tmp_path)), nprocs=2)
    ranks = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2)]
    case = bf16_case("cuda")
    one = {name: x.cpu() for name, x in run(case, whole_tables("cuda"), torch.bfloat16, "triton").items()}
    for exchange in ("affine", "ulysses"):
        two = put_together([rank[exchange] for rank in ranks])
        found = {name: rms(two[name], one[name]) for name in one}
        assert max(found.values()) <= TWO_RANKS, (exchange, found)
