"""The Gated DeltaNet layer on GPUs in bf16: against float64 by segment on one, and two ranks against one on two.

Shapes: T tokens, HV value heads, V head size, C channels.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from cp_engine.kernels.gdn.triton import ChainTables
from cp_engine.layers.gdn import start_gated_delta_rule
from cp_engine.layers.gdn_tables import GdnHeads, gdn_tables
from cp_engine.sharding.exchange.rows import accumulation_dtype
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import contiguous_layout, layout_from_cuts
from tests.gdn_oracle import forest_of_segments, layer_case
from tests.kernels import gdn_faults
from tests.kernels.gdn_flat import WORST, share_of_segments
from tests.ranks import free_port, run_ranks

HEADS = GdnHeads(2, 4, 128, 128)
# A trunk over several chunks, branch points after segments of 1, 2 and 3 tokens, lengths around the chunk, two trees.
SEGMENTS = [(-1, 200), (0, 1), (1, 2), (2, 3), (3, 63), (3, 64), (2, 65), (0, 1), (0, 130), (8, 64), (8, 3), (-1, 70)]
SEGMENTS += [(11, 2), (11, 65), (13, 1)]
ROWS = ("o", "dmixed", "dg", "dbeta")
TWO_RANKS = 3e-3  # fla's bound for its context parallelism against one GPU


@cache
def forest():
    return forest_of_segments(SEGMENTS)


def bf16_case(device: str, keys: str = "low rank"):
    """`layer_case` with rows in bf16, decays and betas in float32: low-rank keys, alpha near 1, beta near 0."""
    case = layer_case(forest().tokens, 11, HEADS)
    if keys == "random":
        width = HEADS.key_heads * HEADS.key_dim
        case.mixed[:, width : 2 * width] = torch.randn(
            forest().tokens, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
    rows = {name: getattr(case, name).to(device, torch.bfloat16) for name in ("mixed", "weight", "dout")}
    return replace(case, **rows, g=case.g.to(device, torch.float32), beta=case.beta.to(device, torch.float32))


def run(case, tables, dtype, backend: str, group=None, rows=slice(None), weight_dtype=None) -> dict[str, torch.Tensor]:
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    weight = case.weight.to(weight_dtype or dtype)
    leaves = [case.mixed[rows].to(dtype), weight, case.g[rows].to(gates), case.beta[rows].to(gates)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    o = start_gated_delta_rule(*leaves, tables, group, HEADS, backend)()
    o.backward(case.dout[rows].to(dtype))
    names = ("o", "dmixed", "dweight", "dg", "dbeta")
    return dict(zip(names, (o.detach(), *(x.grad for x in leaves)), strict=True))


def whole_tables(device: str):
    return gdn_tables(gdn_plan(forest(), contiguous_layout(forest(), 1), 0, "affine", 4), 0, device)


def leaf_paths() -> list[list[int]]:
    """The segments of every path from a root to a leaf."""
    parents = forest().parent
    paths = []
    for leaf in np.setdiff1d(np.arange(len(parents)), parents).tolist():
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        paths.append(path)
    return paths


def rows_of_paths(cut: bool) -> tuple[Forest, np.ndarray, np.ndarray]:
    """A forest of the leaf paths, each a tree of its own; the row of this forest that each of its rows is; and the
    segments that the paths hold, in the order of the rows.

    Args:
        cut: let chunks begin where the segments begin, as in the tree; else only where a path begins. See `gdn_flat`.
    """
    start, lengths, segments, paths = forest().segment_start, forest().segment_length, [], leaf_paths()
    for path in paths:
        pieces = [int(lengths[s]) for s in path] if cut else [int(lengths[path].sum())]
        segments += [(-1 if not i else len(segments) + i - 1, length) for i, length in enumerate(pieces)]
    flat = forest_of_segments(segments)
    assert len(np.unique(flat.parent[flat.parent >= 0])) == (flat.parent >= 0).sum(), "no path branches"
    rows = np.concatenate([np.arange(start[s], start[s] + lengths[s]) for path in paths for s in path])
    # Trees keep their order, and a path is a straight run of rows.
    return flat, rows, np.array([s for path in paths for s in path])


def item_errors(got: dict, truth: dict, lengths: np.ndarray, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """Root mean square error of every run of ``lengths`` rows over the tensor's; the weight's gradient as a whole.

    Args:
        weight: of each row in the tensor's root mean square.
    """
    found = {}
    for name, true in truth.items():
        square, size = ((x.double()).flatten(1).square().mean(1) for x in (got[name].double() - true, true))
        if name not in ROWS:
            found[name] = (square.sum() / size.sum()).sqrt().cpu().numpy()
            continue
        parts = torch.stack([part.mean() for part in square.split(lengths.tolist())])
        found[name] = (parts / ((size * weight).sum() / weight.sum())).sqrt().cpu().numpy()
    return {name: np.nan_to_num(each, nan=np.inf) for name, each in found.items()}


def errors_alone(case, backend: str, dtype) -> dict[str, np.ndarray]:
    """The largest error of each segment among the leaf paths that hold it, every path run alone."""
    lengths, largest = forest().segment_length, {}
    for cut in (False, True):
        flat, rows, held = rows_of_paths(cut)
        index = torch.as_tensor(rows, device=case.mixed.device)
        part = {name: getattr(case, name)[index] for name in ("mixed", "g", "beta", "dout")}
        alone = replace(case, **part)
        tables = gdn_tables(gdn_plan(flat, contiguous_layout(flat, 1), 0, "affine", 4), 0, case.mixed.device)
        got, truth = run(alone, tables, dtype, backend), run(alone, tables, torch.float64, "reference")
        copies = np.bincount(held, minlength=len(lengths))
        weight = torch.as_tensor(np.repeat(1.0 / copies[held], lengths[held]), device=case.mixed.device)
        for name, each in item_errors(got, truth, lengths[held], weight).items():
            found = largest.setdefault(name, np.zeros(len(lengths) if name in ROWS else 1))
            np.maximum.at(found, held if name in ROWS else 0, each)
    return largest


def share_of_bounds(case, got: dict, truth: dict, alone: dict[str, np.ndarray]) -> dict[str, float]:
    """How much of its bound each result uses, as design section 10 bounds it; above 1 it is wrong."""
    lengths = forest().segment_length
    errors = item_errors(got, truth, lengths, torch.ones(len(case.mixed), device=case.mixed.device))
    rows = {name: share_of_segments(errors[name], alone[name], lengths) for name in ROWS}
    return rows | {"dweight": float(errors["dweight"]) / (WORST * float(alone["dweight"][0]))}


@pytest.fixture(scope="module")
def on_gpu():
    """The case on a GPU, its float64 truth by the reference, which `test_gdn.py` compares with every path alone, and
    the errors of the paths alone."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = bf16_case("cuda")
    truth = run(case, whole_tables("cuda"), torch.float64, "reference")
    return case, truth, errors_alone(case, "triton", torch.bfloat16)


