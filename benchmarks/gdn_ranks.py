"""A whole Gated DeltaNet layer of the 35B-A3B shape over several GPUs, beside one GPU with as many tokens as each.

    torchrun --nproc-per-node 2 -m benchmarks.gdn_ranks --record

Projections, convolution, gates, recurrence, norm and output gate; bf16. A time is that of the slowest rank from a
common start on the streams. ``ratio`` is that time over the layer's on one GPU with a P-th of the tokens, in the same
run (all GPUs at once, each alone). Results are compared with the layer on one GPU with all tokens; wrong ones get no
ratio. The prediction is the planner's (`cp_engine/sharding/layer_time.py`), for the exchange ``affine``. Stages are
those of rank 0. Where the planner gives GDN layers a layout of their own, the layer works in that one, and ``relay_ms``
is what moving the hidden states around one run of layers takes, forward and backward.

Shapes: T tokens, n local rows, P ranks, C hidden size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import clock
from benchmarks.attention import installed
from benchmarks.attention_layouts import LAYOUTS, spread_layout
from benchmarks.attention_ranks import layer_times, say, start
from benchmarks.attention_workloads import workload_forest
from benchmarks.gdn_relay import NO_MOVES, measure_moves
from benchmarks.gdn_stages import STAGES, stage_table
from benchmarks.gdn_tuning import AUTOTUNE, compile_in_parallel, shorten_autotuning
from benchmarks.gdn_workloads import CONV_WIDTH, HEADS, plan_of, sequences
from benchmarks.record import RESULTS, append, stamp
from cp_engine.layers.gdn_tables import GdnHeads, gdn_tables
from cp_engine.models.hf_gdn import patch_gdn_layers
from cp_engine.pack import PACK_KEYWORD
from cp_engine.sharding.cost import H200, PRESETS
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_layout import PlacedLayers, place_layers
from cp_engine.sharding.gdn_plan import GDN_EXCHANGES, GdnPlan, gdn_plan
from cp_engine.sharding.layer_time import recurrent_time
from cp_engine.sharding.layout import Layout, contiguous_layout
from cp_engine.sharding.measure import Survey, measure_recurrent
from cp_engine.sharding.state_time import chunk_time, crossing_time

HYBRID = PRESETS["qwen3.5-35b-a3b"]
# The mixer alone: no MLP, and no norms and residuals of the decoder layer.
MIXER = replace(HYBRID, mlp_width=0, attention_layers=0, gdn_layers=1)
MIXER_COSTS = replace(H200, passes_forward=0, passes_backward=0)
CHAIN_TOKENS = 65_536  # of one GPU
WORKLOADS: dict[str, Callable[[int], Forest]] = {
    "art_5k16x100": lambda gpus: workload_forest("art_5k16x100", gpus),
    "chain": lambda gpus: sequences([CHAIN_TOKENS * gpus]),
}
# Stages of the layer between the kernels: what moves, and what moving needs.
RANK_STAGES = STAGES | {
    "fetch_rows": ("cp_engine.layers.gdn_mixer", "fetch_rows_raw"),
    "summary": ("cp_engine.kernels.gdn.triton.forward_pass", "run_summary"),
    "hand_on": ("cp_engine.layers.gdn_crossing", "hand_on"),
    "fold": ("cp_engine.layers.gdn_crossing", "fold_entry_states"),
    "entry_cotangents": ("cp_engine.kernels.gdn.triton.walks", "begin_adjoint"),
    "hand_back": ("cp_engine.layers.gdn_crossing", "hand_back"),
    "fold_back": ("cp_engine.layers.gdn_crossing", "fold_exit_cotangents"),
    "rows_home": ("cp_engine.layers.gdn_mixer", "send_rows_home"),
    "rows_to_heads": ("cp_engine.layers.gdn", "rows_to_heads"),
    "heads_to_rows": ("cp_engine.layers.gdn", "heads_to_rows"),
}
# Relative root mean square against one GPU, in bf16. Where cuts lie between chunks both compute the same rows and other
# sums over tokens; where not, chunks are others too.
BOUNDS = {"out": 3e-3, "dhidden": 3e-3}
PARAMETER_BOUND = 5e-3
NOTHING = dict.fromkeys(("forward", "backward", "layer", "exposed"), 0.0)
PACKAGES = ("torch", "triton", "fla-core", "transformers")
COLUMNS = ("fwd_ms", "bwd_ms", "one_gpu_ms", "ratio", "predicted_layer_ms", "predicted_exposed_ms", "predicted_ratio")
COLUMNS += ("relay_ms", "predicted_relay_ms", "max_err", "right", "seconds")


def layer_module(heads: GdnHeads, hidden: int, device, dtype: torch.dtype) -> torch.nn.Module:
    """A GDN layer of `transformers` with our forward: slow decays, so that a wrong state shows; equal on all ranks."""
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

    config = Qwen3_5MoeTextConfig(
        hidden_size=hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=heads.key_heads,
        linear_num_value_heads=heads.value_heads,
        linear_key_head_dim=heads.key_dim,
        linear_value_head_dim=heads.value_dim,
        linear_conv_kernel_dim=CONV_WIDTH,
    )
    made = torch.Generator().manual_seed(0)
    layer = Qwen3_5MoeGatedDeltaNet(config, 0)
    with torch.no_grad():
        for name, parameter in sorted(layer.named_parameters()):
            if name == "A_log":
                parameter.uniform_(-5.0, -2.0, generator=made)
            elif name == "dt_bias":
                parameter.uniform_(-3.0, -1.0, generator=made)
            elif name != "norm.weight":
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=made)
    layer.to(device, dtype)
    patch_gdn_layers(layer)
    return layer


@dataclass(eq=False)
class Problem:
    """Rows of a whole forest and the gradient of the layer's output, [T, C] each."""

    forest: Forest
    hidden: torch.Tensor
    dout: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @classmethod
    def make(cls, forest: Forest, module: torch.nn.Module):
        weight = module.out_proj.weight
        made = torch.Generator(weight.device).manual_seed(0)
        shape = (forest.tokens, weight.shape[0])
        drawn = (torch.randn(shape, device=weight.device, generator=made).to(weight.dtype) for _ in range(2))
        return cls(forest, *drawn)


