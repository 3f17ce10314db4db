"""Cases of the Triton head in Triton's interpreter; `test_logprob_triton.py` runs this file."""

import tests.kernels.interpreted  # isort: skip  # noqa: F401  # before anything that imports Triton

from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import clock, head
from cp_engine.kernels.logprob import edge_logprobs, edge_tables, row_kernels, triton
from cp_engine.models import tree_causal_lm
from cp_engine.models.tree_causal_lm import EdgeScorer
from tests.kernels.attention_oracle import poisoned_memory
from tests.kernels.head_cases import NAMES, HeadCase, head_case, head_errors, without_edges
from tests.ranks import run_ranks

BOUND = 2e-6  # float32; the worst seen is in the log


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 32 logits."""
    monkeypatch.setattr(row_kernels, "LANES", 8)
    monkeypatch.setattr(row_kernels, "EDGES", 4)


def chunks_of(monkeypatch, rows: int, vocab: int) -> None:
    monkeypatch.setattr(triton, "CHUNK_BYTES", 4 * rows * vocab)


def errors(mine: HeadCase) -> dict[str, float]:
    mine = mine.to("cpu", torch.float32)
    with poisoned_memory():
        found = mine.run("triton")
    assert [x.dtype for x in found] == [torch.float32] * 4
    return head_errors(found, mine.truth())


@pytest.mark.parametrize("vocab", [5, 31, 32, 33, 65, 128, 200])
def test_equals_the_reference(vocab):
    found = errors(head_case(vocab, vocab=vocab, temperature=0.7))
    assert set(found) == set(NAMES) and max(found.values()) <= BOUND, found


@pytest.mark.parametrize("rows", [1, 4, 20, 21, 1000])
def test_chunks(monkeypatch, rows):
    chunks_of(monkeypatch, rows, 65)
    found = errors(head_case(1, vocab=65))
    assert max(found.values()) <= BOUND, found


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
def test_small_and_large_logits(size, temperature):
    mine = head_case(2, vocab=70, size=size, temperature=temperature)
    # Logits are float32 numbers: rounding one of 1e4 moves a probability by 1e-3, so both get the same ones.
    mine = replace(mine, hidden=torch.eye(29, dtype=torch.float64), weight=mine.weight @ mine.hidden.T)
    found = errors(mine)
    assert max(found.values()) <= BOUND * max(1.0, 1 / temperature), found


def test_equal_logits():
    mine = head_case(3, vocab=64)
    mine.hidden[:, 1:] = 0
    mine.weight[:, 0] = 1
    log_prob, entropy, *_ = mine.to("cpu", torch.float32).run("triton")
    assert (log_prob + np.log(64)).abs().max() < 1e-6 and (entropy - np.log(64)).abs().max() < 1e-6
    found = errors(mine)
    assert max(found.values()) <= BOUND, found


def test_a_certain_token_has_no_gradient_and_no_entropy():
    """Whose target's terms, p and 1, cancel: neither may be rounded before."""
    logits = torch.zeros(3, 40)
    logits[:, 7] = 200.0
    mine = replace(head_case(4, vocab=40, rows=3, predictors=3, edges=6), hidden=logits.double())
    mine = replace(mine, weight=torch.eye(40, dtype=torch.float64), target=np.full(len(mine.predictor), 7))
    for dtype in (torch.float32, torch.bfloat16):
        log_prob, entropy, dhidden, _ = mine.to("cpu", dtype).run("triton")
        assert not log_prob.any() and not entropy.any() and not dhidden.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_reduced_in_float32(dtype):
    mine = head_case(5, vocab=65, size=4.0).to("cpu", dtype)
    found, expected = mine.run("triton"), mine.run("reference")
    assert [x.dtype for x in found] == [torch.float32] * 2 + [dtype] * 2
    logits = (mine.hidden @ mine.weight.T)[torch.as_tensor(mine.row)].double()  # rounded, as the kernel gets them
    z = logits.log_softmax(-1)[torch.as_tensor(mine.predictor), torch.as_tensor(mine.target)]
    assert (found[0] - z).abs().max() < BOUND * float(z.abs().max())
    truth = mine.truth()
    mine_off, reference_off = head_errors(found, truth), head_errors(expected, truth)
    # The interpreter cuts float32 off where it stores bf16, so gradients are compared in float16 only.
    names = NAMES[:2] if dtype == torch.bfloat16 else NAMES
    assert all(mine_off[name] <= 1.1 * reference_off[name] + 1e-6 for name in names), (mine_off, reference_off)


def test_a_rank_without_predictors_gives_zero_gradients():
    log_prob, entropy, dhidden, dweight = without_edges().to("cpu", torch.float32).run("triton")
    assert log_prob.shape == entropy.shape == (0,)
    assert dhidden.shape == (29, 16) and not dhidden.any() and dweight.shape == (50, 16) and not dweight.any()


def test_a_frozen_weight_and_no_gradients():
    mine = head_case(6).to("cpu", torch.float32)
    whole, frozen = mine.run("triton"), mine.run("triton", frozen=True)
    assert len(frozen) == 3
    assert all(torch.equal(a, b) for a, b in zip(whole, frozen, strict=False))
    head = nn.Linear(16, 50, bias=False)
    head.weight.data = mine.weight
    with torch.no_grad():
        made = edge_logprobs(
            mine.selected(mine.hidden), head, edge_tables(21, mine.predictor, mine.target), 50, backend="triton"
        )
    assert all(torch.equal(a, b) and b.grad_fn is None for a, b in zip(whole, made, strict=False))