@pytest.mark.gpu
def test_bf16_is_near_float64_in_every_segment(on_gpu):
    case, truth, alone = on_gpu
    got = run(case, whole_tables("cuda"), torch.bfloat16, "auto")
    assert got["o"].dtype == got["dmixed"].dtype == torch.bfloat16
    used = share_of_bounds(case, got, truth, alone)
    assert max(used.values()) <= 1, used


@pytest.mark.gpu
def test_no_host_synchronisation_and_equal_bits(on_gpu):
    case, _, _ = on_gpu
    tables = whole_tables("cuda")
    first = run(case, tables, torch.bfloat16, "triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(case, tables, torch.bfloat16, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first[name], second[name]) for name in first)


FAULTS = (
    gdn_faults.without_entry_of_children,
    gdn_faults.with_branch_points_swapped,
    gdn_faults.without_last_chain_sum,
    gdn_faults.without_last_twig_sum,
)


def faulty_tables(fault: Callable[[ChainTables], ChainTables], device: str):
    tables = whole_tables(device)
    vars(tables)["chains"] = fault(tables.chains)
    return tables


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(on_gpu, fault):
    """On a GPU; `interpreted_gdn_bounds.py` sees the same ones on a CPU."""
    case, truth, alone = on_gpu
    tables = faulty_tables(fault, "cuda")
    got = run(case, tables, torch.bfloat16, "triton")
    assert max(share_of_bounds(case, got, truth, alone).values()) > 2


def two_rank_layout():
    """Both ranks hold parts of the trunk and parents of rows on the other. The trunk is cut between chunks, so that
    both runs round the same products."""
    start = forest().segment_start
    assert start[1] == 200
    return layout_from_cuts([0, 64, 128, int(start[3]), int(start[7]), forest().tokens], [0, 1, 0, 1, 0], 2)


def of_rank(rank: int, exchange: str, device, group, backend: str = "triton", dtype=torch.bfloat16, keys="low rank"):
    layout = two_rank_layout()
    tables = gdn_tables(gdn_plan(forest(), layout, rank, exchange, 4), rank, device)
    tokens = torch.as_tensor(layout.rank_tokens(rank))
    got = run(bf16_case(device, keys), tables, dtype, backend, group, tokens.to(device), accumulation_dtype(dtype))
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
    found = {
        (exchange, keys): of_rank(rank, exchange, device, dist.group.WORLD, keys=keys)
        for exchange in ("affine", "ulysses")
        for keys in ("low rank", "random")
    }
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
def test_two_ranks_equal_one(tmp_path, on_gpu):
    """Every segment within the bounds of one GPU, and both as near each other as fla's context parallelism is to one
    GPU, with random keys and with keys near one line."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(gpu_rank, (free_port(), str(tmp_path)), nprocs=2)
    ranks = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2)]
    case, truth, alone = on_gpu
    for exchange in ("affine", "ulysses"):
        for keys in ("random", "low rank"):
            two = put_together([rank[exchange, keys] for rank in ranks])
            if keys == "low rank":
                used = share_of_bounds(case, {name: x.cuda() for name, x in two.items()}, truth, alone)
                assert max(used.values()) <= 1, (exchange, used)
            # A gradient in bf16 would be rounded once here and once on each rank: 0.0023 by itself.
            weight = {"weight_dtype": torch.float32}
            one = run(bf16_case("cuda", keys), whole_tables("cuda"), torch.bfloat16, "triton", **weight)
            apart = {name: rms(two[name], one[name].cpu()) for name in one}
            assert max(apart.values()) <= TWO_RANKS, (exchange, keys, apart)


def chunks_of(tables, tokens: np.ndarray) -> set[tuple[int, ...]]:
    """The tokens of each chunk."""
    chunks = tables.chains.chunk_rows[:, :2].tolist()
    return {tuple(tokens[start : start + count].tolist()) for start, count in chunks}


def test_two_ranks_compute_in_the_chunks_of_one():
    layout, two = two_rank_layout(), set()
    for rank in range(2):
        tables = gdn_tables(gdn_plan(forest(), layout, rank, "affine", 4), rank)
        two |= chunks_of(tables, layout.rank_tokens(rank))
    assert two == chunks_of(whole_tables("cpu"), np.arange(forest().tokens))


def test_bounds_on_a_cpu():
    """The same bounds on the reference in bf16: rounding is within them, one segment that is a tenth off is not."""
    case = bf16_case("cpu")
    truth = run(case, whole_tables("cpu"), torch.float64, "reference")
    alone = errors_alone(case, "reference", torch.bfloat16)
    got = run(case, whole_tables("cpu"), torch.bfloat16, "reference")
    assert 0.3 < max(share_of_bounds(case, got, truth, alone).values()) <= 1
    start, length = forest().segment_start[4], forest().segment_length[4]
    for name in ROWS:
        wrong = got | {name: got[name].clone()}
        wrong[name][start : start + length] *= 1.1
        assert share_of_bounds(case, wrong, truth, alone)[name] > 2