class Layer:
    """One rank's rows through the layer; with all of them and no group, the layer on one GPU."""

    def __init__(self, module: torch.nn.Module, problem: Problem, plan: GdnPlan, tokens=None, group=None):
        self.module, self.problem = module, problem
        rank = 0 if group is None else dist.get_rank(group)
        self.pack = SimpleNamespace(gdn=gdn_tables(plan, rank, problem.device), group=group)
        self.tokens = slice(None) if tokens is None else torch.as_tensor(tokens, device=problem.device)
        self.hidden, self.dout = (self._local(x)[None] for x in (problem.hidden, problem.dout))
        self.hidden.requires_grad_()

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[self.tokens]
        return rows if len(rows) else x.new_zeros((1, x.shape[1]))

    def forward(self) -> None:
        self.out = self.module(self.hidden, **{PACK_KEYWORD: self.pack})

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.out, (self.hidden, *self.module.parameters()), self.dout)

    def results(self) -> dict[str, torch.Tensor]:
        """Results on this rank's rows and this rank's share of the parameter gradients."""
        names = ("dhidden", *(name for name, _ in self.module.named_parameters()))
        found = {"out": self.out.detach(), **dict(zip(names, self.grads, strict=True))}
        rows = len(self.problem.hidden[self.tokens])
        return {name: x[0, :rows] if name in BOUNDS else x for name, x in found.items()}


def alone(module: torch.nn.Module, problem: Problem) -> Layer:
    """The layer on one GPU, run once."""
    layer = Layer(module, problem, plan_of(problem.forest))
    layer.forward()
    layer.backward()
    return layer


