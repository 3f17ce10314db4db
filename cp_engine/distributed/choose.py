"""From the configuration to the engine that holds the weights."""

from __future__ import annotations

from torch import nn

from cp_engine.config import Config
from cp_engine.distributed.first_rank import load_configured, load_on_first_rank
from cp_engine.distributed.model import DistributedModel
from cp_engine.distributed.ranks import Ranks
from cp_engine.models.tree_causal_lm import TreeCausalLM


def load(config: Config, ranks: Ranks) -> nn.Module:
    """The configured model, for `distribute`; every rank calls it.

    Weights that stay whole are read to every rank's device, those for other engines to the first rank's host memory.

    Raises:
        ValueError: if it cannot be loaded, or not in the way that the engine needs.
    """
    if config.engine.name == "plain":
        return load_configured(config, ranks.device)
    return load_on_first_rank(config, ranks)


def distribute(tree: TreeCausalLM, whole: list[nn.Parameter], config: Config, ranks: Ranks) -> DistributedModel:
    """Give a model to the configured engine; every rank calls it with the same weights, or as `load` left them.

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
