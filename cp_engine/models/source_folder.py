"""Writing trained tensors into a copy of the folder that a model came from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import nn

_INDEX = "model.safetensors.index.json"
# Weights in whatever format: those of the model are written anew, others would be stale.
_WEIGHT_FILES = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")


def write_into_source(
    tensors: dict[str, torch.Tensor], tied: set[str], source: Path, out: Path, model: nn.Module
) -> None:
    """Copy ``source`` to the empty folder ``out`` with the tensors that training changed replaced.

    A tensor is unchanged, and kept bit for bit, if the source's value cast to the model's dtype is the model's value.
    Goes file by file, so memory holds one weight file besides the model.

    Args:
        tensors: of the model, by name.
        tied: names that the source may lack because another tensor stands for them.
        model: that the tensors belong to; it knows what the library stacked when it loaded the folder.

    Raises:
        ValueError: if the source has no safetensors weights, or lacks a tensor of the model.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    ours = _by_source_name(tensors, tied, source, model)
    ignored = shutil.ignore_patterns(*_WEIGHT_FILES, ".*")
    shutil.copytree(source, out, ignore=ignored, dirs_exist_ok=True)
    if (source / _INDEX).is_file():
        shutil.copy2(source / _INDEX, out / _INDEX)
    for file in _weight_files(source):
        with safe_open(file, framework="pt") as opened:
            written = {name: _trained(opened.get_tensor(name), ours.get(name), name) for name in opened.keys()}
            save_file(written, out / file.name, metadata=opened.metadata())


def _weight_files(source: Path) -> list[Path]:
    if (source / _INDEX).is_file():
        index = json.loads((source / _INDEX).read_text())
        return [source / name for name in sorted(set(index["weight_map"].values()))]
    if (source / "model.safetensors").is_file():
        return [source / "model.safetensors"]
    raise ValueError(f"the folder {str(source)!r} has no safetensors weights (model.safetensors or {_INDEX})")


def read_from_source(tensors: dict[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
    """Values in the source, in its dtype, of some of the model's tensors; of none that the library stacked."""
    from safetensors import safe_open

    wanted = {id(tensor): name for name, tensor in tensors.items()}
    names = {there: wanted[id(tensor)] for there, tensor in _by_source_name(tensors, set(), source, None).items()}
    found = {}
    for file in _weight_files(source) if names else ():
        with safe_open(file, framework="pt") as opened:
            found |= {names[name]: opened.get_tensor(name) for name in opened.keys() if name in names}
    return found


def _by_source_name(
    tensors: dict[str, torch.Tensor], tied: set[str], source: Path, model: nn.Module | None
) -> dict[str, torch.Tensor]:
    """The model's tensors under the names, and split as, they have in the source."""
    from safetensors import safe_open

    there: set[str] = set()
    for file in _weight_files(source):
        with safe_open(file, framework="pt") as opened:
            there.update(opened.keys())
    found, lacking = {}, []
    for name, tensor in tensors.items():
        parts = _named_as_in(there, {name: tensor})
        if parts is None and model is not None:
            parts = _named_as_in(there, _unstacked(model, name, tensor))
        if parts is not None:
            found |= parts
        elif name not in tied:
            lacking.append(name)
    if lacking:
        raise ValueError(f"the folder {str(source)!r} is not this model's source: it lacks {', '.join(lacking)}")
    return found


def _unstacked(model: nn.Module, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor that the library stacked when it loaded the folder, such as all experts of a layer, as its parts."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: tensor.detach()})


def _named_as_in(there: set[str], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The tensors under the names that they have among ``there``; None if one has none."""
    found = {}
    for name, tensor in tensors.items():
        # A folder with a vision tower holds the text part one level further down.
        candidates = (name, name.replace("model.", "model.language_model.", 1))
        match = next((candidate for candidate in candidates if candidate in there), None)
        if match is None:
            return None
        found[match] = tensor
    return found


def _trained(old: torch.Tensor, new: torch.Tensor | None, name: str) -> torch.Tensor:
    if new is None:
        return old
    if new.shape != old.shape:
        raise ValueError(f"{name} has shape {list(new.shape)}, but {list(old.shape)} in the source folder")
    new = new.detach().cpu()
    return old if torch.equal(old.to(new.dtype), new) else new.to(old.dtype).contiguous()
