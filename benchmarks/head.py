"""Times of the LM head's log-probs and entropies on one GPU: the Triton kernels against the eager reference.

    python -m benchmarks.head --record

Random hidden states and weights in bf16; the head is frozen, as with LoRA, or trained. Results are compared with the
whole head in float64. A method whose values are wrong gets no gain. Times are medians by CUDA events. ``products_ms``:
the matrix products alone, in the same chunks.

Shapes: M predictors, C hidden size, V vocabulary, E edges.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import numpy as np
import torch
from torch import nn

from benchmarks import clock
from benchmarks.attention import installed, print_table
from benchmarks.record import RESULTS, append, stamp
from cp_engine.kernels.logprob import edge_logprobs, edge_tables, triton

PACKAGES = ("torch", "triton")
METHODS = ("reference", "triton")
COLUMNS = ("fwd_ms", "bwd_ms", "products_fwd_ms", "products_bwd_ms", "gain", "over_products", "max_err", "peak_gib")
TEMPERATURE = 0.9
USUAL_CHUNK = triton.CHUNK_BYTES >> 20  # MiB
MOST_ERROR = 1e-2  # relative root mean square; logits and their gradients are rounded to bf16


@dataclass(frozen=True)
class Workload:
    predictors: int
    edges: int
    hidden: int
    vocab: int
    trained: bool


WORKLOADS = {
    "qwen3_8b_lora": Workload(32_768, 36_864, 4_096, 151_936, False),
    "qwen3_5_4b": Workload(32_768, 36_864, 2_560, 248_320, True),
}


class Problem:
    """Random inputs; every predictor has an edge, the first hundredth shares the edges beyond one a predictor."""

    def __init__(self, workload: Workload, device: torch.device, dtype: torch.dtype):
        made = torch.Generator(device).manual_seed(0)
        rng = np.random.default_rng(0)
        self.workload, self.device = workload, device
        count, width = workload.predictors, workload.hidden
        self.hidden = torch.randn(count, width, generator=made, device=device).to(dtype)
        weight = torch.randn(workload.vocab, width, generator=made, device=device) * (3 / width**0.5)
        self.weight = weight.to(dtype)
        extra = rng.integers(0, max(1, count // 100), workload.edges - count)
        predictor = np.sort(np.concatenate([np.arange(count), extra]))
        target = rng.integers(0, workload.vocab, workload.edges)
        self.tables = edge_tables(count, predictor, target, device)
        self.grads = [torch.randn(workload.edges, generator=made, device=device) for _ in range(2)]

    @cached_property
    def truth(self) -> list[torch.Tensor]:
        call = Call(self, "reference", torch.float64)
        return call.results()


class Call:
    """The head by one backend."""

    def __init__(self, problem: Problem, backend: str, dtype: torch.dtype | None = None):
        self.problem, self.backend = problem, backend
        self.hidden = problem.hidden.to(dtype or problem.hidden.dtype, copy=True).requires_grad_()
        count, width = problem.weight.shape
        self.head = nn.Linear(width, count, bias=False, device="meta")
        self.head.weight = nn.Parameter(problem.weight.to(self.hidden.dtype), requires_grad=problem.workload.trained)
        self.inputs = [self.hidden, self.head.weight] if problem.workload.trained else [self.hidden]
        self.out: tuple[torch.Tensor, ...] = ()

    def forward(self) -> tuple[torch.Tensor, ...]:
        p = self.problem
        self.out = ()  # before the next one's are made
        self.out = edge_logprobs(self.hidden, self.head, p.tables, p.workload.vocab, TEMPERATURE, self.backend)
        return self.out

    def backward(self) -> tuple[torch.Tensor, ...]:
        grads = [grad.to(out.dtype) for grad, out in zip(self.problem.grads, self.out, strict=True)]
        return torch.autograd.grad(self.out, self.inputs, grads, retain_graph=True)

    def results(self) -> list[torch.Tensor]:
        return [x.detach() for x in (*self.forward(), *self.backward())]


def products_ms(problem: Problem) -> tuple[float, float]:
    """Times of the products of a forward and a backward pass, whose logits nobody reads."""
    hidden, weight = problem.hidden, problem.weight
    dhidden = torch.empty_like(hidden)
    dweight = torch.zeros_like(weight, dtype=torch.float32) if problem.workload.trained else None

    def forward() -> None:
        for _ in triton.logit_chunks(hidden, weight):
            pass

    def backward() -> None:
        for first, part, logits in triton.logit_chunks(hidden, weight):
            torch.mm(logits, weight, out=dhidden[first : first + len(part)])
            if dweight is not None:
                triton.add_product(dweight, logits.t(), part)

    with torch.no_grad():
        return clock.median_ms(forward, problem.device), clock.median_ms(backward, problem.device)


def errors(found: list[torch.Tensor], truth: list[torch.Tensor]) -> dict[str, float]:
    """Root mean square of the difference over that of the truth."""
    names = ("log_prob", "entropy", "dhidden", "dweight")
    return {
        name: float(f"{float((x.double() - true).norm() / true.norm()):.2e}")
        for name, x, true in zip(names, found, truth, strict=False)
    }


def measure(name: str, method: str, problem: Problem, chunk_mib: int) -> dict:
    """The record of one method, without comparisons."""
    began, device = time.perf_counter(), problem.device
    clock.reset_peak(device)
    held = clock.peak_gib(device)
    call = Call(problem, method)
    call.results()
    forward, backward = clock.median_ms(call.forward, device), clock.median_ms(call.backward, device)
    peak = clock.peak_gib(device) - held
    found = errors(call.results(), problem.truth)
    # The reference's own chunks are smaller: its products are those of the same size.
    products = products_ms(problem)
    usual = method == "reference" or chunk_mib == USUAL_CHUNK
    return {
        "bench": "head",
        "workload": name,
        "method": method if usual else f"{method}_{chunk_mib}_mib",
        "predictors": problem.workload.predictors,
        "hidden": problem.workload.hidden,
        "vocab": problem.workload.vocab,
        "head": "trained" if problem.workload.trained else "frozen",
        "fwd_ms": round(forward, 2),
        "bwd_ms": round(backward, 2),
        "products_fwd_ms": round(products[0], 2),
        "products_bwd_ms": round(products[1], 2),
        "errors": found,
        "max_err": float(np.max(list(found.values()))),  # NaN where there is one
        "peak_gib": round(peak, 2),  # beside the problem
        "seconds": round(time.perf_counter() - began, 1),
    }


def compare(records: list[dict]) -> None:
    """Add ``gain`` over the reference and ``over_products``, time over that of the products; None for wrong values."""

    def total(record: dict, before: str = "") -> float:
        return record[f"{before}fwd_ms"] + record[f"{before}bwd_ms"]

    reference = next((record for record in records if record["method"] == "reference"), None)
    for record in records:
        right = record["max_err"] <= MOST_ERROR  # not so for NaN
        record["gain"] = round(total(reference) / total(record), 3) if right and reference else None
        record["over_products"] = round(total(record) / total(record, "products_"), 3) if right else None


def run_workload(
    name: str, methods: list[str], chunks: list[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[dict]:
    """Records of the methods, printed as a table; ``chunks`` are MiB of logits of the Triton head."""
    problem = Problem(WORKLOADS[name], device, dtype)
    problem.truth  # noqa: B018 - once for all, and not in the peak of any
    clock.release(device)
    records = []
    for method in methods:
        for mib in chunks if method == "triton" else chunks[:1]:
            with chunks_of(mib):
                records.append(measure(name, method, problem, mib))
            clock.release(device)
    compare(records)
    print(f"{name}: {problem.workload}", flush=True)
    print_table(records, ("method", *COLUMNS, "seconds"))
    return records


def chunks_of(mib: int):
    """A context in which the Triton head's chunks have other sizes."""
    return mock.patch.object(triton, "CHUNK_BYTES", mib << 20)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--chunk-mib", nargs="+", type=int, default=[USUAL_CHUNK], help="logits of a chunk of triton")
    parser.add_argument("--record", action="store_true", help="append to the file of results")
    parser.add_argument("--commit", help="the commit to record, where this is a copy without history")
    return parser.parse_args(given)


def main() -> None:
    arguments, began = arguments_of(), time.perf_counter()
    device = torch.device("cuda", 0)
    stamped: dict | None = None
    if arguments.record:
        stamped = stamp(*installed(PACKAGES), card=torch.cuda.get_device_name(), commit=arguments.commit)
    for name in arguments.workloads:
        records = run_workload(name, arguments.methods, arguments.chunk_mib, device)
        if stamped is not None:
            append(records, stamped, RESULTS)
        clock.release(device)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
