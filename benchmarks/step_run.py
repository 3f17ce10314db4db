"""An engine that trains one model on trees or on flat rows, with its steps timed.

Shapes: R rollouts of a step.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks import clock
from benchmarks.step_flat import FLAT_CALLS, KEEPING, Rows, fastest, times_of_calls, use_flat_attention
from benchmarks.step_flops import hardware_flops, step_work
from benchmarks.step_models import SHAPES, random_model, shape_config
from cp_engine.config import Config, PackingConfig
from cp_engine.distributed.plain import PlainModel
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.flops import Work, training_flops
from cp_engine.models.hf_attention import ATTENTION_NAME
from cp_engine.rollouts import Rollout

# So small that no weight changes: every step of a run starts from the same weights, and costs what any step does.
STILL = 1e-30
ENGINES = {
    "plain": {"name": "plain"},
    "fsdp2": {"name": "fsdp2"},
    **{f"zero{stage}": {"name": "deepspeed", "stage": stage} for stage in (1, 2, 3)},
}
SAMPLED = 1 << 16  # elements of each parameter's gradient that two runs are compared by
# Largest relative differences between the tree and flat runs of one step. Both are rounded in every layer, so bfloat16
# is compared with rounding in mind: a wrong mask, position or sum is far beyond.
BOUNDS = {
    torch.bfloat16: {"loss_error": 1e-3, "entropy_error": 1e-3, "norm_error": 0.02, "gradient_error": 0.05},
    torch.float32: {"loss_error": 1e-5, "entropy_error": 1e-5, "norm_error": 1e-3, "gradient_error": 1e-3},
}


@dataclass(frozen=True)
class Setup:
    """What of a model is trained, and how; the same for trees and flat rows."""

    model: str
    layers: int | None = None  # of all layers only the first so many
    engine: str = "plain"
    recompute: str = "layers"  # `memory.recompute`
    pack_tokens: int | None = None  # tree tokens of a pack; None: the whole step
    replay: bool = False  # copy shared runs that are predicted cheaper as copies
    dtype: str = "bfloat16"
    liger: bool = False  # `model.liger`
    recompute_layers: int | None = None  # `memory.recompute_layers`
    draw_adapters: bool = True  # random numbers in place of the zeros that half of an adapter starts with

    @property
    def title(self) -> str:
        of_layers = [] if self.layers is None else [f"{self.layers} layers"]
        return ", ".join([self.model, *of_layers, *(["Liger"] if self.liger else [])])

    @property
    def weights(self) -> str:
        shape = SHAPES.get(self.model)
        return f"LoRA {shape.lora.r}" if shape and shape.lora else "full"

    def recompute_of(self, layers: int) -> str:
        """What a record says of recompute in a model of so many layers."""
        if self.recompute_layers is None:
            return self.recompute
        return f"{self.recompute}, {self.recompute_layers} of {layers} layers"

    def config(self, cp: int) -> Config:
        shape = SHAPES.get(self.model)
        return Config.model_validate(
            {
                "model": {"path": self.model, "liger": self.liger},
                "parallel": {"cp": cp},
                "packing": {"max_pack_tokens": self.pack_tokens, "share_or_replay": self.replay},
                "engine": ENGINES[self.engine],
                "memory": {"recompute": self.recompute, "recompute_layers": self.recompute_layers},
                "lora": shape.lora if shape else None,
                "loss": {"name": "grpo"},
                "optimizer": {"lr": STILL},
                "dtype": self.dtype,
            }
        )


@dataclass(frozen=True)
class Measured:
    """One kind of step."""

    seconds: float  # median over the repeats, of the slowest rank
    metrics: dict  # of the last one
    gradients: dict[str, torch.Tensor]  # sampled
    peak_gib: float


class StepRun:
    """An engine with random weights on the ranks' devices."""

    def __init__(self, setup: Setup, ranks: Ranks):
        self.setup, self.ranks, self.device = setup, ranks, ranks.device
        self.config = setup.config(ranks.world)
        dtype, model = getattr(torch, setup.dtype), None
        if setup.model in SHAPES:
            model = random_model(shape_config(setup.model, setup.layers), dtype, self.device)
        self.engine = Engine(self.config, ranks, model)
        self.causal_lm = self.engine.model.causal_lm
        self.recompute = setup.recompute_of(len(self.causal_lm.base_model.layers))
        self.gradients: dict[str, torch.Tensor] = {}
        if isinstance(self.engine.distributed, PlainModel):
            if setup.draw_adapters:
                self._draw_adapters()
            self.engine.distributed.optimizer.register_step_pre_hook(self._sample)

    @torch.no_grad()
    def _draw_adapters(self) -> None:
        drawn = torch.Generator(self.device).manual_seed(1)
        for name, tensor in self.engine.distributed.updated.items():
            if "lora_B" in name:
                tensor.normal_(std=0.02, generator=drawn)
        self.engine.distributed.after_update()

    def _sample(self, *_) -> None:
        for name, parameter in self.engine.distributed.updated.items():
            gradient = parameter.grad.flatten()
            self.gradients[name] = gradient[:: max(1, len(gradient) // SAMPLED)].float()

    def use_trees(self) -> None:
        self.engine.packing = self.config.packing
        self.causal_lm.set_attn_implementation(ATTENTION_NAME)

    def use_rows(self, attention: str, tokens: int) -> None:
        """Train on flat rows from now on, in micro-batches of at most so many tokens; give it `unshared` rollouts.

        Raises:
            ValueError: for an attention whose results cannot be kept, where the tree's are.
        """
        if self.setup.recompute == "layers_keep_mixers" and attention not in KEEPING:
            raise ValueError(
                f"recompute layers_keep_mixers keeps the tree's attention, and flat attention {attention} cannot be "
                f"kept: use --flat {' or '.join(KEEPING)}, or --recompute layers"
            )
        self.engine.packing = PackingConfig(max_pack_tokens=tokens)
        use_flat_attention(self.causal_lm, FLAT_CALLS[attention])

    def steps(self, rollouts: list[Rollout], repeats: int = 1, warm: int = 0) -> Measured:
        """Time whole training steps, the plan of each made while the one before it runs.

        Args:
            warm: steps before those that count. Every micro-batch may have kernels compiled for shapes of its own.
        """
        times = []
        clock.release(self.device)
        for left in reversed(range(warm + repeats)):
            if left == repeats - 1:
                clock.reset_peak(self.device)
            self._meet()
            began = time.perf_counter()
            metrics = self.engine.train_step(rollouts, upcoming=rollouts if left else None)
            clock.wait(self.device)
            times.append(self.slowest(time.perf_counter() - began))
        times = times[warm:]
        return Measured(statistics.median(times), metrics, dict(self.gradients), clock.peak_gib(self.device))

    def _meet(self) -> None:
        clock.wait(self.device)
        if self.ranks.group is not None:
            dist.barrier(group=self.ranks.group)

    def slowest(self, seconds: float) -> float:
        """Of all ranks' seconds the most; collective."""
        if self.ranks.group is None:
            return seconds
        worst = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.ranks.group)
        return float(worst)

    def fits(self, rollouts: list[Rollout]) -> bool:
        """Whether a step of these rollouts fits the device's memory."""
        try:
            self.steps(rollouts)
        except torch.cuda.OutOfMemoryError:
            self.engine.distributed.zero_grad()
            return False
        return True

    def work(self, rollouts: list[Rollout]) -> Work:
        """What the present kind of step does with rollouts."""
        return step_work(rollouts, self.engine.packing, self.engine.config.loss, self.engine.shape)

    def flops(self, work: Work) -> tuple[int, int]:
        """Model FLOPs of a step, and all that are executed."""
        model = self.engine.shape, self.causal_lm.config.vocab_size, self.config.lora is not None
        again = self.setup.recompute, self.setup.recompute_layers
        return training_flops(work, *model), hardware_flops(work, *model, *again)

    def choose_flat(self, names: tuple[str, ...], rollouts: list[Rollout]) -> tuple[str, dict[str, float]]:
        """The fastest flat attention for a micro-batch of these rollouts, and the milliseconds of all.

        Raises:
            ValueError: if none of them runs here.
        """
        lengths = [torch.arange(rollout.length) for rollout in rollouts]
        shape = self.engine.shape
        rows = Rows.of(torch.cat(lengths).numpy(), self.device)
        heads = shape.query_heads, shape.kv_heads, shape.head_dim
        times = times_of_calls(names, rows, *heads, self.engine.dtype)
        return fastest(times), times


def differences(tree: Measured, flat: Measured) -> dict[str, float]:
    """How far two runs of one step differ, relatively: loss, mean entropy, gradient norm, and the sampled gradients.

    ``worst_gradient_error`` is the largest of any parameter with a gradient of at least a thousandth of the largest
    one's.
    """
    found = {
        f"{name}_error": _relative(tree.metrics[key], flat.metrics[key])
        for name, key in (("loss", "loss"), ("entropy", "entropy"), ("norm", "grad_norm"))
    }
    if not flat.gradients:
        return found
    apart = {name: float((tree.gradients[name] - of_flat).norm()) for name, of_flat in flat.gradients.items()}
    size = {name: float(of_flat.norm()) for name, of_flat in flat.gradients.items()}
    counted = [name for name in size if size[name] >= 1e-3 * max(size.values())]
    return found | {
        "gradient_error": math.hypot(*apart.values()) / math.hypot(*size.values()),
        "worst_gradient_error": max(apart[name] / size[name] for name in counted),
    }


def _relative(value: float, truth: float) -> float:
    # The loss of centred advantages may be near zero, where only its size against one advantage tells something.
    return abs(value - truth) / max(abs(truth), 1e-2)


def within_bounds(found: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether two runs of one step agree; a difference that is not finite does not."""
    return all(found[name] <= bound for name, bound in BOUNDS[dtype].items() if name in found)


def within(rollouts: list[Rollout], tokens: int) -> list[Rollout]:
    """The first rollouts, one at least, that have at most so many tokens."""
    total, taken = 0, []
    for rollout in rollouts:
        total += rollout.length
        if taken and total > tokens:
            break
        taken.append(rollout)
    return taken
