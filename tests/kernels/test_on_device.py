"""Tables made on the host and moved to a device. The device is torch's `meta`, which needs no GPU."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pytest
import torch

from cp_engine.kernels.shared.on_device import moved

META = torch.device("meta")


class Pair(NamedTuple):
    rows: torch.Tensor
    count: int


@dataclass(frozen=True, eq=False)
class Table:
    rows: torch.Tensor
    parts: tuple[Pair, ...]
    device: torch.device
    names: np.ndarray
    by_name: dict = field(default_factory=dict)

    @cached_property
    def doubled(self) -> torch.Tensor:
        assert self.device.type == "cpu", "made on the host"
        return 2 * self.rows


@pytest.fixture
def pinned(monkeypatch):
    """The tensors that were copied to page-locked memory, which takes a GPU's driver."""
    seen, to = [], torch.Tensor.to

    def checked(self, device, **options):
        assert options == {"non_blocking": True} and self is seen[-1], "the host would wait"
        return to(self, device)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: seen.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "to", checked)
    return seen


def table() -> Table:
    rows = torch.arange(3)
    made = Table(rows, (Pair(rows, 3), Pair(torch.arange(2), 2)), torch.device("cpu"), np.arange(2))
    assert made.doubled is made.doubled
    return made


def test_every_tensor_moves_once_and_what_is_cached_moves_too(pinned):
    before = table()
    after = moved(before, META)
    assert isinstance(after, Table) and after.device == META and after.names is before.names
    assert [x.device for x in (after.rows, after.doubled, *(part.rows for part in after.parts))] == [META] * 4
    assert after.parts[0].rows is after.rows and [part.count for part in after.parts] == [3, 2]
    assert len(pinned) == 3 and after.by_name is before.by_name
    assert before.rows.device.type == before.doubled.device.type == before.device.type == "cpu"


def test_on_the_host_nothing_is_copied(pinned):
    before = [table(), None, "name"]
    assert moved(before, torch.device("cpu")) is before and not pinned
