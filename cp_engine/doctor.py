"""What is installed and which backend each operator takes here, asked from the kernels themselves.

The choice is made by the functions that training calls, on stand-ins for rows; this file holds no opinion of its own.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

OPTIONAL = (
    *("triton", "nvidia-cudnn-frontend", "flash-attn-4", "liger-kernel"),
    *("deepspeed", "peft", "tensorboard", "wandb"),
)
HEAD_SIZES = (64, 128, 256)
DTYPES = ("bfloat16", "float32", "float64")
GDN_HEAD_SIZE = 128
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Rows:
    """As much of a tensor [rows, heads, size] as the choice of a backend reads."""

    device: Any
    dtype: Any
    shape: tuple[int, int, int]


def examine() -> dict[str, Any]:
    """The whole report; ``ok`` says whether training can run, ``problems`` why not."""
    versions, problems = package_versions()
    report: dict[str, Any] = {"python": sys.version.split()[0], "versions": versions, "cuda": None, "gpus": []}
    report |= {"links": [], "peer_reads": None, "operators": [], "install": []}
    torch, broken = _imported("torch")
    if torch is None:
        problems.append(broken)
    else:
        report["cuda"] = torch.version.cuda
        report["gpus"], failing = gpus(torch)
        report["links"] = links(torch, len(report["gpus"]))
        report["peer_reads"] = why_no_peer_reads(len(report["gpus"]))
        report["operators"] = operators(torch.device("cuda", 0) if report["gpus"] else torch.device("cpu"))
        report["install"] = sorted({command for one in report["operators"] for command in one["install"]})
        problems += failing + library_problems(torch, bool(report["gpus"]))
    return report | {"ok": not problems, "problems": problems}


def _imported(name: str) -> tuple[Any, str]:
    """The module, or None and what is wrong with it."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a broken package may raise anything
        return None, f"import {name} fails: {type(error).__name__}: {error}"


def requirements() -> list[str]:
    """What this package needs, as its project file says."""
    project = _ROOT / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    return [each for each in requires("cp-engine") or () if "extra ==" not in each]


def package_versions() -> tuple[dict[str, str | None], list[str]]:
    """Versions by distribution, None where it is missing, and problems with those that are needed."""
    found: dict[str, str | None] = {}
    problems = []
    for text in requirements():
        name, bound = re.match(r"([\w.-]+)(.*)", text).groups()
        found[name] = _version(name)
        if found[name] is None:
            problems.append(f"{name} is missing: pip install '{text}'")
        elif not _fits(found[name], bound):
            problems.append(f"{name} is {found[name]}, and {bound} is needed: pip install '{text}'")
    return found | {name: _version(name) for name in OPTIONAL}, problems


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fits(present: str, bound: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:  # then torch or transformers, which need it, is missing and reported
        return True
    return SpecifierSet(bound).contains(present, prereleases=True)


def gpus(torch) -> tuple[list[dict[str, Any]], list[str]]:
    """The GPUs that torch sees, each tried with a small product, and what is wrong with them."""
    found, problems = [], []
    if torch.version.cuda and not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        problems.append(f"torch is built for CUDA {torch.version.cuda} but sees no GPU, though nvidia-smi is there")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        memory = round(properties.total_memory / 2**30, 1)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        found.append({"index": index, "name": properties.name, "memory_gib": memory, "capability": capability})
        try:
            ones = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.bfloat16)
            if float((ones @ ones).sum()) != 4096.0:
                problems.append(f"GPU {index} computes a wrong product")
        except Exception as error:
            problems.append(f"GPU {index} cannot compute: {error}")
    return found, problems


def links(torch, count: int) -> list[dict[str, Any]]:
    """Every pair of GPUs: how they are connected (`nvidia-smi topo`), and whether one reads the other's memory."""
    matrix = topology(_topology_text()) if count > 1 else {}
    return [
        {
            "between": [one, other],
            "link": matrix.get((one, other)),
            "peer_access": torch.cuda.can_device_access_peer(one, other),
        }
        for one in range(count)
        for other in range(one + 1, count)
    ]


def _topology_text() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def topology(text: str) -> dict[tuple[int, int], str]:
    """Links by pair of GPUs, such as NV18 (NVLinks) or SYS (across sockets), from the table of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    rows = [cells for cells in lines if len(cells) > 1 and re.fullmatch(r"GPU\d+", cells[0])]
    rows = [cells for cells in rows if not cells[1].startswith("GPU")]  # not the header
    count = len(rows)
    return {
        (int(cells[0][3:]), other): link
        for cells in rows
        for other, link in enumerate(cells[1 : count + 1])
        if link != "X"
    }


def why_no_peer_reads(count: int) -> str | None:
    """Why exchanges here go through collectives, not reads of other ranks' memory; None where they do read."""
    from cp_engine.sharding.exchange.transport import why_devices_apart, why_no_symmetric_memory

    if count < 2:
        return f"needs more than one GPU; there {'is 1' if count else 'are none'}"
    return why_no_symmetric_memory() or why_devices_apart(range(count))


