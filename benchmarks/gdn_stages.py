"""Time of each stage of our gated delta rule, and the least time that its memory traffic takes.

The stages are timed inside a whole forward or backward, so what runs is what the layer runs. A stage's traffic is every
distinct tensor that goes into or comes out of it, once, also where it runs in several waves.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.clock import REPEATS, laps_ms, wait

# Where the stages look up what they call, by the name in the table.
STAGES = {
    "cumsum": ("cp_engine.kernels.gdn.triton.inside", "cumulative_decay"),
    "solve": ("cp_engine.kernels.gdn.fla_stages", "solve"),
    # In place of `solve` where chunks hold several fragments.
    "products": ("cp_engine.kernels.gdn.triton.inside", "key_products"),
    "inverse": ("cp_engine.kernels.gdn.fla_stages", "inverse_of"),
    # In every backward, and in the forward of such chunks.
    "w_and_u": ("cp_engine.kernels.gdn.fla_stages", "w_and_u"),
    "states": ("cp_engine.kernels.gdn.triton.walks", "run_states"),
    "output": ("cp_engine.kernels.gdn.triton.walks", "run_output"),
    "dv_local": ("cp_engine.kernels.gdn.triton.inside", "value_gradient_inside"),
    "adjoint": ("cp_engine.kernels.gdn.triton.walks", "run_adjoint"),
    "dqkwg": ("cp_engine.kernels.gdn.triton.walks", "dqkwg"),
    "solve_backward": ("cp_engine.kernels.gdn.triton.walks", "solve_backward"),
}
REST = "rest"  # between the stages: casts, sums over the heads of a group, additions
BYTES_A_MS = 4.28e9  # device copy on the card of the anchors


def tensors_in(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def places_of(*values) -> dict[tuple, int]:
    """Bytes of the distinct tensors in arguments and results, by where they lie."""
    return {(x.data_ptr(), x.shape): x.numel() * x.element_size() for x in tensors_in(values)}


class _Watch:
    """Milliseconds and traffic of every stage call."""

    def __init__(self, device: torch.device):
        self.device = device
        self.open: list[tuple[str, Callable[[], float]]] = []
        self.places: dict[str, dict[tuple, int]] = defaultdict(dict)

    def around(self, name: str, stage: Callable) -> Callable:
        def call(*args, **kwargs):
            if self.device.type != "cuda":
                found = []
                (ms,) = laps_ms([lambda: found.append(stage(*args, **kwargs))], self.device)
                (result,) = found
                self.open.append((name, lambda: ms))
            else:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                result = stage(*args, **kwargs)
                end.record()
                self.open.append((name, lambda: start.elapsed_time(end)))
            self.places[name] |= places_of(args, tuple(kwargs.values()), result)
            return result

        return call

    def taken(self) -> tuple[dict[str, float], dict[str, int]]:
        """Milliseconds and bytes since the last call, of a device that has finished."""
        sums: dict[str, float] = defaultdict(float)
        for name, ms in self.open:
            sums[name] += ms()
        counts = {name: sum(places.values()) for name, places in self.places.items()}
        self.open, self.places = [], defaultdict(dict)
        return sums, counts


@contextmanager
def _watched(watch: _Watch, stages: dict[str, tuple[str, str]]) -> Iterator[None]:
    places = {name: (importlib.import_module(module), attribute) for name, (module, attribute) in stages.items()}
    originals = {name: getattr(module, attribute) for name, (module, attribute) in places.items()}
    for name, (module, attribute) in places.items():
        setattr(module, attribute, watch.around(name, originals[name]))
    try:
        yield
    finally:
        for name, (module, attribute) in places.items():
            setattr(module, attribute, originals[name])


def stage_table(
    call: Callable[[], object],
    device: torch.device,
    stages=STAGES,
    before: Callable[[], object] = lambda: None,
    repeats: int | None = None,
) -> dict[str, list[float]]:
    """[median ms, least ms by memory traffic] of each of ``stages`` inside ``call``, which has run before.

    Args:
        before: runs ahead of every call and is not measured: the forward pass, whose graph a backward pass uses up.
        repeats: calls; None for as many as `clock` takes.
    """
    watch = _Watch(device)
    every: dict[str, list[float]] = defaultdict(list)
    with _watched(watch, stages):
        for _ in range(REPEATS if repeats is None else repeats):
            before()
            wait(device)
            watch.taken()
            (total,) = laps_ms([call], device)
            sums, counts = watch.taken()
            for name, ms in sums.items():
                every[name].append(ms)
            every[REST].append(max(0.0, total - sum(sums.values())))
    bound = {name: count / BYTES_A_MS for name, count in counts.items()}
    return {name: [round(statistics.median(ms), 3), round(bound.get(name, 0.0), 3)] for name, ms in every.items()}
