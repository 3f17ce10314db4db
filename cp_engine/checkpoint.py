"""Checkpoints of a run: whole or absent, and independent of the engine and the number of ranks that wrote them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from cp_engine.distributed.agree import require_equal_digests

if TYPE_CHECKING:
    from cp_engine.engine import Engine

_PROGRESS = "progress.json"


class Checkpoints:
    """The folder ``step-00000012`` and its like below one place that every rank sees.

    Each is written under another name and renamed once it is complete, so what has that name is complete.

    Args:
        keep: how many stay.
    """

    def __init__(self, place: Path, keep: int):
        self.place, self.keep = place, keep

    def complete(self) -> list[Path]:
        """Folders of complete checkpoints, the oldest first."""
        found = self.place.glob("step-*")
        return sorted(
            path for path in found if re.fullmatch(r"step-\d{8,}", path.name) and (path / _PROGRESS).is_file()
        )

    def save(self, engine: Engine) -> None:
        """Write a checkpoint of the engine; every rank calls it.

        Raises:
            OSError or torch's CheckpointException: if it cannot be written, on every rank. Older ones are left whole.
        """
        ranks = engine.ranks
        final = self.place / f"step-{engine.steps_done:08d}"
        partial = self.place / f".{final.name}.partial"
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _wait(engine)
        engine.distributed.save_state(partial / "state")
        if ranks.is_first:
            (partial / _PROGRESS).write_text(json.dumps({"steps_done": engine.steps_done, "run": _run(engine)}) + "\n")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self.complete()[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)
        _wait(engine)

    def resume(self, engine: Engine) -> bool:
        """Load the newest complete checkpoint into a new engine; False where there is none. Every rank calls it.

        Raises:
            ValueError: if ranks see different checkpoints, or it belongs to another run: another model, other adapters,
                another optimizer or another seed.
        """
        complete = self.complete()
        newest = complete[-1] if complete else None
        name = "none" if newest is None else newest.name
        require_equal_digests(hashlib.blake2b(name.encode(), digest_size=16).hexdigest(), "checkpoint", engine.ranks)
        if newest is None:
            return False
        progress = json.loads((newest / _PROGRESS).read_text())
        for setting, now in _run(engine).items():
            then = progress["run"].get(setting)
            if then != now:
                raise ValueError(
                    f"the checkpoint {newest} is of another run: {setting} was {then!r} and is {now!r}; choose another "
                    "output_dir, or checkpoint.resume: never"
                )
        engine.distributed.load_state(newest / "state")
        engine.steps_done = progress["steps_done"]
        return True


def _run(engine: Engine) -> dict:
    """What must not change between a checkpoint and the run that goes on from it, as JSON values."""
    config = engine.config
    lora = None if config.lora is None else config.lora.model_dump(mode="json")
    model = config.model.model_dump(mode="json")
    return {"model": model, "lora": lora, "optimizer.name": config.optimizer.name, "seed": config.seed}


def _wait(engine: Engine) -> None:
    if engine.ranks.group is not None:
        dist.barrier(group=engine.ranks.group)