def library_problems(torch, has_gpus: bool) -> list[str]:
    """What else training needs: process groups, and a `transformers` whose models can be read."""
    problems = []
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        problems.append("torch has no gloo, which ranks agree over")
    elif has_gpus and not torch.distributed.is_nccl_available():
        problems.append("torch has no NCCL, which ranks on GPUs exchange over")
    _, broken = _imported("cp_engine.models.load")
    return problems + [broken] * bool(broken)


def operators(device) -> list[dict[str, Any]]:
    """The backend of every operator on a device, by dtype and head size, and why not the others."""
    found = []
    for dtype in DTYPES:
        for size in HEAD_SIZES:
            found += _attention(device, dtype, size)
    for dtype in DTYPES:
        found += _gated_delta_rule(device, dtype)
    return found + [_head(device, dtype) for dtype in DTYPES]


def _attention(device, dtype: str, size: int) -> list[dict[str, Any]]:
    import torch

    from cp_engine.kernels.attention import auto

    rows = Rows(device, getattr(torch, dtype), (0, 1, size))
    why = {name: auto.MODULES[name].why_not(rows) for name in ("cudnn", "triton")}
    found = []
    packs = {pack: _intervals(pack) for pack in _PACKS}
    for step in ("forward", "backward", "partial forward", "partial backward"):
        chosen = {pack: auto.choose(step, rows, intervals) for pack, intervals in packs.items()}
        if len(set(chosen.values())) == 1:
            chosen = {"all": next(iter(chosen.values()))}
        found += [_entry(f"attention {step}", dtype, size, pack, name, why, device) for pack, name in chosen.items()]
    return found


# Examples of packs between which choices differ: (tokens of the trunk, leaves, tokens of a leaf).
_PACKS = {"short segments": (100, 16, 50), "long trunk": (16_384, 4, 2_048)}


def _intervals(pack: str):
    import numpy as np

    from cp_engine.kernels.attention import Intervals
    from cp_engine.sharding.attention_plan import attention_plan
    from cp_engine.sharding.forest import build_forest
    from cp_engine.sharding.layout import contiguous_layout

    trunk, leaves, tokens = _PACKS[pack]
    rows = [np.concatenate([np.zeros(trunk), np.full(tokens, 1 + leaf)]).astype(np.int64) for leaf in range(leaves)]
    forest = build_forest(np.concatenate(rows), np.arange(leaves + 1) * (trunk + tokens))
    plan = attention_plan(forest, contiguous_layout(forest, 1), 0, "gather")
    return Intervals.from_arrays(plan.gather.intervals)


def _gated_delta_rule(device, dtype: str) -> list[dict[str, Any]]:
    import torch

    from cp_engine.kernels import gates
    from cp_engine.kernels.gdn import api, triton

    rows = Rows(device, getattr(torch, dtype), (0, 1, GDN_HEAD_SIZE))
    name, why = api.choose("auto", rows, rows), {"triton": triton.why_not(rows, rows)}
    # A layer's convolution runs on the backend of its recurrence.
    found = [
        _entry(operator, dtype, GDN_HEAD_SIZE, "all", name, why, device)
        for operator in ("gated delta rule", "its convolution")
    ]
    why = {"triton": gates.why_not(rows)}
    return [*found, _entry("its gates and gated norm", dtype, None, "all", gates.choose(rows), why, device)]


def _head(device, dtype: str) -> dict[str, Any]:
    import torch

    from cp_engine.kernels.logprob import api, triton

    hidden, head = Rows(device, getattr(torch, dtype), (0, 1, 1)), torch.nn.Linear(1, 1, bias=False, device="meta")
    name, why = api.choose("auto", hidden, head), {"triton": triton.why_not(hidden, head)}
    return _entry("log-prob head", dtype, None, "all", name, why, device)


def _entry(operator: str, dtype: str, size: int | None, pack: str, backend: str, why: dict, device) -> dict[str, Any]:
    reasons = {name: reason or "can run and is not picked" for name, reason in why.items() if name != backend}
    # Packages are asked about last, so where one is named nothing else is in the way.
    named = [re.search(r"pip install ([^)]+)", reason) for reason in reasons.values()]
    missing = [match[1] for match in named if match] if device.type == "cuda" and dtype == "bfloat16" else []
    return {
        "operator": operator, "dtype": dtype, "head_size": size, "pack": pack, "backend": backend, "why_not": reasons,
        "install": [install_command(requirement) for requirement in missing],
    }  # fmt: skip


def install_command(requirement: str) -> str:
    """The pip command for a requirement that a kernel names; this package's extras come from its checkout."""
    extra = re.fullmatch(r"cp-engine\[(\w+)\]", requirement)
    if extra is not None and (_ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{_ROOT}[{extra[1]}]'"
    return f"pip install '{requirement}'"
