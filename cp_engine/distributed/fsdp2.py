"""FSDP2 (`torch.distributed.fsdp.fully_shard`): weights, gradients and optimizer states sharded over ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cp_engine.config import Config
from cp_engine.distributed.first_rank import receive, require_same_modules, require_values
from cp_engine.distributed.gradients import sum_gradients
from cp_engine.distributed.mesh import shard_mesh
from cp_engine.distributed.model import TorchModel
from cp_engine.distributed.ranks import Ranks
from cp_engine.models.tree_causal_lm import TreeCausalLM


class Fsdp2Model(TorchModel):
    """One unit a decoder layer; embedding, final norm and head in the root unit, gathered once a forward pass.

    The root stays gathered from its forward to its backward pass, so it does not matter how often a rank calls the
    head. With bfloat16 the shards are the float32 masters, gathered as bfloat16, and gradients are reduced in float32;
    the parameters in ``whole`` stay float32 and whole on every rank, because a unit has one dtype.

    Args:
        tree: every rank's weights become the first rank's, one unit at a time: a unit is whole on a rank's device just
            before it is sharded. Those of other ranks may be on the meta device.
        whole: parameters that must not be cast.
    """

    def __init__(self, tree: TreeCausalLM, whole: list[nn.Parameter], config: Config, ranks: Ranks):
        self.dtypes = {name: parameter.dtype for name, parameter in tree.causal_lm.named_parameters()}
        low = torch.bfloat16 in self.dtypes.values()
        policies = {
            "mesh": shard_mesh(ranks, config.engine.shard == "node", config.parallel.timeout_s),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if low else None,
                reduce_dtype=torch.float32 if low else None,
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
            if config.engine.offload == "cpu"
            else OffloadPolicy(),
            "ignored_params": set(whole),
        }
        require_same_modules(tree, ranks)
        receive([*whole, *tree.buffers()], ranks)
        for unit in (*tree.causal_lm.base_model.layers, tree):
            _receive_unit(unit, policies["ignored_params"], ranks)
            # The root stays gathered.
            fully_shard(unit, reshard_after_forward=unit is not tree, **policies)
        require_values(tree)
        self.whole = [parameter for parameter in whole if parameter.requires_grad]
        updated = {name: p for name, p in tree.causal_lm.named_parameters() if p.requires_grad}
        super().__init__(tree, updated, config.optimizer, ranks)

    def backward(self, loss, last):
        # It averages over all ranks, and the loss of a step is a sum over them.
        (loss * self.ranks.world).backward()
        if last:
            sum_gradients(self.whole, self.ranks)
            for parameter in self.whole:  # these are not among what it averages
                parameter.grad /= self.ranks.world

    def after_forward(self):
        for module in self.tree.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_tensor(self, name, tensor):
        self.after_forward()
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.to(self.ranks.device).full_tensor()
        return tensor.to(self.dtypes.get(name, tensor.dtype))


def _receive_unit(unit: nn.Module, ignored: set[nn.Parameter], ranks: Ranks) -> None:
    """Make what will be sharded of a unit whole, trained parameters in float32 at least."""
    for parameter in unit.parameters():
        if isinstance(parameter, DTensor) or parameter in ignored:
            continue
        receive([parameter], ranks)
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
