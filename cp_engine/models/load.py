"""Models from presets and local folders, made ready for trees, and saved as folders that `transformers` loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from cp_engine.config import Config
from cp_engine.models.hf_attention import ATTENTION_NAME, register_attention
from cp_engine.models.hf_gdn import gdn_layers, patch_gdn_layers
from cp_engine.models.hf_relay import patch_gdn_runs
from cp_engine.models.hf_routers import hook_routers
from cp_engine.models.lora import lora_layers, peft_config
from cp_engine.models.presets import PRESETS, preset_model
from cp_engine.models.source_folder import read_from_source, write_into_source
from cp_engine.models.support import check_supported


def load_model(
    path_or_preset: str | os.PathLike,
    dtype: torch.dtype,
    vocab_size: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A `transformers` causal LM, unmodified.

    Of a Qwen3.5 folder with a vision tower this is the text part.

    Args:
        path_or_preset: a local folder in the Hugging Face format, or the name of a random preset.
        dtype: of the parameters. RoPE frequencies stay float32, and so do the decays of GDN layers in bfloat16.
        vocab_size: of a preset; None for its default. A folder has its own.
        seed: of a preset's weights.

    Raises:
        ValueError: for a name that is neither, a vocabulary for a folder, or a folder that lacks weights or cannot be
            read.
    """
    name = os.fspath(path_or_preset)
    if name in PRESETS:
        if dtype == torch.bfloat16:
            return _cast(preset_model(name, torch.float32, vocab_size, seed)).to(device)
        return _with_experts_for(dtype, preset_model(name, dtype, vocab_size, seed)).to(device)
    if not (Path(name) / "config.json").is_file() or _saved_by_run(name):
        raise ValueError(
            f"model {name!r} is neither a preset ({', '.join(PRESETS)}) nor a local folder that holds a config.json of "
            f"a model{_what_it_may_be(name)}"
        )
    if vocab_size is not None:
        raise ValueError(
            f"a vocabulary of {vocab_size} was asked for, but the folder {name!r} has its own: leave vocab_size out, "
            "or set it to null"
        )
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except OSError as error:
        raise ValueError(f"cannot load the folder {name!r}: {error}") from error
    if info["missing_keys"]:
        # The library would go on with random numbers in their place.
        raise ValueError(f"the folder {name!r} lacks the weights {', '.join(sorted(info['missing_keys']))}")
    if dtype == torch.bfloat16:
        _restore_float32(model, Path(name))
    return _with_experts_for(dtype, model).to(device)


def check_given(model: object, dtype: torch.dtype) -> None:
    """Refuse a model, made by the program, that is no causal LM of `transformers` in ``dtype``.

    Raises:
        ValueError: says what it is instead, and what to give.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(
            "causal_lm must be a causal LM of transformers with its head, as AutoModelForCausalLM.from_pretrained "
            "makes it, in no wrapper (adapters are made from the lora section, shards by engine.name); got a "
            f"{type(model).__name__}"
        )
    kept = {id(parameter) for parameter in float32_parameters(model, dtype)}
    for name, parameter in model.named_parameters():
        expected = torch.float32 if id(parameter) in kept else dtype
        if parameter.dtype != expected:
            raise ValueError(
                f"causal_lm must have {name} in {expected}, got {parameter.dtype}: the configuration's dtype is {dtype}"
                ", and in bfloat16 the decays of Gated DeltaNet stay float32. cp_engine.models.load.load_model(folder, "
                "dtype) loads a model so"
            )


def holds_model(folder: str | os.PathLike) -> bool:
    """Whether its config.json is a model's: that of a run has sections, and no such field."""
    own = Path(folder) / "config.json"
    return own.is_file() and "model_type" in own.read_text(errors="replace")


def _saved_by_run(name: str) -> bool:
    """Whether it is the output_dir of a run, with a config.json of its own and the model one folder below."""
    return (Path(name) / "final").is_dir() and (Path(name) / "config.json").is_file() and not holds_model(name)


def _what_it_may_be(name: str) -> str:
    """How to go on with what was taken for a model, to end an error with."""
    if _saved_by_run(name):
        return f"; it is the output_dir of a run, whose weights are in {str(Path(name) / 'final')!r}"
    if (Path(name) / "adapter_config.json").is_file():
        return "; it holds adapters alone, which a run has merged in the folder `final` beside it"
    if name.count("/") == 1 and not Path(name).parent.exists():
        return "; nothing is downloaded: fetch the model first, and give the path of its folder"
    return ""


