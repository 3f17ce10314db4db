"""Where the metrics of a run go: `metrics.jsonl` always, TensorBoard and Weights & Biases where they are asked for.

Nothing here imports torch before a tracker is opened.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Protocol

from cp_engine.config import Config, MetricsConfig


class Tracker(Protocol):
    def write(self, metrics: dict[str, Any]) -> None:
        """One step."""

    def close(self) -> None: ...


def strict_json(figures: dict[str, Any]) -> str:
    """One line of JSON; a number that is not finite becomes null, which JSON has and NaN it has not."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
    return json.dumps(finite, allow_nan=False)


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, flushed at once so that a run can be watched.

    Args:
        steps_done: steps of an earlier run that goes on; their lines stay, later ones will be written again.
    """

    def __init__(self, path: Path, steps_done: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if steps_done and path.is_file() else []
        self.path, self.file = path, path.open("w")
        for line in lines[:steps_done]:
            self.file.write(line + "\n")

    def write(self, metrics: dict[str, Any]) -> None:
        self.file.write(strict_json(metrics) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Event files with every number, by step. Those of steps that will be written again are hidden."""

    def __init__(self, folder: Path, steps_done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=steps_done + 1)

    def write(self, metrics: dict[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            self.writer.add_scalar(name, value, metrics["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of a project, with the resolved configuration. A run that goes on keeps its number there."""

    def __init__(self, out: Path, config: Config, steps_done: int):
        import wandb

        number = out / "wandb_run"
        going_on = number.read_text().strip() if steps_done and number.is_file() else None
        self.run = wandb.init(
            project=config.metrics.wandb_project,
            name=out.name,
            dir=str(out),
            id=going_on,
            resume=None if going_on is None else "allow",
            config=config.model_dump(mode="json"),
        )
        number.write_text(self.run.id + "\n")

    def write(self, metrics: dict[str, Any]) -> None:
        self.run.log(_numbers(metrics), step=metrics["step"])

    def close(self) -> None:
        self.run.finish()


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and name != "step"}


def check_trackers(metrics: MetricsConfig) -> None:
    """Refuse a tracker whose package is missing before anything is trained.

    Raises:
        ValueError: which names the setting and the package.
    """
    asked = {"tensorboard": metrics.tensorboard, "wandb": metrics.wandb_project is not None}
    for package, setting in (("tensorboard", "metrics.tensorboard"), ("wandb", "metrics.wandb_project")):
        if asked[package] and importlib.util.find_spec(package) is None:
            raise ValueError(f"{setting} needs the package {package}: pip install {package}, or leave it out")


def open_trackers(out: Path, config: Config, steps_done: int) -> list[Tracker]:
    """The trackers of a run that writes to ``out``, after ``steps_done`` steps of an earlier one."""
    trackers: list[Tracker] = [MetricsFile(out / "metrics.jsonl", steps_done)]
    if config.metrics.tensorboard:
        trackers.append(TensorBoard(out / "tensorboard", steps_done))
    if config.metrics.wandb_project is not None:
        trackers.append(WeightsAndBiases(out, config, steps_done))
    return trackers
