"""One decoder layer, forward and backward with the gradients of its weights: tree against flat rows.

The shapes are those of DualKV's table of a Qwen3-8B layer (arXiv 2605.15422): a prompt, a micro-batch of rollouts of
2,048 tokens. Nothing is recomputed.

Shapes: T tree tokens, N flat tokens, n rows of a pack, C hidden size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks import clock
from benchmarks.step_flat import FLAT_CALLS, RIVALS, use_flat_attention
from benchmarks.step_flops import ONE_RANK, PEAK_TFLOPS
from benchmarks.step_models import random_model, shape_config
from benchmarks.step_workloads import unshared, workload_rollouts
from cp_engine.config import LossConfig, PackingConfig
from cp_engine.flops import Work, training_flops
from cp_engine.models.hf_attention import ATTENTION_NAME
from cp_engine.models.liger import use_liger
from cp_engine.models.load import prepare_for_trees
from cp_engine.models.shape import model_shape
from cp_engine.pack import PACK_KEYWORD, DevicePack, device_pack
from cp_engine.placement import place_pack, plan_rank
from cp_engine.rollouts import Rollout
from cp_engine.sharding.forest import Forest
from cp_engine.step import prepare_step

# Gain over flat FlashAttention-2 on one H100, as published.
PUBLISHED = {"dualkv_8k_mb16": 4.28, "dualkv_16k_mb8": 4.41, "dualkv_32k_mb4": 3.29}
MOST_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # relative, in the Frobenius norm


class LayerCall:
    """A layer on the rows of a pack, forward and backward; afterwards ``out`` and ``grads`` are its results.

    Attributes:
        rows: int64 [N] the row of each flat token.
        grads: of ``hidden``, then of the layer's parameters.
    """

    def __init__(self, model, pack: DevicePack, forest: Forest, hidden: torch.Tensor, grad_out: torch.Tensor):
        self.layer, base = model.base_model.layers[0], model.base_model
        self.hidden, self.grad_out = hidden.requires_grad_(), grad_out
        self.arguments = {
            "position_embeddings": base.rotary_emb(hidden, pack.position),
            "position_ids": pack.position,
            "attention_mask": None,
            PACK_KEYWORD: pack,
        }
        self.rows = torch.as_tensor(forest.flat_to_tree(), device=hidden.device)

    def __call__(self) -> None:
        out = self.layer(self.hidden, **self.arguments)
        self.out = out[0] if isinstance(out, tuple) else out
        self.grads = torch.autograd.grad(self.out, (self.hidden, *self.layer.parameters()), self.grad_out)


def one_pack(rollouts: list[Rollout], shape, device: torch.device) -> tuple[Forest, DevicePack]:
    pack = prepare_step(rollouts, PackingConfig(), LossConfig(name="sft"), shape).packs[0]
    placed = place_pack(pack, ONE_RANK, shape)
    return placed.pack.forest, device_pack(plan_rank(placed, 0, "affine", None), None, device)


def measure(call: LayerCall, device: torch.device) -> tuple[float, float]:
    """Milliseconds and peak GiB of forward and backward."""
    call()
    clock.release(device)
    clock.reset_peak(device)
    call()
    peak = clock.peak_gib(device)
    return clock.median_ms(call, device), peak


def apart(tree: LayerCall, flat: LayerCall) -> dict[str, float]:
    """Relative difference of output, input gradient and the worst weight gradient.

    Of the flat rows only the first copy of a shared token gets an output gradient, the tree's own.
    """
    tokens, place = tree.hidden.shape[1], np.unique(tree.rows.cpu().numpy(), return_index=True)[1]
    dense, first = flat.grad_out, torch.as_tensor(place, device=tree.rows.device)  # flat token of each tree token
    flat.grad_out = torch.zeros_like(dense)
    flat.grad_out[0, flat.rows[first]] = tree.grad_out[0]
    flat()
    flat.grad_out = dense
    summed = torch.zeros(tokens, dense.shape[-1], dtype=torch.float32, device=dense.device)
    summed.index_add_(0, tree.rows, flat.grads[0][0, flat.rows].float())
    weights = (_error(a, b) for a, b in zip(tree.grads[1:], flat.grads[1:], strict=True))
    return {
        "out_error": _error(tree.out[0, tree.rows], flat.out[0, flat.rows]),
        "dx_error": _error(tree.grads[0][0], summed),
        "weight_error": max(weights),
    }


def _error(value: torch.Tensor, truth: torch.Tensor) -> float:
    value, truth = value.detach().float(), truth.detach().float()
    return float(f"{float((value - truth).norm() / truth.norm()):.3g}")


def records(arguments: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    """The record of each workload asked for."""
    dtype = getattr(torch, arguments.dtype)
    model = random_model(shape_config("qwen3-8b", 1), dtype, device)
    prepare_for_trees(model)
    if arguments.liger:
        use_liger(model, dtype, device)
    for workload in arguments.workloads:
        rollouts = workload_rollouts(workload, model.config.vocab_size, 1, arguments.limit_tokens, arguments.data)
        names = RIVALS if arguments.flat == "auto" else (arguments.flat,)
        title = "qwen3-8b, one layer" + (", Liger" if arguments.liger else "")
        yield compare(model, title, workload, rollouts, names, device)


def compare(model, title: str, workload: str, rollouts: list[Rollout], names, device: torch.device) -> dict:
    """The record of one workload."""
    began = time.perf_counter()
    dtype, width = next(model.parameters()).dtype, model.config.hidden_size
    shape = model_shape(model.config, dtype.itemsize)
    forest, pack = one_pack(rollouts, shape, device)
    made = torch.Generator(device).manual_seed(0)
    x, dy = (torch.randn(1, forest.tokens, width, dtype=dtype, device=device, generator=made) for _ in range(2))
    model.set_attn_implementation(ATTENTION_NAME)
    tree = LayerCall(model, pack, forest, x, dy)
    ms, gib = measure(tree, device)
    flat = flat_figures(model, tree, unshared(rollouts), shape, names)
    sizes = (forest.tokens, forest.tree_pairs), (len(tree.rows), forest.flat_pairs)
    work = [Work(tokens=tokens, pairs=pairs, predictors=0) for tokens, pairs in sizes]
    flops = [training_flops(of_one, shape, model.config.vocab_size) for of_one in work]
    right = [name for name, error in flat["error"].items() if error <= MOST_ERROR[dtype]]
    gains = {name: round(flat["flat_ms"][name] / ms, 3) for name in right}
    return {
        "bench": "step-layer",
        "workload": workload,
        "model": title,
        "method": "tree",
        "gpus": 1,
        "tree_tokens": work[0].tokens,
        "flat_tokens": work[1].tokens,
        "flop_ratio": round(flops[1] / flops[0], 4),
        "tree_ms": round(ms, 3),
        "tree_gib": gib,
        **flat,
        "mfu": round(flops[0] / (ms / 1e3) / (PEAK_TFLOPS * 1e12), 4),
        "gain_over_fa2": gains.get("fa2"),
        "gain_over_fastest": min(gains.values(), default=None),
        "published_gain": PUBLISHED.get(workload),
        "seconds": round(time.perf_counter() - began, 1),
    }


def flat_figures(model, tree: LayerCall, rows: list[Rollout], shape, names) -> dict[str, dict[str, float]]:
    """Milliseconds, peak GiB and largest error against the tree, by flat attention; what cannot run is left out."""
    device, dtype = tree.hidden.device, tree.hidden.dtype
    forest, pack = one_pack(rows, shape, device)
    row = torch.as_tensor(forest.flat_to_tree(), device=device)
    x = torch.empty(1, forest.tokens, tree.hidden.shape[2], dtype=dtype, device=device)
    x[0, row] = tree.hidden.detach()[0, tree.rows]
    grad_out = torch.randn_like(x)
    found: dict[str, dict[str, float]] = {"flat_ms": {}, "flat_gib": {}, "error": {}}
    for name in names:
        use_flat_attention(model, FLAT_CALLS[name])
        flat = LayerCall(model, pack, forest, x, grad_out)
        try:
            ms, gib = measure(flat, device)
            error = max(apart(tree, flat).values())
        except Exception as problem:  # noqa: BLE001
            # Not installed, not for this device, or no memory: the others count.
            told = (str(problem).splitlines() or [""])[0][:160]
            print(f"  flat {name}: {type(problem).__name__}: {told}", flush=True)
        else:
            found["flat_ms"][name], found["flat_gib"][name], found["error"][name] = round(ms, 3), gib, error
        del flat
        clock.release(device)
    return found