def _with_experts_for(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """The model with the library's loop over experts in float64, which its grouped products do not take."""
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model


def float32_parameters(model: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters that stay float32 in a model of ``dtype``: the decays of GDN layers, where rounding moves states.

    Of a model of another dtype than bfloat16 there are none.
    """
    if dtype != torch.bfloat16:
        return []
    return [parameter for layer in gdn_layers(model) for parameter in (layer.A_log, layer.dt_bias)]


def _cast(model: nn.Module) -> nn.Module:
    kept = {id(parameter) for parameter in float32_parameters(model, torch.bfloat16)}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.bfloat16()
    return model


def _restore_float32(model: nn.Module, source: Path) -> None:
    """Read again, in float32, what must not be rounded to bfloat16."""
    kept = {id(parameter) for parameter in float32_parameters(model, torch.bfloat16)}
    parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in kept}
    for name, tensor in read_from_source(parameters, source).items():
        parameters[name].data = tensor.float()


def folder_vocabulary(path_or_preset: str | os.PathLike) -> int | None:
    """Ids that a model folder knows; None for a preset, whose vocabulary is chosen, and for what is no folder.

    Raises:
        ValueError: for a config that cannot be read.
    """
    name = os.fspath(path_or_preset)
    if name in PRESETS or not (Path(name) / "config.json").is_file() or _saved_by_run(name):
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True).get_text_config().vocab_size
    except OSError as error:
        raise ValueError(f"cannot load the folder {name!r}: {error}") from error


def prepare_for_trees(model: nn.Module) -> None:
    """Make a causal LM run on packed trees, in place; modules and weights stay as they are.

    Afterwards it runs only through `TreeCausalLM`. The attention's name lives in the config object and is not written
    to config.json.

    Raises:
        ValueError: if the tree layers would not compute the model exactly.
    """
    check_supported(model.config)
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    patch_gdn_layers(model)
    hook_routers(model)
    patch_gdn_runs(model)


def save_model(
    model: nn.Module,
    out: str | os.PathLike,
    source: str | os.PathLike | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Save a causal LM as a folder that plain `transformers` loads. Call it on one rank.

    The folder is written beside ``out`` and renamed, so ``out`` is always whole: the old one or the new one.

    Args:
        model: it may be prepared for trees.
        out: may exist if it is empty or a model folder, which is then replaced.
        source: the folder that the model was loaded from. Its architecture, config, tensors that the model does not
            hold (such as a vision tower) and side files (tokenizer, generation config, templates) are kept; only
            tensors that training changed are replaced, in the dtype that they have there.
        tensors: the model's whole tensors by name, where its parameters are sharded or have adapters.

    Raises:
        ValueError: if ``out`` is something else, or ``source`` does not hold the model's tensors.
    """
    with _replaced_folder(Path(out)) as folder:
        if source is None:
            model.save_pretrained(folder, state_dict=tensors)
        else:
            tied = set(getattr(model, "all_tied_weights_keys", ()) or ())
            write_into_source(model.state_dict() if tensors is None else tensors, tied, Path(source), folder, model)


def save_adapter(tensors: dict[str, torch.Tensor], model: nn.Module, config: Config, out: str | os.PathLike) -> None:
    """Save adapters as a folder that `peft` loads. Call it on one rank.

    Args:
        tensors: under the names of a `peft` adapter file.
        model: that has the adapters.
        config: of the run, with a ``lora`` section.

    Raises:
        ValueError: if ``out`` exists and is neither empty nor a model folder.
    """
    from safetensors.torch import save_file

    names = [name for name, _ in lora_layers(model)]
    described = peft_config(config.lora, names)
    described.base_model_name_or_path, described.inference_mode = config.model.path, True
    with _replaced_folder(Path(out)) as folder:
        described.save_pretrained(folder)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def check_save_place(out: str | os.PathLike) -> None:
    """Refuse, before any work is done, a place that `save_model` would refuse.

    Raises:
        ValueError: if ``out`` exists and is neither empty nor a model folder, or lies below a file.
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and (_is_model_folder(out) or not any(out.iterdir()))):
        raise ValueError(f"{str(out)!r} exists and is not a model folder; choose another place to save to")
    blocking = next((parent for parent in out.parents if parent.exists()), Path())
    if not blocking.is_dir():
        raise ValueError(f"cannot save to {str(out)!r}: {str(blocking)!r} is a file, not a folder")


def _is_model_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


@contextmanager
def _replaced_folder(out: Path) -> Iterator[Path]:
    """A new folder beside ``out`` that takes its place when the block ends well, and vanishes when it does not."""
    check_save_place(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (out.parent / f".{out.name}.{kind}-{os.getpid()}" for kind in ("partial", "old"))
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # If one of the renames fails, both folders are left whole.
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
