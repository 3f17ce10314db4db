"""Which rows a convolution over a forest reads, and, for its backward, by which rows each row is read.

Shapes: n local rows, m fetched rows, M rows sent to other ranks, W taps, F fragments, L listed rows, E entries of
their lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch


class Channels(NamedTuple):
    """Heads and sizes behind the channels [q | k | v]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def splits(self) -> tuple[int, int, int]:
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True, eq=False)
class Readers:
    """Rows by which each row is read. Most are read only inside their fragment, by themselves and the W - 1 rows after
    them; the *listed* ones are read across a border of fragments or sent to another rank."""

    following: torch.Tensor  # int32 [n] rows of the same fragment that read it, itself included; -1 where listed
    rows: torch.Tensor  # int32 [L] listed local rows, ascending
    row_ptr: torch.Tensor  # int32 [L + 1]
    row_list: torch.Tensor  # int32 [E] reader * W + tap, or -1 - place among the rows that came home
    fetched: torch.Tensor  # int32 [m] all fetched rows
    fetched_ptr: torch.Tensor  # int32 [m + 1]
    fetched_list: torch.Tensor  # int32 [E'] reader * W + tap


@dataclass(frozen=True, eq=False)
class ConvTables:
    """Made once per pack; tensors are made when first asked for."""

    fragment_row: np.ndarray
    tap_rows: np.ndarray  # int64 [n, W]
    fetched: int  # m
    sent_rows: np.ndarray  # int64 [M]
    device: torch.device | str

    @property
    def rows(self) -> int:
        return len(self.tap_rows)

    @property
    def used(self) -> int:
        """Rows in fragments; the rest is padding."""
        return int(self.fragment_row[-1])

    @property
    def width(self) -> int:
        return self.tap_rows.shape[1]

    @cached_property
    def taps(self) -> torch.Tensor:
        """int64 [n, W] row of concat(local rows, fetched rows) for each tap, oldest first; n + m reads zero."""
        return torch.as_tensor(self.tap_rows, device=self.device)

    @cached_property
    def short_taps(self) -> torch.Tensor:
        """`taps` in int32."""
        return torch.as_tensor(self.tap_rows.astype(np.int32), device=self.device)

    @cached_property
    def late(self) -> torch.Tensor:
        """int32 local rows that read fetched ones."""
        reads_fetched = (self.tap_rows >= self.rows) & (self.tap_rows < self.rows + self.fetched)
        return torch.as_tensor(np.flatnonzero(reads_fetched.any(1)).astype(np.int32), device=self.device)

    @cached_property
    def sent(self) -> torch.Tensor:
        """int64 [M] rows sent to other ranks."""
        return torch.as_tensor(self.sent_rows, device=self.device)

    @cached_property
    def readers(self) -> Readers:
        return _readers(self)


def conv_tables(
    fragment_row: np.ndarray,
    history: np.ndarray,
    rows: int,
    fetched: int,
    device: torch.device | str = "cpu",
    sent_rows: np.ndarray | tuple[int, ...] = (),
) -> ConvTables:
    """Tap tables of one rank.

    Args:
        fragment_row: int [F + 1] row boundaries of the fragments. Rows after the last one are padding and give zero.
        history: int [F, W - 1] rows above each fragment's first row, oldest first; -1 above a root.
        rows: n, padding row included.
        fetched: m.
        sent_rows: int [M] local rows that other ranks read; a row may occur for several of them.
    """
    width = history.shape[1] + 1
    zero = rows + fetched
    taps = np.full((rows, width), zero, np.int64)
    used = np.arange(int(fragment_row[-1]))
    fragment = np.repeat(np.arange(len(history)), np.diff(fragment_row))
    offset = used - np.asarray(fragment_row)[fragment]
    for tap in range(width):
        back = width - 1 - tap
        above = history[fragment, np.minimum(offset + tap, width - 2)] if width > 1 else used
        taps[used, tap] = np.where(offset >= back, used - back, np.where(above < 0, zero, above))
    return ConvTables(np.asarray(fragment_row), taps, fetched, np.asarray(sent_rows, np.int64), device)


def _readers(tables: ConvTables) -> Readers:
    rows, width, total = tables.rows, tables.width, tables.rows + tables.fetched
    used = tables.used
    following = np.zeros(rows, np.int64)
    ends = np.repeat(tables.fragment_row[1:], np.diff(tables.fragment_row))
    following[:used] = np.minimum(ends - np.arange(used), width)

    reader, tap = (axis.reshape(-1) for axis in np.indices((rows, width)))
    read = tables.tap_rows.reshape(-1)
    start = np.zeros(rows, np.int64)
    start[:used] = np.repeat(tables.fragment_row[:-1], np.diff(tables.fragment_row))
    crosses = (read < total) & ((read < start[reader]) | (read > reader))
    listed = np.zeros(total, bool)
    listed[read[crosses]] = True
    listed[tables.sent_rows] = True
    following[listed[:rows]] = -1

    live = np.flatnonzero(read < total)
    live = live[listed[read[live]]]
    source = np.concatenate([read[live], tables.sent_rows])
    entry = np.concatenate([reader[live] * width + tap[live], -1 - np.arange(len(tables.sent_rows))])
    order = np.argsort(source, kind="stable")
    source, entry = source[order], entry[order]
    local = np.flatnonzero(listed[:rows])
    here = source < rows
    arrays = (
        following,
        local,
        np.append(np.searchsorted(source[here], local), int(here.sum())),
        entry[here],
        np.arange(tables.fetched),
        np.searchsorted(source[~here], rows + np.arange(tables.fetched + 1)),
        entry[~here],
    )
    return Readers(*(torch.as_tensor(x.astype(np.int32), device=tables.device) for x in arrays))
