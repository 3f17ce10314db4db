"""From the configuration to the engine that holds the weights."""

from __future__ import annotations

import torch
from torch import nn

from cp_engine.config import Config
from cp_engine.distributed.model import DistributedModel
from cp_engine.distributed.ranks import Ranks
from cp_engine.models.tree_causal_lm import TreeCausalLM


def distribute(tree: TreeCausalLM, whole: list[nn.Parameter], config: Config, ranks: Ranks) -> DistributedModel:
    """Give a model to the configured engine; every rank calls it with the same weights.

    Args:
        whole: parameters that stay float32 in a bfloat16 model.

    Raises:
        ValueError: if the engine is not installed or cannot do what the configuration asks for.
    """
    if config.engine.name == "plain":
        from cp_engine.distributed.plain import PlainModel

        return PlainModel(tree, config.optimizer, ranks)
    if config.engine.name == "fsdp2":
        from cp_engine.distributed.fsdp2 import Fsdp2Model

        return Fsdp2Model(tree, whole, config, ranks)
    from cp_engine.distributed.zero import ZeroModel

    return ZeroModel(tree, whole, config, ranks)


def load_device(config: Config, ranks: Ranks) -> torch.device:
    """Where the weights are read to: host memory when an engine shards them, so that no device holds them whole."""
    return ranks.device if config.engine.name == "plain" else torch.device("cpu")
