"""What one rank finds when it runs attention layers on its device: for tests on GPUs, rehearsed on a CPU.

Shapes: T tokens, Hq query heads, Hk kv heads, D head size, S segments.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_engine.layers.attention import attention_tables, tree_attention
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import layout_from_cuts
from tests.forests import Rows
from tests.kernels.attention_oracle import Tensors, dense_attention, random_tensors, visible

NAMES = ("out", "dq", "dk", "dv")
HEADS, SIZE = (8, 4), 64


@dataclass(frozen=True)
class Run:
    exchange: str
    backend: str
    dtype: torch.dtype
    transport: str
    groups: int | None = None  # head groups of gather


@dataclass(frozen=True)
class Found:
    error: float  # float64: largest over the largest true value
    segment_share: float  # bf16: largest error of a segment over its bound
    whole_share: float  # bf16: largest error over its bound
    repeats: bool  # deterministic, twice: equal bits
    digest: str  # of the bits of all results of this rank
    seconds: float


def branching_rows(prompts: int, shared: int, answer: int) -> Rows:
    """Prompts with five answers each, two of which go on in three ways; all but the prompts are about equally long."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> list[int]:
        return rng.integers(0, 50_000, length).tolist()

    rows = []
    for prompt in range(prompts):
        trunk = draw(shared + 7 * prompt)
        answers = [trunk + draw(answer + index) for index in range(5)]
        rows += answers + [base + draw(answer + index) for base in answers[:2] for index in range(3)]
    return Rows(rows, [0] * len(rows))


def spread_layout(forest: Forest, world: int):
    """Every long segment is cut between all ranks, so that each rank reads rows of each other rank."""
    cuts, ranks = [0], []
    for start, end in zip(forest.segment_start[:-1], forest.segment_start[1:], strict=True):
        bounds = start + (end - start) * np.arange(1, world + 1) // world
        cuts += bounds.tolist()
        ranks += list(range(world))
    return layout_from_cuts(cuts, ranks, world)


