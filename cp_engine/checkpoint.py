"""Checkpoints of a run: whole or absent, and independent of the engine and the number of ranks that wrote them."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from cp_engine.distributed.agree import require_equal_digests
from cp_engine.distributed.model import save_tensors
from cp_engine.distributed.ranks import Ranks
from cp_engine.run_record import differences, how_it_is_trained, what_is_trained

if TYPE_CHECKING:
    from cp_engine.engine import Engine

_LOG = logging.getLogger(__name__)
_PROGRESS = "progress.json"


class Checkpoints:
    """The folder ``step-00000012`` and its like below one place that every rank sees.

    Each is written under another name and renamed once it is complete, so what has that name is complete.

    Args:
        keep: how many stay.
        asynchronous: write in a thread, from copies in host memory, while training goes on. At most one checkpoint is
            being written at a time.
        rollouts: `run_record.described` rollouts that all steps are drawn from, which a resumed run has to have too;
            None where each step brings its own.
    """

    def __init__(self, place: Path, keep: int, asynchronous: bool = False, rollouts: str | None = None):
        self.place, self.keep, self.rollouts = place, keep, rollouts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        # Collectives of one group must come in one order on all ranks, so the thread has a group of its own.
        self._group: dist.ProcessGroup | None = None
        self._in_flight: Future | None = None

    def complete(self) -> list[Path]:
        """Folders of complete checkpoints, the oldest first."""
        found = self.place.glob("step-*")
        return sorted(
            path for path in found if re.fullmatch(r"step-\d{8,}", path.name) and (path / _PROGRESS).is_file()
        )

    def save(self, engine: Engine) -> None:
        """Write a checkpoint of the engine, or begin to; every rank calls it.

        An asynchronous one is as the engine is now, whatever is trained afterwards. The one before it is waited for.

        Raises:
            OSError: if this one, or the one before it that was written beside training, cannot be written; on every
                rank. Older ones are left whole.
        """
        self.wait()
        _on_first_rank(lambda: self._begin(engine.steps_done), engine.ranks)
        progress = {"steps_done": engine.steps_done, **self._record(engine)}
        state = engine.distributed.checkpoint_state(copies=self._thread is not None)
        if self._thread is None:
            self._write(state, progress, engine.ranks)
            return
        if self._group is None and engine.ranks.group is not None:
            timeout = timedelta(seconds=engine.config.parallel.timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._in_flight = self._thread.submit(self._write, state, progress, engine.ranks)

    def wait(self) -> None:
        """Until a checkpoint that is being written is complete. Call it when training ends.

        Raises:
            as `save`.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _record(self, engine: Engine) -> dict:
        config = engine.config
        return {"run": what_is_trained(config, self.rollouts), "settings": how_it_is_trained(config)}

    def _partial(self, steps_done: int) -> Path:
        return self.place / f".{_name(steps_done)}.partial"

    def _begin(self, steps_done: int) -> None:
        """Make room; what an earlier run was writing when it ended is of no use."""
        for left in self.place.glob(".step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        self._partial(steps_done).mkdir(parents=True)

    def _write(self, state: dict[str, torch.Tensor], progress: dict, ranks: Ranks) -> None:
        partial = self._partial(progress["steps_done"])
        try:
            save_tensors(state, partial / "state", ranks, self._group)
        except CheckpointException as error:  # on all ranks, whichever failed; no Exception, so nobody would catch it
            step = progress["steps_done"]
            raise OSError(f"cannot write the checkpoint of step {step}: {_failures(error)}") from error
        _on_first_rank(lambda: self._complete(partial, progress), ranks, self._group)

    def _complete(self, partial: Path, progress: dict) -> None:
        """Give a whole checkpoint its name, and remove those that are too many.

        Those of later steps are of a run that this one, which did not resume it, replaces: kept, they would be taken
        for the newest.
        """
        (partial / _PROGRESS).write_text(json.dumps(progress) + "\n")
        final = self.place / _name(progress["steps_done"])
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        complete = self.complete()
        number = complete.index(final) + 1
        for old in (*complete[:number][: -self.keep], *complete[number:]):
            shutil.rmtree(old, ignore_errors=True)

    def resume(self, engine: Engine) -> bool:
        """Load the newest complete checkpoint into a new engine; False where there is none. Every rank calls it.

        Settings that change how its run goes on but not what it trains, such as the learning rate, are warned of where
        they are not those of the checkpoint. Engine, mesh, packing and memory may be others.

        Raises:
            ValueError: if ranks see different checkpoints, it cannot be read, or it belongs to another run: another
                model, other adapters, rollouts or groups a step, another loss, optimizer or seed.
        """
        self.wait()
        complete, record = self.complete(), self._record(engine)
        newest = complete[-1] if complete else None
        seen = json.dumps([None if newest is None else newest.name, record])
        require_equal_digests(hashlib.blake2b(seen.encode(), digest_size=16).hexdigest(), "checkpoint", engine.ranks)
        if newest is None:
            return False
        progress = json.loads((newest / _PROGRESS).read_text())
        changed = list(differences(progress["run"], record["run"]))
        if changed:
            raise ValueError(
                f"the checkpoint {newest} is of another run: {'; '.join(changed)}; choose another output_dir (its "
                "model.path may be the final weights of that run), or checkpoint.resume: never to start anew"
            )
        changed = list(differences(progress.get("settings", {}), record["settings"]))
        if changed and engine.ranks.is_first:
            _LOG.warning("going on from %s with other settings: %s", newest, "; ".join(changed))
        try:
            engine.distributed.load_state(newest / "state")
        except CheckpointException as error:
            raise ValueError(
                f"cannot read the checkpoint {newest}: {_failures(error)}; remove it to go on from the one before it, "
                "or set checkpoint.resume: never"
            ) from error
        engine.steps_done = progress["steps_done"]
        return True


def _failures(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in error.failures.items())


def _name(steps_done: int) -> str:
    return f"step-{steps_done:08d}"


def _on_first_rank(work: Callable[[], None], ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
    """Run ``work`` on the first rank; all ranks wait for it, and raise its OSError.

    Args:
        group: of all ranks; None for the group of the run.
    """
    failed: OSError | None = None
    if ranks.is_first:
        try:
            work()
        except OSError as error:
            failed = error
    if ranks.group is not None:
        found = [failed]
        dist.broadcast_object_list(found, src=0, group=group or ranks.group, device=torch.device("cpu"))
        failed = found[0]
    if failed is not None:
        raise failed
