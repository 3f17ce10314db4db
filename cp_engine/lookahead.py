"""Plans made ahead of their use, on a CPU thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from cp_engine.distributed.mesh import Mesh
from cp_engine.pack import DevicePack
from cp_engine.placement import PlacedPack
from cp_engine.rollouts import Rollout
from cp_engine.sharding.packing import Pack, deal_packs
from cp_engine.step import StepData


@dataclass(frozen=True, eq=False)
class PlannedPack:
    """A pack that is ready to run on this rank."""

    pack: Pack
    placed: PlacedPack
    on_host: DevicePack  # with the lists that kernels will want
    seconds: float  # that planning took
    waited: float = 0.0  # seconds that the step waited for it; those of a step's first pack include its preparation


class Lookahead:
    """Plans the next pack of this rank's DP group while the present one runs.

    One thread, so plans are made in order. What it raises is raised where its result is asked for.

    Args:
        prepare: the rollouts of a step to its data.
        plan: a pack of a step to its placement and this rank's tables, on the host.
    """

    def __init__(
        self,
        prepare: Callable[[Sequence[Rollout]], StepData],
        plan: Callable[[StepData, Pack], tuple[PlacedPack, DevicePack]],
        mesh: Mesh,
    ):
        self._prepare, self._plan, self._mesh = prepare, plan, mesh
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._begun: tuple[Sequence[Rollout], Future] | None = None  # a step that comes next
        self._ready: tuple[StepData, PlannedPack] | None = None  # a prepared step and its first pack
        self._waited = 0.0  # seconds that the present step waited for that

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Prepare a step that comes next, and plan its first pack; to be called when all packs of this one are
        planned."""

        def work() -> tuple[StepData, PlannedPack]:
            step = self._prepare(rollouts)
            return step, self._timed(step, self._own_packs(step)[0])

        self._begun = rollouts, self._thread.submit(work)

    def step(self, rollouts: Sequence[Rollout]) -> StepData:
        """The step of these rollouts: the one that was begun if they are the same object, else prepared now."""
        begun, self._begun, self._ready = self._begun, None, None
        started = time.perf_counter()
        if begun is None or begun[0] is not rollouts:
            step = self._prepare(rollouts)
        else:
            self._ready = begun[1].result()
            step = self._ready[0]
        self._waited = time.perf_counter() - started
        return step

    def planned(self, step: StepData) -> Iterator[PlannedPack]:
        """The packs of this rank's DP group, each planned while the one before it runs."""
        packs = self._own_packs(step)
        (ready, self._ready), (waited, self._waited) = (self._ready, None), (self._waited, 0.0)
        if ready is not None and ready[0] is step:
            planned = ready[1]
        else:
            planned = self._timed(step, packs[0])
            waited += planned.seconds
        for following in [*packs[1:], None]:
            future = None if following is None else self._thread.submit(self._timed, step, following)
            yield replace(planned, waited=waited)
            if future is not None:
                started = time.perf_counter()
                planned = future.result()
                waited = time.perf_counter() - started

    def _own_packs(self, step: StepData) -> list[Pack]:
        return deal_packs(step.packs, self._mesh.dp)[self._mesh.dp_rank]

    def _timed(self, step: StepData, pack: Pack) -> PlannedPack:
        started = time.perf_counter()
        placed, on_host = self._plan(step, pack)
        return PlannedPack(pack, placed, on_host, time.perf_counter() - started)
