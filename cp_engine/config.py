"""The configuration of a run: one typed source, read from YAML and command-line overrides.

Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cp_engine.losses.settings import LossConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


# Both checks come before the type's own, which would name each member of a union in words of its own.
def _number_auto_or_null(least: int) -> BeforeValidator:
    def check(value: Any) -> int | str | None:
        number = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        if not (number and value >= least) and value not in (None, "auto"):
            raise ValueError(f"expected a whole number of at least {least}, auto, or null; got {value!r}")
        return value

    return BeforeValidator(check)


def _names_or_all_linear(value: Any) -> Any:
    listed = isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value)
    if not listed and value != "all-linear":
        example = value if isinstance(value, str) else "q_proj"
        raise ValueError(
            f"expected a list of names of linear modules, such as [{example}], or all-linear; got {value!r}"
        )
    return value


class ModelConfig(_Section):
    path: str
    """A local Hugging Face folder, or a random preset (`cp_engine/models/presets.py`)."""
    vocab_size: int | None = Field(None, ge=2)
    """Vocabulary of a random preset; a folder brings its own."""
    seed: int = 0
    """Seed of a preset's random weights."""
    liger: bool = False
    """Norms, SwiGLU and rotary embeddings on Liger's kernels, which round differently; for GPUs (docs/engines.md)."""


class DataConfig(_Section):
    rollouts: str
    """JSONL or JSONL.gz file (docs/rollouts.md)."""
    limit: int | None = Field(None, ge=1)
    """Use the first so many rollouts of the file."""
    limit_per_group: int | None = Field(None, ge=1)
    """Use the first so many rollouts of each group."""
    groups_per_step: int | None = Field(None, ge=1)
    """Groups in a step, in an order drawn from the seed for each pass over the file; null takes all every step."""


class ParallelConfig(_Section):
    dp: int = Field(1, ge=1)
    """Data-parallel groups: the packs of a step are dealt to them. dp x cp rank processes run."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks, which share each pack. Neighbouring ranks form a group."""
    layout: Literal["balanced", "contiguous"] = "balanced"
    """Which rank owns which tokens: by predicted step time, or equal ranges of the depth-first order."""
    exchange: Literal["auto", "gather", "ring", "ulysses", "ulysses_gather"] = "auto"
    """How softmax attention crosses ranks; auto takes the one of the first three predicted fastest for each pack."""
    ulysses_ranks: int | None = Field(None, ge=2)
    """For ulysses_gather: so many neighbouring ranks share the heads, and keys are gathered between such teams."""
    max_exchange_mib: int | None = Field(None, ge=1)
    """MiB of exchange buffers that one attention layer may hold on a rank; auto takes an exchange that keeps to it."""
    transport: Literal["auto", "peer", "collective"] = "auto"
    """What carries attention's rows, and history rows and states of Gated DeltaNet: peer reads the memory of ranks on
    the same host, collective is NCCL or gloo, auto takes peer where it can run."""
    gdn_exchange: Literal["affine", "ulysses"] = "affine"
    """How Gated DeltaNet states cross ranks."""
    gdn_layout: Literal["auto", "same", "own"] = "auto"
    """Which rank owns which tokens in Gated DeltaNet layers: the same as in all others, or other ones, between which
    hidden states move before and after every run of such layers. auto takes what is predicted faster for each pack."""
    timeout_s: int = Field(600, ge=1)
    """Seconds a rank waits for the others in a collective before it fails."""

    @model_validator(mode="after")
    def _teams_divide_the_ranks(self) -> ParallelConfig:
        if (self.ulysses_ranks is not None) != (self.exchange == "ulysses_gather"):
            raise ValueError(
                "ulysses_ranks is set for exchange: ulysses_gather and only for it; exchange is "
                f"{self.exchange}, ulysses_ranks is {self.ulysses_ranks}"
            )
        if self.ulysses_ranks is not None and self.cp % self.ulysses_ranks:
            raise ValueError(f"ulysses_ranks must divide cp; got ulysses_ranks {self.ulysses_ranks} and cp {self.cp}")
        return self

    @model_validator(mode="after")
    def _own_layout_is_of_states(self) -> ParallelConfig:
        if self.gdn_layout == "own" and self.gdn_exchange == "ulysses":
            raise ValueError(
                "gdn_layout: own keeps states from crossing ranks, and with gdn_exchange: ulysses none do; use "
                "gdn_exchange: affine or gdn_layout: same"
            )
        return self

    @model_validator(mode="after")
    def _budget_steers_a_choice(self) -> ParallelConfig:
        if self.max_exchange_mib is not None and self.exchange != "auto":
            raise ValueError(
                f"max_exchange_mib only steers exchange: auto, and exchange is {self.exchange}; leave one of them out"
            )
        return self


