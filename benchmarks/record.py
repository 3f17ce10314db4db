"""Stamps and the file that benchmark results go to: one JSON object a line in `benchmarks/results.jsonl`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.jsonl"


def cpu_name() -> str:
    """The processor's model as the kernel names it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def stamp(*packages: str, card: str | None = None, commit: str | None = None) -> dict:
    """What every record carries: commit, versions, card, command, date.

    Args:
        packages: distributions whose versions matter.
        card: the accelerator's name; None for the processor's.
        commit: what to record where this is a copy without history; None asks git.
    """
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    return {
        "commit": commit or _commit(),
        "versions": versions,
        "card": card or cpu_name(),
        "command": " ".join([*_launcher(), "-m", *_module(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }


def _launcher() -> list[str]:
    ranks = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun sets it
    return ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]


def _module() -> list[str]:
    return [".".join(Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts)]


def _commit() -> str:
    """The checked-out commit, with a + where tracked files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def append(records: list[dict], stamped: dict, path: Path = RESULTS) -> None:
    """Append records, each with the stamp."""
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record | stamped) + "\n")
