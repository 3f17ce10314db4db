"""What fits into a device: ``packing.max_pack_tokens: auto`` and ``memory.recompute_layers: auto``."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from cp_engine.config import Config, MemoryConfig, PackingConfig
from cp_engine.distributed.ranks import Ranks
from cp_engine.memory import RESERVED, most_tokens, state_bytes
from cp_engine.memory_setup import MemorySetup
from cp_engine.model_sizes import ModelSizes, sizes_of_config
from cp_engine.models.lora import lora_layers
from cp_engine.sharding.cost import MIB

_LOG = logging.getLogger(__name__)
# A rank may own more than the mean of a pack's tokens, and the prediction is good to 10 %.
_SPARE = 0.85


def resolved_packing(config: Config, model: nn.Module, ranks: Ranks) -> PackingConfig:
    """``config.packing`` with a number in place of ``auto``; the same on every rank, which all call it.

    Args:
        model: the causal LM with its adapters, before an engine shards it.

    Raises:
        ValueError: for ``auto`` on CPUs, or where nothing fits.
    """
    if config.packing.max_pack_tokens != "auto":
        return config.packing
    capacity = _smallest_gpu(ranks, "packing.max_pack_tokens: auto", "tokens")
    tokens = pack_budget(capacity, config, *run_sizes(config, model, ranks))
    return config.packing.model_copy(update={"max_pack_tokens": tokens})


def resolved_memory(config: Config, model: nn.Module, ranks: Ranks) -> MemoryConfig:
    """``config.memory`` with a number of layers in place of ``auto``; the same on every rank, which all call it.

    Args:
        model: the causal LM with its adapters, before an engine shards it.

    Raises:
        ValueError: for ``auto`` on CPUs, or where a pack does not fit with all layers recomputed.
    """
    if config.memory.recompute_layers != "auto":
        return config.memory
    capacity = _smallest_gpu(ranks, "memory.recompute_layers: auto", "layers")
    sizes, setup = run_sizes(config, model, ranks)
    count = fewest_layers(capacity, config, sizes, setup)
    if ranks.is_first:
        _LOG.info("memory.recompute_layers: auto recomputes %d of %d decoder layers", count, sizes.layers)
    return config.memory.model_copy(update={"recompute_layers": count})


def _smallest_gpu(ranks: Ranks, setting: str, what: str) -> int:
    """Bytes of the smallest GPU's memory; collective."""
    if ranks.device.type != "cuda":
        raise ValueError(
            f"{setting} is chosen from the memory of a GPU, and these ranks run on CPUs: give a number of {what}"
        )
    capacity = torch.tensor(torch.cuda.mem_get_info(ranks.device)[1], device=ranks.device)
    if ranks.group is not None:
        dist.all_reduce(capacity, op=dist.ReduceOp.MIN, group=ranks.group)
    return int(capacity)


def run_sizes(config: Config, model: nn.Module, ranks: Ranks) -> tuple[ModelSizes, MemorySetup]:
    """What the memory of a run depends on."""
    text = model.config.get_text_config()
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(count for count, requires_grad in counts if requires_grad)
    adapted, frozen = config.lora is not None, not trained
    sizes = sizes_of_config(text.to_dict(), config.model.path)
    sizes = replace(
        sizes,
        parameters=sum(count for count, _ in counts) - (trained if adapted else 0),
        shape=replace(sizes.shape, element_bytes=getattr(torch, config.dtype).itemsize),
    )
    engine = config.engine
    setup = MemorySetup(
        engine=engine.name,
        stage=engine.stage or 0,
        shards=(ranks.per_node or ranks.world) if engine.shard == "node" else ranks.world,
        offload_states=engine.offload == "cpu",
        adapter_parameters=trained if adapted or frozen else None,
        adapter_width=config.lora.r * len(list(lora_layers(model))) // sizes.layers if adapted else 0,
        optimizer_moments=2 if config.optimizer.name == "adamw" else 0,
        # A model that only scores keeps nothing for a backward pass: less than with all layers recomputed.
        recompute="layers" if frozen else config.memory.recompute,
        offload_activations=config.memory.offload_activations,
        triton_attention=ranks.device.type == "cuda",
        triton_gdn=ranks.device.type == "cuda",
        triton_head=ranks.device.type == "cuda",
        recompute_layers=None if config.memory.recompute_layers == "auto" else config.memory.recompute_layers,
        liger=config.model.liger,
    )
    return sizes, setup


def pack_budget(capacity: int, config: Config, model: ModelSizes, setup: MemorySetup) -> int:
    """Tree tokens of a pack, over all context-parallel ranks, whose predicted peak fits into ``capacity`` bytes a rank.

    Raises:
        ValueError: if nothing fits beside weights, gradients and optimizer states.
    """
    tokens = _tokens_that_fit(capacity, config, model, setup)
    if tokens < 2:
        states = sum(state_bytes(model, setup)) / 2**30
        raise ValueError(
            f"packing.max_pack_tokens: auto found no room for a pack: weights, gradients and optimizer states are "
            f"predicted to take {states:.1f} GiB and {RESERVED / 2**30:.0f} GiB are kept free, of "
            f"{capacity / 2**30:.1f} GiB; shard over more ranks (engine.name, engine.stage), train adapters (lora), or "
            "use engine.offload: cpu"
        )
    return tokens


def fewest_layers(capacity: int, config: Config, model: ModelSizes, setup: MemorySetup) -> int:
    """The fewest recomputed layers with which packs of ``packing.max_pack_tokens`` are within `pack_budget`.

    Raises:
        ValueError: if they are not with all layers.
    """
    wanted, most = config.packing.max_pack_tokens, 0
    for count in range(model.layers + 1):
        fits = _tokens_that_fit(capacity, config, model, replace(setup, recompute_layers=count))
        if fits >= wanted:
            return count
        most = max(most, fits)
    raise ValueError(
        f"memory.recompute_layers: auto found no number of layers with which packs of {wanted:,} tokens fit into "
        f"{capacity / 2**30:.1f} GiB: at most {most:,} tokens are predicted to; lower packing.max_pack_tokens, or "
        "shard over more ranks (parallel.cp, engine.name)"
    )


def _tokens_that_fit(capacity: int, config: Config, model: ModelSizes, setup: MemorySetup) -> int:
    cp, shape, budget = config.parallel.cp, model.shape, config.parallel.max_exchange_mib
    row = 0
    if cp > 1 and budget is not None:
        capacity -= budget * MIB
    elif cp > 1:  # at most a rank gathers the keys of the whole pack, in one group of heads
        row = cp * (2 * shape.kv_row_bytes + shape.kv_gradient_bytes)
    return int(_SPARE * most_tokens(capacity, model, setup, row)) * cp