def test_a_tied_weight_gets_both_gradients():
    mine, ids = head_case(7).to("cpu", torch.float64), torch.arange(29) % 50
    tables = edge_tables(len(mine.row), mine.predictor, mine.target)
    grads = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        head = nn.Linear(16, 50, bias=False, dtype=dtype)
        head.weight.data = mine.weight.to(dtype)
        made = edge_logprobs(mine.selected(head.weight[ids].tanh()), head, tables, 50, backend=backend)
        sum((x * g).sum() for x, g in zip(made, (mine.dlog_prob, mine.dentropy), strict=True)).backward()
        grads.append(head.weight.grad)
    assert (grads[0] - grads[1]).abs().max() <= BOUND * grads[1].abs().max()


def shifted_targets(monkeypatch, kernels):
    monkeypatch.setattr(kernels, "_target_kernel", Changed(kernels._target_kernel, 2, lambda target: (target + 1) % 65))


def missing_targets(monkeypatch, kernels):
    monkeypatch.setattr(kernels, "_target_kernel", Changed(kernels._target_kernel, 4, torch.zeros_like))


def forgotten_entropy(monkeypatch, kernels):
    monkeypatch.setattr(kernels, "_gradient_kernel", Changed(kernels._gradient_kernel, 3, torch.zeros_like))


def first_edges_only(monkeypatch, kernels):
    # A gradient beyond the first four edges of a predictor is lost.
    def cut(dlog_prob):
        dlog_prob = dlog_prob.clone()
        dlog_prob[4:10] = 0
        return dlog_prob

    monkeypatch.setattr(kernels, "_gradient_kernel", Changed(kernels._gradient_kernel, 2, cut))


def wrong_sums(monkeypatch, kernels):
    monkeypatch.setattr(kernels, "_gradient_kernel", Changed(kernels._gradient_kernel, 5, lambda x: x + 0.1))


class Changed:
    """A kernel one of whose arguments is changed."""

    def __init__(self, kernel, place: int, change):
        self.kernel, self.place, self.change = kernel, place, change

    def __getitem__(self, grid):
        def launch(*args, **options):
            changed = list(args)
            changed[self.place] = self.change(args[self.place])
            return self.kernel[grid](*changed, **options)

        return launch


@pytest.mark.parametrize(
    "fault",
    [shifted_targets, missing_targets, forgotten_entropy, first_edges_only, wrong_sums],
    ids=lambda f: f.__name__,
)
def test_planted_faults_show(monkeypatch, fault):
    chunks_of(monkeypatch, 8, 65)
    fault(monkeypatch, row_kernels)
    found = errors(head_case(8, vocab=65))
    assert max(found["dhidden"], found["dweight"]) > 1e-3 and max(found["log_prob"], found["entropy"]) <= BOUND, found


def test_a_chunk_scored_as_another_shows(monkeypatch):
    chunks_of(monkeypatch, 8, 65)
    monkeypatch.setattr(row_kernels, "_score_kernel", Changed(row_kernels._score_kernel, 8, lambda first: 0))
    with poisoned_memory():
        found = head_case(9, vocab=65).to("cpu", torch.float32).run("triton")
    assert all(x.isnan().any() for x in found)


def test_the_benchmark(monkeypatch):
    for name, value in {"REPEATS": 1, "FEWEST": 1, "WARM_UPS": 0}.items():
        monkeypatch.setattr(clock, name, value)
    monkeypatch.setitem(head.WORKLOADS, "toy", head.Workload(30, 40, 16, 65, True))
    records = head.run_workload("toy", ["reference", "triton"], [1024, 1], torch.device("cpu"), torch.float32)
    assert [record["method"] for record in records] == ["reference", "triton", "triton_1_mib"]
    assert all(record["max_err"] < 1e-5 and record["gain"] > 0 for record in records)


def sharded_gradients(backend: str) -> list[torch.Tensor]:
    """Gradients of a layer and a head in one FSDP2 unit of two ranks, the second of which scores nothing."""
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    mine = (head_case(10) if rank == 0 else without_edges()).to("cpu", torch.float32)
    tables = edge_tables(len(mine.row), mine.predictor, mine.target)
    layer, lm_head, scorer = nn.Linear(16, 16, bias=False), nn.Linear(16, 50, bias=False), EdgeScorer()
    layer.weight.data, lm_head.weight.data = mine.weight[:16] * 4, mine.weight.clone()
    dist.broadcast(layer.weight.data, 0)
    dist.broadcast(lm_head.weight.data, 0)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.lm_head, self.scorer = layer, lm_head, scorer

        def forward(self, hidden):
            return self.scorer(mine.selected(self.layer(hidden)), self.lm_head, tables, 50, 1.0)

    whole = fully_shard(Whole(), reshard_after_forward=False)
    chosen = mock.patch.object(tree_causal_lm, "edge_logprobs", partial(edge_logprobs, backend=backend))
    with chosen, mock.patch.object(triton, "CHUNK_BYTES", 4 * 8 * 50):
        log_prob, entropy = whole(mine.hidden)
        ((log_prob * mine.dlog_prob).sum() + (entropy * mine.dentropy).sum()).backward()
    return [parameter.grad.full_tensor() for parameter in whole.parameters()]


def test_sharded_weights():
    found, expected = (run_ranks(2, sharded_gradients, backend) for backend in ("triton", "reference"))
    for a, b in zip(found[0], expected[0], strict=True):
        assert b.abs().max() > 0.1 and (a - b).abs().max() <= 10 * BOUND * b.abs().max()
