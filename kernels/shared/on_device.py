"""Tables that were made on the host, on the device of the calls that read them."""

from __future__ import annotations

from copy import copy
from dataclasses import is_dataclass

import torch


def moved(table, device: torch.device, known: dict[int, torch.Tensor] | None = None):
    """Tensors and devices in tuples, lists and dataclasses (in what those have cached too) on a device; the rest as is.

    Nothing waits for what a GPU is doing: its copies read page-locked memory, in their turn. A tensor that occurs
    twice is copied once.

    Args:
        known: copies that were made before, by the ids of tensors that are still held.
    """
    if device.type == "cpu":
        return table  # the host
    known = {} if known is None else known
    if isinstance(table, torch.Tensor):
        if id(table) not in known:
            known[id(table)] = table.pin_memory().to(device, non_blocking=True)
        return known[id(table)]
    if isinstance(table, torch.device):
        return device
    if isinstance(table, tuple | list):
        parts = [moved(part, device, known) for part in table]
        return type(table)(*parts) if hasattr(table, "_fields") else type(table)(parts)
    if is_dataclass(table):
        made = copy(table)
        vars(made).update({name: moved(part, device, known) for name, part in vars(table).items()})
        return made
    return table