def errors(layer: Layer, truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative root mean square against one GPU with all rows, over all ranks. Every rank must call it."""
    found = {}
    for name, got in layer.results().items():
        true, got = truth[name].double(), got.double()
        if name in BOUNDS:
            true = true[layer.tokens]
            squares = torch.stack([(got - true).square().sum(), true.square().sum()])
            dist.all_reduce(squares)
        else:
            dist.all_reduce(got)
            squares = torch.stack([(got - true).square().sum(), true.square().sum()])
        found[name] = float((squares[0] / squares[1]).sqrt())
    return found


def place(layout: str, forest: Forest, world: int) -> tuple[Forest, Layout, PlacedLayers | None]:
    """A forest, its trees perhaps in another order, who owns it in GDN layers, and the plan that says so."""
    if layout == "planner":
        placed = place_layers(forest, world, model=HYBRID)
        return placed.forest, placed.gdn_layout or placed.layout, placed
    return forest, spread_layout(forest, world) if layout == "spread" else contiguous_layout(forest, world), None


def predicted(forest: Forest, layout: Layout) -> dict[str, float]:
    """Of the layer without MLP under the exchange affine, ms of the slowest rank, as in `NOTHING`."""
    parts = recurrent_time(*measure_recurrent(Survey(forest), layout), MIXER, MIXER_COSTS)
    forward, backward = (float(part.total.max()) / 1e6 for part in parts)
    exposed = sum(float(part.exposed[part.total.argmax()]) for part in parts) / 1e6
    return {"forward": forward, "backward": backward, "layer": forward + backward, "exposed": exposed}


def predicted_path(forest: Forest, layout: Layout) -> dict[str, dict[str, float]]:
    """The same times in parts: what needs no state, passes run again for other ranks (for affine maps only), waiting in
    all rounds, state passes, and what is computed from states (output, dqkwg)."""
    tokens, counts = measure_recurrent(Survey(forest), layout)
    layers = recurrent_time(tokens, counts, MIXER, MIXER_COSTS)
    crossings = crossing_time(tokens, counts, MIXER, MIXER_COSTS)
    costs = (H200.chunk_states, H200.chunk_output), (H200.chunk_both_passes, H200.chunk_dqkwg)
    path = {}
    for direction, part, crossing, (passes, after) in zip(("fwd", "bwd"), layers, crossings, costs, strict=True):
        rank = int(part.total.argmax())
        states, output = (chunk_time(counts.chunks, cost, MIXER)[rank] for cost in (passes, after))
        again = crossing.again[rank]
        inside = part.compute[rank] - again - states - output
        named = {"inside": inside, "again": again, "wait": part.exposed[rank], "states": states, "output": output}
        path[direction] = {name: int(ns) / 1e6 for name, ns in named.items()}
    return path


def measure_layer(layer: Layer, truth: dict[str, torch.Tensor]) -> dict:
    """Times, errors and stages of a layer, the same on all ranks but for the stages. Every rank must call it."""
    device = layer.problem.device
    layer.forward()
    layer.backward()
    found = errors(layer, truth)
    right = all(error <= BOUNDS.get(name, PARAMETER_BOUND) for name, error in found.items())
    clock.reset_peak(device)
    times = layer_times(layer)
    peak = torch.tensor(clock.peak_gib(device), dtype=torch.float64, device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {
        "fwd_ms": round(times.forward, 3),
        "bwd_ms": round(times.layer - times.forward, 3),
        "right": right,
        "max_err": float(f"{np.max(list(found.values())):.3g}"),
        "errors": {name: float(f"{error:.3g}") for name, error in found.items()},
        "peak_gib": round(float(peak), 2),
        "stages": {
            "fwd": stage_table(layer.forward, device, RANK_STAGES),
            "bwd": stage_table(layer.backward, device, RANK_STAGES, before=layer.forward),
        },
    }


def run_workload(
    workload: str, forests: Callable[[int], Forest], module: torch.nn.Module, options: argparse.Namespace
) -> list[dict]:
    """All layouts and exchanges of one workload. Every rank must call it; only stages differ between ranks."""
    world, group = dist.get_world_size(), dist.group.WORLD
    share, whole = forests(1), forests(world)
    times = layer_times(alone(module, Problem.make(share, module)))
    one_gpu = {"forward": times.forward, "layer": times.layer}
    one_gpu["predicted"] = predicted(share, contiguous_layout(share, 1))["layer"]
    shown = "  ".join(f"{name} {ms:.3f}" for name, ms in one_gpu.items())
    say(f"{workload}: {whole.tokens:,} tokens on {world} GPUs; one GPU, {share.tokens:,} tokens, ms: {shown}")
    records = []
    for name in options.layouts:
        forest, layout, placed = place(name, whole, world)
        problem = Problem.make(forest, module)
        truth, ahead = alone(module, problem).results(), predicted(forest, layout)
        shape = replace(HYBRID, hidden=problem.hidden.shape[1])
        moves = NO_MOVES if placed is None else measure_moves(placed, shape, problem.device, problem.hidden.dtype)
        for exchange in options.exchanges:
            began = time.perf_counter()
            plan = gdn_plan(forest, layout, dist.get_rank(), exchange, CONV_WIDTH)
            layer = Layer(module, problem, plan, layout.rank_tokens(dist.get_rank()), group)
            about = {"bench": "gdn-ranks", "workload": workload, "method": "layer", "exchange": exchange}
            about |= {"layout": name, "gpus": world, "tokens": forest.tokens, **moves}
            record = about | measure_layer(layer, truth)
            record |= beside(record, one_gpu, ahead if exchange == "affine" else None)
            record["predicted_path"] = predicted_path(forest, layout) if exchange == "affine" else None
            record |= {"autotune": AUTOTUNE, "seconds": round(time.perf_counter() - began, 1)}
            show(record)
            records.append(record)
            del layer
            clock.release(problem.device)
    return records


def beside(record: dict, one_gpu: dict[str, float], ahead: dict[str, float] | None) -> dict:
    """One GPU's times and the prediction beside a measurement; None where the planner has no model of the exchange."""
    total = record["fwd_ms"] + record["bwd_ms"]
    found = {"one_gpu_fwd_ms": round(one_gpu["forward"], 3), "one_gpu_ms": round(one_gpu["layer"], 3)}
    found["ratio"] = round(total / one_gpu["layer"], 4) if record["right"] else None
    known = ahead is not None
    found |= {f"predicted_{name}_ms": round(ms, 3) if known else None for name, ms in (ahead or NOTHING).items()}
    found["predicted_ratio"] = round(ahead["layer"] / one_gpu["predicted"], 4) if known else None
    return found


def show(record: dict) -> None:
    shown = "  ".join(f"{column} {record[column]}" for column in COLUMNS)
    say(f"  {record['layout']:<10}  {record['exchange']:<8}  {shown}")
    if not record["right"]:
        say(f"    {record['errors']}")
    for direction, stages in record["stages"].items():
        say(f"    {direction}: " + "  ".join(f"{stage} {ms}" for stage, (ms, _) in stages.items()))


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["planner", "spread"])
    parser.add_argument("--exchanges", nargs="+", choices=GDN_EXCHANGES, default=list(GDN_EXCHANGES))
    parser.add_argument("--record", action="store_true", help="append to the file of results, workload by workload")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where --record appends")
    parser.add_argument("--commit", help="the commit to record, where this is a copy without history")
    return parser.parse_args(given)


def main() -> None:
    arguments, began = arguments_of(), time.perf_counter()
    compile_in_parallel("layer")
    device = start()
    say(f"compiled and started in {time.perf_counter() - began:.0f} s")
    module = layer_module(HEADS, HYBRID.hidden, device, torch.bfloat16)
    shorten_autotuning()
    stamped = None
    if arguments.record and dist.get_rank() == 0:
        stamped = stamp(*installed(PACKAGES), card=torch.cuda.get_device_name(), commit=arguments.commit)
    for workload in arguments.workloads:
        records = run_workload(workload, WORKLOADS[workload], module, arguments)
        if stamped is not None:
            append(records, stamped, arguments.results)
        clock.release(device)
    say(f"{time.perf_counter() - began:.0f} s in all")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