class PackingConfig(_Section):
    share: Literal["batch", "group"] = "batch"
    """Share prefixes over the whole step, or only inside a group."""
    max_pack_tokens: Annotated[int | str | None, _number_auto_or_null(2)] = None
    """Most tree tokens that go through the model at once, over all ranks of a data-parallel group; null gives each
    group one pack, auto takes as many as are predicted to fit into a GPU's memory (docs/memory.md). Packs are smaller
    where that keeps all groups busy in as few rounds."""
    share_or_replay: bool = False
    """Copy a short shared run for each of its branches where the cost model predicts that sharing it costs more (many
    branches of few tokens). Its prices are those of an H200, so it is off where nobody asked for it."""


class EngineConfig(_Section):
    name: Literal["plain", "fsdp2", "deepspeed"] = "plain"
    """Who holds weights, gradients and optimizer states: whole on every rank, or sharded (docs/engines.md)."""
    stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage, for deepspeed: what is sharded is nothing, optimizer states, gradients too, weights too."""
    shard: Literal["all", "node"] = "all"
    """fsdp2: over all ranks, or within a machine and replicated over machines."""
    offload: Literal["none", "cpu"] = "none"
    """Keep sharded weights and optimizer states in host memory (deepspeed: what its stage shards)."""
    persistence_threshold: int | None = Field(None, ge=0)
    """deepspeed stage 3: smaller parameters stay whole on every rank; null means its default of 100,000 elements."""

    @model_validator(mode="after")
    def _settings_belong_to_the_engine(self) -> EngineConfig:
        if (self.stage is not None) != (self.name == "deepspeed"):
            raise ValueError(f"stage is set for deepspeed and only for it; name is {self.name}, stage is {self.stage}")
        if self.shard == "node" and self.name != "fsdp2":
            raise ValueError(f"shard: node is a setting of fsdp2, and name is {self.name}")
        if self.offload == "cpu" and (self.name == "plain" or self.stage == 0):
            raise ValueError("offload: cpu needs sharded optimizer states: fsdp2, or deepspeed with stage 1, 2 or 3")
        if self.persistence_threshold is not None and self.stage != 3:
            raise ValueError("persistence_threshold is a setting of deepspeed stage 3")
        return self


class MemoryConfig(_Section):
    recompute: Literal["none", "layers", "layers_keep_mixers"] = "none"
    """What decoder layers compute again in backward instead of keeping it (docs/memory.md): nothing; all but what
    exchanges brought from other ranks; or all but that and the outputs of attention and Gated DeltaNet kernels."""
    recompute_layers: Annotated[int | str | None, _number_auto_or_null(1)] = None
    """Recompute so many decoder layers, the first ones; null means all of them, auto as few as are predicted to make a
    pack of packing.max_pack_tokens fit into a GPU's memory."""
    offload_activations: bool = False
    """Keep what recomputed layers keep in host memory; for GPUs."""

    @model_validator(mode="after")
    def _layers_are_recomputed(self) -> MemoryConfig:
        if self.recompute_layers is not None and self.recompute == "none":
            raise ValueError(
                f"recompute_layers is {self.recompute_layers}, and recompute is none; set recompute: layers or "
                "layers_keep_mixers"
            )
        if self.offload_activations and self.recompute == "none":
            raise ValueError(
                "offload_activations moves what recomputed layers keep, and recompute is none; set recompute: layers "
                "or layers_keep_mixers"
            )
        return self


