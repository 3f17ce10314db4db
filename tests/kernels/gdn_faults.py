"""Faults in the tables of one wave of chains, planted to see whether bounds see them: on a GPU and in the interpreter.

Every fault asserts that it changes something: tables of which the last range is empty made one of them a fault of
nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_engine.kernels.gdn.triton import ChainTables


def changed(tables: ChainTables, **fields: torch.Tensor) -> ChainTables:
    """The tables with other fields of their only wave."""
    (wave,) = tables.waves
    assert any(not torch.equal(getattr(wave, name), value) for name, value in fields.items()), "a fault of nothing"
    return replace(tables, waves=(replace(wave, **fields),))


def _with_other_starts(tables: ChainTables, start: torch.Tensor) -> ChainTables:
    chains = tables.waves[0].chains.clone()
    chains[:, 2] = start
    return changed(tables, chains=chains)


def without_entry_of_children(tables: ChainTables) -> ChainTables:
    """Chains start from zero instead of their branch point."""
    return _with_other_starts(tables, torch.zeros_like(tables.waves[0].chains[:, 2]))


def without_entry_of_last_chain(tables: ChainTables) -> ChainTables:
    start = tables.waves[0].chains[:, 2].clone()
    start[-1] = 0
    return _with_other_starts(tables, start)


def with_branch_points_swapped(tables: ChainTables) -> ChainTables:
    """Two branch points' children start from each other's state."""
    start = tables.waves[0].chains[:, 2]
    first, second = start.unique()[-2:]
    return _with_other_starts(tables, torch.where(start == first, second, torch.where(start == second, first, start)))


def without_last_chain_sum(tables: ChainTables) -> ChainTables:
    """The last branch point that chains start from forgets the state gradient of one of them."""
    return changed(tables, reader_ptr=_one_less(tables.waves[0].reader_ptr))


def without_last_twig_sum(tables: ChainTables) -> ChainTables:
    """The last branch point that twigs start from forgets the state gradient of one of them."""
    return changed(tables, twig_ptr=_one_less(tables.waves[0].twig_ptr))


def _one_less(ends: torch.Tensor) -> torch.Tensor:
    """Ranges [ends[i], ends[i + 1]) without the last element of the last one that is not empty; the first is of the
    zero state, whose gradient nobody asks for."""
    assert ends[-1] > ends[1], "nothing starts from a branch point"
    return torch.where(ends == ends[-1], ends - 1, ends)
