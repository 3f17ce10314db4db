from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from cp_engine.kernels.logprob import api, edge_logprobs, edge_tables
from cp_engine.kernels.shared import packages

# Rows [11,12,13,14,15], [11,12,13,14,21,22], [11,12,31], the first row again, [11,12,13], [41].
# Depth-first rows: 11 12 13 14 21 22 15 31 41 -> 0..8; edges (predictor row -> target: multiplicity).
EDGES = {(0, 12): 5, (1, 13): 4, (1, 31): 1, (2, 14): 3, (3, 15): 2, (3, 21): 1, (4, 22): 1}


def closed_form_tables():
    """Five predictors, rows 0 to 4."""
    predictor, target = (np.array(column) for column in zip(*EDGES, strict=True))
    return edge_tables(5, predictor, target)


def random_edges(seed, rows=37, predictors=23, edges=61, vocab=50):
    rng = np.random.default_rng(seed)
    row = np.sort(rng.choice(rows, predictors, replace=False))
    extra = rng.integers(0, predictors, edges - predictors)
    return row, np.sort(np.concatenate([np.arange(predictors), extra])), rng.integers(0, vocab, edges)


def scored(hidden, head, row, predictor, target, *args):
    """`edge_logprobs` of rows of more hidden states."""
    return edge_logprobs(hidden[torch.as_tensor(row)], head, edge_tables(len(row), predictor, target), *args)


def dense(hidden, head, row, predictor, target, temperature):
    """The definition on all logits at once."""
    z = head(hidden)[torch.as_tensor(row)] / temperature
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    entropy = -(p * p.log()).sum(-1)
    predictor, target = torch.as_tensor(predictor), torch.as_tensor(target)
    return p[predictor, target].log(), entropy[predictor]


def run(fn, hidden, head, *args):
    hidden = hidden.clone().requires_grad_()
    head.zero_grad()
    log_prob, entropy = fn(hidden, head, *args)
    weight = torch.linspace(-1.0, 2.0, len(log_prob), dtype=log_prob.dtype)
    ((log_prob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()).backward()
    return log_prob.detach(), entropy.detach(), hidden.grad, *(p.grad for p in head.parameters())


def test_uniform_logits_have_the_closed_form_gradient():
    tables = closed_form_tables()
    logits = torch.zeros(9, 64, dtype=torch.float64, requires_grad=True)
    log_prob, entropy = edge_logprobs(logits[:5], nn.Identity(), tables, 64)
    assert torch.allclose(log_prob, torch.full((7,), -np.log(64.0), dtype=torch.float64), rtol=1e-15)
    assert torch.allclose(entropy, torch.full((7,), np.log(64.0), dtype=torch.float64), rtol=1e-15)
    (-(log_prob * torch.tensor(list(EDGES.values()))).sum()).backward()
    expected = torch.full((64,), 3 / 64, dtype=torch.float64)
    expected[15] -= 2
    expected[21] -= 1
    assert (logits.grad[3] - expected).abs().max() < 1e-15
    assert not logits.grad[5:].any()  # 22, 15, 31 and 41 predict nothing


@pytest.mark.parametrize("chunk_rows", [1, 4, 23, 1000])
def test_chunks_equal_the_definition_with_gradients(monkeypatch, chunk_rows):
    monkeypatch.setattr(api, "MAX_CHUNK_LOGITS", 50 * chunk_rows)
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 50, dtype=torch.float64), torch.randn(37, 8, dtype=torch.float64)
    edges = random_edges(1)
    expected = run(dense, hidden, head, *edges, 0.7)
    found = run(scored, hidden, head, *edges, 50, 0.7)
    for a, b in zip(expected, found, strict=True):
        assert (a - b).abs().max() <= 1e-13 * max(1.0, float(a.abs().max()))


def test_no_chunk_exceeds_the_bound_and_backward_recomputes(monkeypatch):
    monkeypatch.setattr(api, "MAX_CHUNK_LOGITS", 50 * 5)
    sizes = []

    class Counted(nn.Linear):
        def forward(self, hidden):
            out = super().forward(hidden)
            sizes.append(out.numel())
            return out

    head = Counted(8, 50)
    hidden = torch.randn(37, 8, requires_grad=True)
    log_prob, _ = scored(hidden, head, *random_edges(2), 50)
    assert len(sizes) == 5 and max(sizes) <= 250
    log_prob.sum().backward()
    assert len(sizes) == 10 and max(sizes) <= 250


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_logits_are_reduced_in_float32(dtype):
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 50, dtype=dtype), torch.randn(37, 8).to(dtype)
    edges = random_edges(3)
    log_prob, entropy, hidden_grad, *_ = run(scored, hidden, head, *edges, 50)
    assert log_prob.dtype == entropy.dtype == torch.float32 and hidden_grad.dtype == dtype
    logits = head(hidden[torch.as_tensor(edges[0])]).double()  # rounded to dtype, as the kernel gets them
    z = logits.log_softmax(-1)[torch.as_tensor(edges[1]), torch.as_tensor(edges[2])]
    assert (log_prob - z).abs().max() < 2e-6


def test_a_rank_without_predictors_gives_zero_gradients_to_everything():
    head, hidden = nn.Linear(8, 50), torch.randn(1, 8, requires_grad=True)
    empty = np.empty(0, np.int64)
    log_prob, entropy = scored(hidden, head, empty, empty, empty, 50)
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        edge_logprobs(torch.zeros(5, 64), nn.Identity(), closed_form_tables(), 64, temperature)


def test_refusals_of_triton_name_the_remedy():
    hidden, head = torch.zeros(5, 8), nn.Linear(8, 64, bias=False)
    with pytest.raises(ValueError, match="backend must be one of auto, reference, triton; got 'eager'"):
        edge_logprobs(hidden, head, closed_form_tables(), 64, backend="eager")
    with pytest.raises(ValueError, match="triton needs a GPU, or TRITON_INTERPRET=1 before the start; .* on cpu"):
        edge_logprobs(hidden, head, closed_form_tables(), 64, backend="triton")
    with pytest.raises(ValueError, match="computes float32, bfloat16 and float16; got torch.float64. Use reference"):
        edge_logprobs(hidden.double(), head.double(), closed_form_tables(), 64, backend="triton")
    for other in (nn.Linear(8, 64), nn.Identity()):
        with pytest.raises(ValueError, match=f"one linear layer without bias or adapter; got {type(other).__name__}"):
            edge_logprobs(hidden, other, closed_form_tables(), 64, backend="triton")


def test_auto_takes_triton_on_gpus_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(packages, "installed", lambda module: module != "triton" or there)
    head, adapted = nn.Linear(8, 64, bias=False), nn.Sequential(nn.Linear(8, 64))
    caplog.set_level("INFO", "cp_engine.kernels.logprob.api")
    api._log_once.cache_clear()

    def choice(device, dtype, head):
        return api.choose("auto", SimpleNamespace(device=torch.device(device), dtype=dtype), head)

    there = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert choice("cuda", dtype, head) == "triton" and choice("cpu", dtype, head) == "reference"
    assert choice("cuda", torch.float64, head) == choice("cuda", torch.bfloat16, adapted) == "reference"
    there = False
    assert choice("cuda", torch.bfloat16, head) == "reference"
    told = "\n".join(caplog.messages)
    assert "log-prob head, torch.bfloat16: backend triton" in told
    assert "torch.float64: backend reference; triton computes float32, bfloat16 and float16" in told
    assert "backend reference; triton needs a head that is one linear layer without bias or adapter; got Seq" in told
    assert "backend reference; triton needs the package triton (pip install triton)" in told
