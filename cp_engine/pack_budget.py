"""The pack budget that fits into a device: ``packing.max_pack_tokens: auto``."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from cp_engine.config import Config, PackingConfig
from cp_engine.distributed.ranks import Ranks
from cp_engine.memory import RESERVED, MemorySetup, most_tokens, state_bytes
from cp_engine.model_sizes import ModelSizes, sizes_of_config
from cp_engine.models.lora import lora_layers
from cp_engine.sharding.cost import MIB

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
    if ranks.device.type != "cuda":
        raise ValueError(
            "packing.max_pack_tokens: auto is chosen from the memory of a GPU, and these ranks run on CPUs: give a "
            "number of tokens"
        )
    capacity = torch.tensor(torch.cuda.mem_get_info(ranks.device)[1], device=ranks.device)
    if ranks.group is not None:
        dist.all_reduce(capacity, op=dist.ReduceOp.MIN, group=ranks.group)
    tokens = pack_budget(int(capacity), config, *run_sizes(config, model, ranks))
    return config.packing.model_copy(update={"max_pack_tokens": tokens})


def run_sizes(config: Config, model: nn.Module, ranks: Ranks) -> tuple[ModelSizes, MemorySetup]:
    """What the memory of a run depends on."""
    text = model.config.get_text_config()
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(count for count, requires_grad in counts if requires_grad)
    adapted = config.lora is not None
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
        adapter_parameters=trained if adapted else None,
        adapter_width=config.lora.r * len(list(lora_layers(model))) // sizes.layers if adapted else 0,
        optimizer_moments=2 if config.optimizer.name == "adamw" else 0,
        recompute=config.memory.recompute,
        offload_activations=config.memory.offload_activations,
        triton_attention=ranks.device.type == "cuda",
        triton_gdn=ranks.device.type == "cuda",
        triton_head=ranks.device.type == "cuda",
    )
    return sizes, setup


def pack_budget(capacity: int, config: Config, model: ModelSizes, setup: MemorySetup) -> int:
    """Tree tokens of a pack, over all context-parallel ranks, whose predicted peak fits into ``capacity`` bytes a rank.

    Raises:
        ValueError: if nothing fits beside weights, gradients and optimizer states.
    """
    cp, shape, budget = config.parallel.cp, model.shape, config.parallel.max_exchange_mib
    row = 0
    if cp > 1 and budget is not None:
        capacity -= budget * MIB
    elif cp > 1:  # at most a rank gathers the keys of the whole pack, in one group of heads
        row = cp * (2 * shape.kv_row_bytes + shape.kv_gradient_bytes)
    tokens = int(_SPARE * most_tokens(capacity, model, setup, row)) * cp
    if tokens < 2:
        states = sum(state_bytes(model, setup)) / 2**30
        raise ValueError(
            f"packing.max_pack_tokens: auto found no room for a pack: weights, gradients and optimizer states are "
            f"predicted to take {states:.1f} GiB and {RESERVED / 2**30:.0f} GiB are kept free, of "
            f"{capacity / 2**30:.1f} GiB; shard over more ranks (engine.name, engine.stage), train adapters (lora), or "
            "use engine.offload: cpu"
        )
    return tokens