class Layer:
    """One rank's part of attention over a forest, ready to run on given inputs."""

    def __init__(self, rows: Rows, run: Run, device: torch.device):
        self.run, self.device = run, device
        rank, world = dist.get_rank(), dist.get_world_size()
        layout = spread_layout(rows.forest, world)
        plan = attention_plan(rows.forest, layout, rank, run.exchange)
        self.tables = attention_tables(plan, rank, device, transport=run.transport, head_groups=run.groups)
        self.tokens = torch.as_tensor(layout.rank_tokens(rank))

    def local(self, x: Tensors) -> list[torch.Tensor]:
        return [part[self.tokens].to(self.device, self.run.dtype) for part in (x.q, x.k, x.v, x.dout)]

    def step(self, local: list[torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        q, k, v = (part.detach().requires_grad_() for part in local[:3])
        out = tree_attention(q, k, v, self.tables, dist.group.WORLD, scale, self.run.backend)
        grads = torch.autograd.grad(out, (q, k, v), local[3])
        return dict(zip(NAMES, (out.detach(), *grads), strict=True))


@contextlib.contextmanager
def no_host_wait(device: torch.device):
    """Inside, an operation that makes the host wait for the GPU raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def digest(results: dict[str, torch.Tensor]) -> str:
    made = hashlib.blake2b(digest_size=8)
    for name in NAMES:
        made.update(results[name].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return made.hexdigest()


def flat_attention(rows: Rows, x: Tensors) -> dict[str, torch.Tensor]:
    """Every rollout alone by torch's attention; gradients summed over rollouts in float64, then rounded.

    A shared token's ``dout`` enters by the first rollout that visits it, so the sums are the tree's gradients.
    """
    seen = np.zeros(rows.forest.tokens, bool)
    out = torch.zeros_like(x.q)
    sums = {
        name: torch.zeros_like(part, dtype=torch.float64) for name, part in zip(NAMES[1:], (x.q, x.k, x.v), strict=True)
    }
    for nodes in rows.node_of:
        path = torch.as_tensor(nodes, device=x.q.device)
        first = torch.as_tensor(~seen[nodes], device=x.q.device)
        seen[nodes] = True
        q, k, v = (part[path].transpose(0, 1)[None].detach().requires_grad_() for part in (x.q, x.k, x.v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=x.scale, enable_gqa=True)
        dout = (x.dout[path] * first[:, None, None]).transpose(0, 1)[None]
        grads = torch.autograd.grad(made, (q, k, v), dout)
        out[path] = made.detach()[0].transpose(0, 1)
        for name, grad in zip(NAMES[1:], grads, strict=True):
            sums[name].index_add_(0, path, grad[0].transpose(0, 1).double())
    return {"out": out} | {name: total.to(x.q.dtype) for name, total in sums.items()}


def segment_errors(forest: Forest, got: torch.Tensor, truth: torch.Tensor) -> np.ndarray:
    """float64 [S]: largest error of each segment; -inf where ``got`` has NaN marks (rows of other ranks)."""
    error = (got.double() - truth).abs().flatten(1).amax(1).cpu().numpy()
    return np.maximum.reduceat(np.nan_to_num(error, nan=-np.inf), forest.segment_start[:-1])


def bounds(forest: Forest, flat: torch.Tensor, truth: torch.Tensor) -> tuple[np.ndarray, float]:
    """What design section 10 allows in bf16: for each segment [S], and at all."""
    errors = segment_errors(forest, flat, truth)
    length_class = np.log2(forest.segment_length).astype(int)
    usual = np.array([np.quantile(errors[length_class == each], 0.99) for each in length_class])
    return 1.5 * np.maximum(errors, usual), 1.25 * errors.max()


def findings(runs: list[Run], rows: Rows, device: torch.device) -> dict[Run, Found]:
    """Run every case on this rank; all ranks must call it."""
    forest = rows.forest
    x = random_tensors(forest.tokens, HEADS, SIZE, 0, torch.bfloat16)
    on_device = Tensors(*(part.to(device) for part in (x.q, x.k, x.v, x.dout)))
    truth = dense_attention(visible(forest).to(device), on_device)
    flat = flat_attention(rows, on_device)
    allowed = {name: bounds(forest, flat[name], truth[name]) for name in NAMES}
    found = {}
    for run in runs:
        begun = time.monotonic()
        layer = Layer(rows, run, device)
        local = layer.local(x)
        layer.step(local, x.scale)  # compiles, and makes the memory of the transport
        with no_host_wait(device):
            results = layer.step(local, x.scale)
        with deterministic():
            first, second = (layer.step(local, x.scale) for _ in range(2))
        shares, wholes, error = [], [], 0.0
        for name in NAMES:
            whole = torch.full(truth[name].shape, torch.nan, dtype=torch.float64, device=device)
            whole[layer.tokens] = results[name].double()
            assert not results[name].isnan().any(), (run, name)
            mine = segment_errors(forest, whole, truth[name])
            error = max(error, float(mine.max() / truth[name].abs().max()))
            shares.append(float((mine / allowed[name][0]).max()))
            wholes.append(float(mine.max() / allowed[name][1]))
        same = all(torch.equal(first[name], second[name]) for name in NAMES)
        found[run] = Found(error, max(shares), max(wholes), same, digest(first), time.monotonic() - begun)
        if dist.get_rank() == 0:
            print(run, found[run], flush=True)
    return found


def chain_digests(run: Run, rows: Rows, device: torch.device, layers: int) -> list[str]:
    """Digests of many layers that follow each other without a pause, forward and then backward, twice."""
    layer = Layer(rows, run, device)
    made = [random_tensors(rows.forest.tokens, HEADS, SIZE, seed, torch.bfloat16) for seed in range(2)]
    inputs = [layer.local(x) for x in made]
    digests = []
    for _ in range(2):
        steps = []
        for index in range(layers):
            q, k, v, dout = (part * (1 + index % 3) for part in inputs[index % 2])
            leaves = [part.detach().requires_grad_() for part in (q, k, v)]
            out = tree_attention(*leaves, layer.tables, dist.group.WORLD, made[0].scale, run.backend)
            steps.append((leaves, out, dout))
        torch.autograd.backward([out for _, out, _ in steps], [dout for _, _, dout in steps])
        for leaves, out, _ in steps:
            digests.append(digest(dict(zip(NAMES, (out.detach(), *(leaf.grad for leaf in leaves)), strict=True))))
    return digests


def both_transports(run: Run) -> list[Run]:
    return [replace(run, transport=transport) for transport in ("peer", "collective")]