class LoraSection(_Section):
    r: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / r."""
    targets: Annotated[tuple[str, ...] | Literal["all-linear"], BeforeValidator(_names_or_all_linear)] = "all-linear"
    """Names (last parts) of linear modules that get an adapter; all-linear takes every one of the decoder layers."""


class OptimizerConfig(_Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """sgd has no momentum; it shows rounding as it is, which adamw turns into whole steps."""
    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm; null leaves them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from lr to final_lr between the warm-up and the last of `steps` optimizer steps."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises to lr."""
    final_lr: float | None = Field(None, ge=0)
    """Learning rate of the last step of a linear or cosine schedule; null means 0."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """When a gradient is not finite the weights stay as they are; the step raises, or is reported as skipped."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> OptimizerConfig:
        moments = (self.betas, self.eps)
        if self.name == "sgd" and moments != tuple(type(self).model_fields[f].default for f in ("betas", "eps")):
            raise ValueError("betas and eps are settings of adamw, and name is sgd")
        if self.schedule == "constant" and self.final_lr is not None:
            raise ValueError("final_lr is a setting of the linear and cosine schedules, and schedule is constant")
        return self


class CheckpointConfig(_Section):
    every: int = Field(ge=1)
    """Optimizer steps between checkpoints."""
    keep: int = Field(2, ge=1)
    """How many of them stay."""
    resume: Literal["auto", "never"] = "auto"
    """auto goes on from the last complete checkpoint in the output folder; never starts anew."""
    asynchronous: bool = False
    """Write while training goes on, from copies; off by default, since these take host memory (docs/engines.md)."""


class MetricsConfig(_Section):
    """Where metrics go besides `metrics.jsonl` (docs/metrics.md)."""

    tensorboard: bool = False
    """Event files in the folder `tensorboard` below output_dir."""
    wandb_project: str | None = None
    """Project of Weights & Biases to log to; null logs nothing there."""


class Config(_Section):
    model: ModelConfig
    data: DataConfig | None = None
    """Needed by `train`; a program that calls `Engine.train_step` brings its own rollouts."""
    parallel: ParallelConfig = ParallelConfig()
    packing: PackingConfig = PackingConfig()
    engine: EngineConfig = EngineConfig()
    memory: MemoryConfig = MemoryConfig()
    lora: LoraSection | None = None
    """Train low-rank adapters and freeze the model; null trains all weights."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    steps: int = Field(1, ge=1)
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Weights and activations. With bfloat16 the optimizer updates float32 masters, and decays stay float32."""
    checkpoint: CheckpointConfig | None = None
    """When `train` writes checkpoints below output_dir; null writes none."""
    metrics: MetricsConfig = MetricsConfig()
    output_dir: str | None = None
    """Where `train` writes metrics.jsonl, config.json and the final weights."""
    seed: int = 0
    """Order of the data, and the adapters' random weights."""

    @model_validator(mode="after")
    def _one_of_packs_and_layers_is_given(self) -> Config:
        if self.memory.recompute_layers == "auto" and not isinstance(self.packing.max_pack_tokens, int):
            tokens = "null" if self.packing.max_pack_tokens is None else self.packing.max_pack_tokens
            raise ValueError(
                f"memory.recompute_layers: auto chooses for packs of a given size, and packing.max_pack_tokens is "
                f"{tokens}: give a number of tokens, or of layers"
            )
        return self


def read_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file and apply ``key.sub=value`` overrides (values are YAML too).

    Raises:
        ValueError: for a missing or malformed file, an unknown key (names the nearest), or a value out of bounds.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str = "config") -> Config:
    """Validate a nested mapping; every problem is named in one ValueError."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ValueError(f"{where}: " + "; ".join(lines)) from error


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r} must have the form key.sub=value")
    *sections, name = key.split(".")
    target = raw
    for section in sections:
        if target.get(section) is None:  # missing, or null
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ValueError(f"override {override!r}: {section!r} is a value, not a section")
    try:
        target[name] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML") from error


def _explain(problem: dict[str, Any]) -> str:
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "value_error":  # a section's own check, whose message says what came
        return f"{location}: {problem['ctx']['error']}"
    if problem["type"] == "missing":
        return f"{location}: Field required"
    if problem["type"] == "model_type":
        known = _known_names(problem["loc"])
        return f"{location}: expected a section of settings, such as {location}.{known[0]}; got {problem['input']!r}"
    if problem["type"] != "extra_forbidden":
        return f"{location}: {problem['msg']} (got {problem['input']!r})"
    known = _known_names(problem["loc"][:-1])
    near = difflib.get_close_matches(str(problem["loc"][-1]), known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
    return f"unknown key {location!r}{hint}"


def _known_names(section: tuple) -> list[str]:
    model: Any = Config
    for part in section:
        annotation = model.model_fields[part].annotation
        options = getattr(annotation, "__args__", (annotation,))
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(model.model_fields)
