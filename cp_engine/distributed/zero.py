"""DeepSpeed ZeRO: optimizer states (stage 1), gradients too (2), weights too (3) sharded over all ranks."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import nn

from cp_engine.config import Config
from cp_engine.distributed.first_rank import receive, require_same_modules, require_values
from cp_engine.distributed.gradients import clip_gradients
from cp_engine.distributed.mesh import require_process_group
from cp_engine.distributed.model import (
    MOMENTS,
    DistributedModel,
    empty_moments,
    load_tensors,
    make_optimizer,
    set_lr,
)
from cp_engine.distributed.ranks import Ranks
from cp_engine.models.hf_gdn import gdn_layers, parameters_between_exchanges
from cp_engine.models.lora import lora_layers
from cp_engine.models.tree_causal_lm import TreeCausalLM

_BUCKET_ELEMENTS = 200_000_000  # of a reduction or gathering of stages 1 and 2
_STAGE_3_ELEMENTS = 50_000_000  # of a reduction or prefetch of stage 3


def zero_settings(config: Config) -> dict[str, Any]:
    """The DeepSpeed configuration; every default that changes numbers or order is set.

    Accumulation counts 1, since `ZeroModel.backward` says which pack is a step's last.
    """
    engine, low = config.engine, config.dtype == "bfloat16"
    zero: dict[str, Any] = {
        "stage": engine.stage,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "round_robin_gradients": False,
        "reduce_bucket_size": _STAGE_3_ELEMENTS if engine.stage == 3 else _BUCKET_ELEMENTS,
        "allgather_bucket_size": _BUCKET_ELEMENTS,
    }
    if engine.stage == 3:
        threshold = 100_000 if engine.persistence_threshold is None else engine.persistence_threshold
        zero |= {
            "stage3_param_persistence_threshold": threshold,
            "stage3_prefetch_bucket_size": _STAGE_3_ELEMENTS,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }
    if engine.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if engine.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm or 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": low},
        "fp16": {"enabled": False},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


class ZeroModel(DistributedModel):
    """A model inside a DeepSpeed engine, with torch's own optimizer.

    With stage 3 a parameter is whole only between the hooks of a module that is called. Every module is called equally
    often on every rank: the head runs once for each chunk of a rank's predictors, so its weights are gathered for the
    module that scores edges, once a pass, and the head's own hooks are not run.

    Raises:
        ValueError: if DeepSpeed is not installed, or for what it cannot do.
    """

    def __init__(self, tree: TreeCausalLM, whole: list[nn.Parameter], config: Config, ranks: Ranks):
        try:
            import deepspeed
        except ImportError as error:
            raise ValueError("engine.name: deepspeed needs its package: pip install 'cp-engine[deepspeed]'") from error
        _check(tree, whole, config)
        require_process_group(ranks)
        os.environ.setdefault("LOCAL_RANK", str(ranks.device.index or 0))  # it insists, and nothing else is started
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self.tree, self.ranks, self.stage = tree, ranks, config.engine.stage
        self.zero, self.utils = deepspeed.zero, deepspeed.utils
        self.trained = {name: p for name, p in tree.causal_lm.named_parameters() if p.requires_grad}
        settings = zero_settings(config)
        _receive(tree, settings, ranks)
        self.engine, *_ = deepspeed.initialize(
            model=tree,
            model_parameters=list(self.trained.values()),
            optimizer=lambda parameters: make_optimizer(parameters, config.optimizer),
            config=settings,
            dist_init_required=False,
        )
        self.optimizer = self.engine.basic_optimizer  # ours, inside DeepSpeed's
        if self.stage == 3:
            _read_outside_their_module(tree)

    def __call__(self, pack, temperature=1.0, outputs="edges"):
        return self.engine(pack, temperature=temperature, outputs=outputs)

    def backward(self, loss, last):
        # It averages over all ranks, and the loss of a step is a sum over them.
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        self.engine.backward(loss * self.ranks.world)

    def update(self, lr, max_norm):
        set_lr(self.optimizer, lr)
        if self.stage == 0:  # stages from 1 look for gradients that are not finite themselves
            norm = clip_gradients(self.trained.values(), None)
            if not math.isfinite(norm):
                self.zero_grad()
                return norm
            self.engine.step()
            return norm
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        return norm if self.engine.was_step_applied() else math.inf

    def zero_grad(self):
        self.engine.optimizer.zero_grad()

    def full_tensor(self, name, tensor):
        if self.stage < 3:
            return tensor.detach()
        with self.zero.GatheredParameters([tensor] if isinstance(tensor, nn.Parameter) else []):
            return tensor.detach().clone()

    def checkpoint_state(self, copies):
        # Always copies: each rank keeps every world-th parameter, so memory and writing are spread; gathering is
        # collective.
        self._begin_moments()
        kept = {}
        for index, (name, parameter) in enumerate(self.trained.items()):
            whole = {f"weight.{name}": self._full_master(parameter)}
            for key in MOMENTS if self._has_moments else ():
                whole[f"{key}.{name}"] = self._full_moment(parameter, key)
            if index % self.ranks.world == self.ranks.rank:
                kept |= {key: tensor.detach().cpu().clone() for key, tensor in whole.items()}
                if self._has_moments:
                    kept[f"step.{name}"] = self._step_count()
        return kept

    def load_state(self, folder):
        self._begin_moments()
        for name, parameter in self.trained.items():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            whole = {"weight": torch.empty(shape)}
            if self._has_moments:
                whole |= {key: torch.empty(shape) for key in MOMENTS} | {"step": torch.zeros(())}
            load_tensors({f"{key}.{name}": tensor for key, tensor in whole.items()}, folder, self.ranks)
            self._set_full(parameter, {key: tensor.to(self.ranks.device) for key, tensor in whole.items()})
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"].copy_(whole["step"])

    def _begin_moments(self) -> None:
        """Give tensors that no step has updated yet, such as after skipped steps, what the first one would."""
        for updated in self._updated():
            state = self.optimizer.state[updated]
            if not state:
                state |= empty_moments(self.optimizer, updated)
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()  # what its first step does

    def _updated(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates: parameters, or this rank's flat parts of their masters."""
        if self.stage == 0:
            return list(self.trained.values())
        zero = self.engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    @property
    def _has_moments(self) -> bool:
        return isinstance(self.optimizer, torch.optim.AdamW)

    def _step_count(self) -> torch.Tensor:
        return next(state["step"] for state in self.optimizer.state.values() if "step" in state).cpu().clone()

    def _full_master(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter if self.stage == 0 else self.utils.safe_get_full_fp32_param(parameter)

    def _full_moment(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        if self.stage == 0:
            return self.optimizer.state[parameter][key]
        return self.utils.safe_get_full_optimizer_state(parameter, key)

    @torch.no_grad()
    def _set_full(self, parameter: nn.Parameter, whole: dict[str, torch.Tensor]) -> None:
        """Set the master, the moments and the weight itself, each of which this rank may hold a part of."""
        for key in MOMENTS if self._has_moments else ():
            if self.stage == 0:
                self.optimizer.state[parameter][key].copy_(whole[key])
            else:
                self.utils.safe_set_full_optimizer_state(parameter, whole[key], key)
        if self.stage > 0:
            self.utils.safe_set_full_fp32_param(parameter, whole["weight"])
        if self.stage < 3:
            parameter.copy_(whole["weight"])
            return
        with self.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(whole["weight"])


def _check(tree: TreeCausalLM, whole: list[nn.Parameter], config: Config) -> None:
    if config.dtype == "float64":
        raise ValueError("engine.name: deepspeed has no float64; use plain or fsdp2, or dtype: float32")
    if whole:
        raise ValueError(
            "engine.name: deepspeed casts the decays of Gated DeltaNet layers to bfloat16, where rounding moves their "
            "states; use fsdp2, or dtype: float32"
        )
    if config.dtype == "bfloat16" and config.engine.stage == 0:
        raise ValueError(
            "engine.stage: 0 would update bfloat16 weights without float32 masters; use 1, 2 or 3, or plain"
        )
    head = tree.causal_lm.get_output_embeddings()
    if not any(parameter.requires_grad for parameter in tree.parameters()):
        raise ValueError(
            "engine.name: deepspeed has nothing to do for a frozen model (only_scores); use plain or fsdp2"
        )
    if config.engine.stage == 3 and any(module is head for _, module in lora_layers(tree.causal_lm)):
        raise ValueError("lora.targets: with deepspeed stage 3 the head cannot have an adapter; leave it out")


def _receive(tree: TreeCausalLM, settings: dict[str, Any], ranks: Ranks) -> None:
    """Give every rank the first one's weights; with stage 3 a rank then holds one decoder layer whole at a time."""
    import deepspeed

    require_same_modules(tree, ranks)
    receive(tree.buffers(), ranks)
    if settings["zero_optimization"]["stage"] == 3:
        # Of a model without sharded weights `initialize` moves all of them to the device first.
        for layer in tree.causal_lm.base_model.layers:
            receive(layer.parameters(), ranks)
            deepspeed.zero.Init(module=layer, config_dict_or_path=settings)
    receive([parameter for parameter in tree.parameters() if not hasattr(parameter, "ds_id")], ranks)
    require_values(tree)


def _read_outside_their_module(tree: TreeCausalLM) -> None:
    """Have parameters gathered for the modules that read them, where those are not their own; and for the whole GDN
    layer what nobody may gather inside of it."""
    import deepspeed

    for layer in gdn_layers(tree):
        for parameter in (layer.conv1d.weight, *parameters_between_exchanges(layer)):
            deepspeed.zero.register_external_parameter(layer, parameter)
    for parameter in tree.causal_lm.get_output_embeddings().parameters():
        deepspeed.zero.register_external_parameter(tree.scorer, parameter)
