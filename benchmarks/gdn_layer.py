"""Where the time of a whole Gated DeltaNet layer of the 35B-A3B shape goes, on one GPU; bf16.

    python -m benchmarks.gdn_layer [--options] [--record]

Stages are timed inside a forward or a backward, each beside the least time that its traffic takes (`gdn_stages`), the
projections beside that of their products. ``rest`` is what no stage holds: in backward the projections' products, which
are timed alone below, the sum of their four input gradients, and gaps between kernels. The layer is timed with the
library's operators in place of `cp_engine.kernels.gates` too, and its results are compared with theirs. With
``--options`` the element-wise kernels are timed under other launch options as well.

Shapes: T tokens, C hidden size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.attention import installed
from benchmarks.attention_workloads import workload_forest
from benchmarks.clock import median_ms, release
from benchmarks.gdn_layer_options import show_options, stage_calls, time_options
from benchmarks.gdn_ranks import HYBRID, PACKAGES, Layer, Problem, layer_module
from benchmarks.gdn_stages import BYTES_A_MS, REST, STAGES, stage_table
from benchmarks.gdn_tuning import compile_in_parallel, shorten_autotuning
from benchmarks.gdn_workloads import HEADS, plan_of
from benchmarks.record import RESULTS, append, stamp
from cp_engine.kernels import gates
from cp_engine.kernels.gates import api
from cp_engine.layers.gdn_tables import gdn_tables
from cp_engine.machines import peak_flops

WORKLOAD = "art_5k16x100"
# Relative root mean square against the layer with the library's operators, in bf16: fla's bounds for its operator.
BOUNDS = {"out": 5e-3, "dhidden": 8e-3}
PARAMETER_BOUND = 2e-2
FLOPS_A_MS = peak_flops("H200", "bfloat16") / 1e3
LAYER_STAGES = STAGES | {
    "projections": ("torch.nn.functional", "linear"),
    "gates": ("cp_engine.kernels.gates.triton", "input_gates"),
    "qkv": ("cp_engine.kernels.conv.triton", "qkv"),
    "norm": ("cp_engine.kernels.gates.triton", "gated_norm"),
    "norm_backward": ("cp_engine.kernels.gates.triton", "gated_norm_backward"),
    "qkv_backward": ("cp_engine.kernels.conv.triton", "qkv_backward"),
    "rows_backward": ("cp_engine.kernels.conv.triton", "rows_backward"),
    "gates_backward": ("cp_engine.kernels.gates.triton", "input_gates_backward"),
}
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


@contextmanager
def library_gates() -> Iterator[None]:
    """Gates and norm by the library's operators."""
    with mock.patch.object(gates, "choose", eager), mock.patch.object(api, "choose", eager):
        yield


def eager(x: torch.Tensor) -> str:
    return "reference"


def layer_ms(layer: Layer, device: torch.device) -> tuple[float, float]:
    """Of forward, and of forward and backward."""
    return median_ms(layer.forward, device), median_ms(lambda: (layer.forward(), layer.backward()), device)


def projections_ms(module: torch.nn.Module, tokens: int, device: torch.device) -> dict[str, list[float]]:
    """[ms, least ms by products or traffic] of the projections alone, forward and backward."""
    found = {"fwd": [0.0, 0.0], "bwd": [0.0, 0.0]}
    for name in PROJECTIONS:
        weight = getattr(module, name).weight
        x = torch.randn(tokens, weight.shape[1], device=device).to(weight.dtype).requires_grad_()
        out = torch.nn.functional.linear(x, weight)
        dout = torch.randn_like(out)
        products = 2 * tokens * weight.numel() / FLOPS_A_MS
        traffic = (x.numel() + out.numel() + weight.numel()) * x.element_size() / BYTES_A_MS
        calls = {
            "fwd": (lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), 1),
            "bwd": (lambda out=out, leaves=(x, weight), dout=dout: backward(out, leaves, dout), 2),
        }
        for direction, (call, times) in calls.items():
            call()
            found[direction][0] += median_ms(call, device)
            found[direction][1] += times * max(products, traffic)
    return found


def backward(out: torch.Tensor, leaves: tuple[torch.Tensor, ...], dout: torch.Tensor) -> None:
    torch.autograd.grad(out, leaves, dout, retain_graph=True)


def errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative root mean squares."""
    pairs = {name: (found[name].double(), true.double()) for name, true in truth.items()}
    return {name: float((got - true).norm() / true.norm()) for name, (got, true) in pairs.items()}


def measure(module: torch.nn.Module, problem: Problem) -> dict:
    """Times, stages and errors of the layer on all tokens of a problem."""
    device, layer = problem.device, Layer(module, problem, plan_of(problem.forest))
    with library_gates():
        layer.forward()
        layer.backward()
        truth, eager_ms = layer.results(), layer_ms(layer, device)
    layer.forward()
    layer.backward()
    worst = errors(layer.results(), truth)
    return {
        "errors": worst,
        "right": all(error <= BOUNDS.get(name, PARAMETER_BOUND) for name, error in worst.items()),
        "library": eager_ms,
        "ours": layer_ms(layer, device),
        "fwd": stage_table(layer.forward, device, LAYER_STAGES),
        "bwd": stage_table(layer.backward, device, LAYER_STAGES, before=layer.forward),
        "projections": projections_ms(module, problem.forest.tokens, device),
    }


def records_of(workload: str, tokens: int, found: dict) -> list[dict]:
    """The record of the layer, and that of the layer with the library's gates, which it was compared with."""
    records = []
    for method, key in (("ours", "ours"), ("library gates", "library")):
        forward, whole = found[key]
        about = {"bench": "gdn-layer", "workload": workload, "method": method, "gpus": 1, "tokens": tokens}
        records.append(about | {"fwd_ms": round(forward, 3), "bwd_ms": round(whole - forward, 3)})
        records[-1] |= {"right": True, "max_err": None, "errors": {}, "stages": {}, "projections": {}}
    errors = {name: float(f"{error:.3g}") for name, error in found["errors"].items()}
    records[0] |= {"right": found["right"], "errors": errors, "max_err": max(errors.values())}
    records[0] |= {"stages": {direction: found[direction] for direction in ("fwd", "bwd")}}
    alone = found["projections"].items()
    records[0] |= {"projections": {direction: [round(ms, 3) for ms in pair] for direction, pair in alone}}
    return records


def show(found: dict) -> None:
    for name in ("library", "ours"):
        forward, whole = found[name]
        print(f"{name + ' gates':<16} forward {forward:7.3f} ms   forward and backward {whole:7.3f} ms")
    print(f"right: {found['right']}   largest error {max(found['errors'].values()):.2e}")
    if not found["right"]:
        print(found["errors"])
    for direction in ("fwd", "bwd"):
        print(f"{direction:<18} {'ms':>8} {'bound':>8} {'times':>6}")
        alone = {"projections alone": found["projections"][direction]}
        for stage, (ms, bound) in (found[direction] | alone).items():
            times = f"{ms / bound:6.2f}" if bound and stage != REST else ""
            print(f"  {stage:<16} {ms:8.3f} {bound:8.3f} {times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", action="store_true", help="time the element-wise kernels' launch options too")
    parser.add_argument("--record", action="store_true", help="append to the file of results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file than benchmarks/results.jsonl")
    parser.add_argument("--commit", help="the commit to record, where this is a copy without history")
    arguments = parser.parse_args()
    stamped = None
    if arguments.record:
        stamped = stamp(*installed(PACKAGES), card=torch.cuda.get_device_name(), commit=arguments.commit)
    began, device = time.perf_counter(), torch.device("cuda")
    compile_in_parallel("whole_layer")
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    module = layer_module(HEADS, HYBRID.hidden, device, torch.bfloat16)
    shorten_autotuning()
    problem = Problem.make(workload_forest(WORKLOAD, 1), module)
    print(f"{WORKLOAD}: {problem.forest.tokens:,} tokens, {torch.cuda.get_device_name()}")
    found = measure(module, problem)
    show(found)
    if stamped is not None:
        append(records_of(WORKLOAD, problem.forest.tokens, found), stamped, arguments.results)
    if arguments.options:
        release(device)
        tables, weight = gdn_tables(plan_of(problem.forest), 0, device), module.conv1d.weight.detach().squeeze(1)
        show_options(time_options(stage_calls(weight, tables, HEADS, module.norm.variance_epsilon), device))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
