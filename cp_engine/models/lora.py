"""Low-rank adapters (LoRA, Hu et al. 2021) through `peft`, on modules that are called as modules."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from cp_engine.config import LoraSection


def add_lora(causal_lm: nn.Module, lora: LoraSection, seed: int) -> None:
    """Freeze a causal LM and give its targets adapters, in place; the same on every rank for a seed.

    Raises:
        ValueError: if `peft` is not installed, or a target is no linear module, is tied to another weight, or is not
            in the model.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora needs the package peft: pip install 'cp-engine[lora]'") from error
    names = lora_targets(causal_lm, lora.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config(lora, names), causal_lm)
    for _, layer in lora_layers(causal_lm):
        if not isinstance(layer.base_layer, nn.Linear):
            continue  # stacked experts, whose adapters are on parameters
        layer.forward = MethodType(_adapted, layer)
        layer.lora_A["default"].forward = MethodType(_lowered, layer.lora_A["default"])
        layer.lora_B["default"].forward = MethodType(_added, layer.lora_B["default"])


def _adapted(self, x: torch.Tensor) -> torch.Tensor:
    """``W x + s B (A x)``, [.., in] -> [.., out], of `peft`'s linear layer, without its passes over whole tensors for
    the adapter: both sums, of the outputs and of the gradients of x, are taken inside products."""
    low, rows = self.lora_A["default"](x.flatten(0, -2))
    out = self.lora_B["default"](low, self.base_layer(rows), self.scaling["default"])
    return out.view(*x.shape[:-1], out.shape[-1])


def _lowered(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A x``, and x for the frozen product alone. A module call, which engines' hooks see."""
    # Where x needs no gradient the frozen product would compute one for the second output.
    return _Lowered.apply(rows, self.weight) if rows.requires_grad else (nn.functional.linear(rows, self.weight), rows)


class _Lowered(torch.autograd.Function):
    """[n, in], [r, in] -> [n, r] and x once more; the gradient of the second is added to inside the product."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight.T, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dlow: torch.Tensor, dx: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        # The frozen product alone reads the second output, so nobody else holds its gradient.
        dx = dx.addmm_(dlow, weight) if ctx.needs_input_grad[0] else None
        return dx, dlow.T @ x if ctx.needs_input_grad[1] else None


def _added(self, low: torch.Tensor, base: torch.Tensor, scaling: float) -> torch.Tensor:
    """``base + scaling * low B^T``, the sum inside the product. A module call, which engines' hooks see."""
    # Hooks of DeepSpeed hand out views of their own, which autograd does not let anyone write to.
    add = base.addmm if base._is_view() else base.addmm_
    return add(low, self.weight.T, alpha=scaling)


def peft_config(lora: LoraSection, names: list[str]):
    """The adapters as a `peft` configuration."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,  # a shared token would be dropped differently in each rollout
        bias="none",
        target_modules=names,
        task_type="CAUSAL_LM",
    )


def lora_targets(causal_lm: nn.Module, targets: tuple[str, ...] | str) -> list[str]:
    """Full names of the modules that targets name by their last part; all linear ones of the layers for all-linear.

    An adapter lives in its module's forward, so only modules that are called as such can have one. The tree layers
    read the convolution, the decays and the embedding by their weights.

    Raises:
        ValueError: as `add_lora`.
    """
    linear = {name: module for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)}
    head = causal_lm.get_output_embeddings()
    if targets == "all-linear":
        return [name for name, module in linear.items() if module is not head]
    chosen = []
    for target in targets:
        found = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not found:
            raise _refusal(causal_lm, target, linear)
        if any(linear[name] is head for name in found) and head.weight is causal_lm.get_input_embeddings().weight:
            raise ValueError(
                f"lora.targets: {target!r} is tied to the embedding, so an adapter on it could not be merged; leave it "
                "out"
            )
        chosen += found
    return list(dict.fromkeys(chosen))


def _refusal(causal_lm: nn.Module, target: str, linear: dict[str, nn.Module]) -> ValueError:
    known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    others = [*causal_lm.named_modules(), *causal_lm.named_parameters()]
    other = next((value for name, value in others if name == target or name.endswith(f".{target}")), None)
    if other is None:
        return ValueError(f"lora.targets: the model has no module {target!r}; its linear modules are {known}")
    kind = "a parameter" if isinstance(other, nn.Parameter) else f"a {type(other).__name__}"
    return ValueError(
        f"lora.targets: {target!r} is {kind}, not a linear module; the layers read its weight, which an adapter would "
        f"not change. Choose from {known}"
    )


def lora_layers(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules that have an adapter."""
    return ((name, module) for name, module in causal_lm.named_modules() if hasattr(module, "lora_A"))


def adapter_name(parameter: str) -> str:
    """Name in a `peft` adapter file of an adapter's parameter."""
    return "base_model.model." + parameter.replace(".default.", ".")
