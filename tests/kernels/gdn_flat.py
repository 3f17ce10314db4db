"""Bounds for 16-bit results of the gated delta rule: those of the same kernels on every root path alone.

In 16 bits an error says little by itself, since it grows with the keys and the decays. A tree is right when it is about
as far from float64 as its paths, each run alone, are from theirs: of every segment, at most 1.5 x the larger of the
paths' error on it and the 99th percentile of their errors on segments about as long; the worst at most 1.25 x the
paths' worst. An error is the root mean square over a segment's rows (or over a state), over that of the whole tensor.

Each path is run twice: in chunks from its first token on, and cut where the tree's fragments begin, which is where the
tree's chunks begin. What a token's chunk holds decides what is rounded, and in training alone it is left to the lengths
before it: the last token of a full chunk gets its gradient through a rounded state as a short segment's token does.

Shapes: n rows, F fragments, p paths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from cp_engine.kernels.gdn.reference import Inputs
from tests.kernels.gdn_cases import NAMES, Case

SEGMENT, WORST = 1.5, 1.25
STATES = ("B", "A", "dentry")  # one item an exit or an entry; the others are rows
SHORT = 16  # tokens; an error of few numbers is left to chance, so segments below are judged together


@lru_cache(maxsize=8)
def paths_alone(case: Case, cut: bool) -> tuple[Case, np.ndarray]:
    """Every local root path (of a leaf, or of an exit) as a sequence of its own, and the fragments that they hold.

    Args:
        cut: keep the fragments of a path, each the next one's parent; else a path is one fragment.
    """
    plan = case.plan
    parent, start = plan.fragment_parent, plan.fragment_row
    leaf = ~np.isin(np.arange(plan.fragments), np.concatenate([parent, plan.exit_fragment]))
    paths = []
    for fragment in np.concatenate([np.flatnonzero(leaf), plan.exit_fragment]).astype(np.int64).tolist():
        path = [fragment]
        while parent[path[-1]] >= 0:
            path.append(int(parent[path[-1]]))
        paths.append(path[::-1])
    lengths, exits = np.diff(start), len(plan.exit_fragment)
    member = np.array([f for path in paths for f in path], np.int64)
    pieces = [[[f] for f in path] if cut else [path] for path in paths]  # the fragments of each path's fragments
    first = np.cumsum([0] + [len(each) for each in pieces])
    above = np.arange(-1, first[-1] - 1)
    above[first[:-1]] = -1
    entry = np.full(first[-1], -1)
    entry[first[:-1]] = [plan.fragment_entry[path[0]] for path in paths]
    flat = replace(
        plan,
        fragment_row=np.cumsum([0] + [int(lengths[piece].sum()) for each in pieces for piece in each]),
        fragment_parent=above,
        fragment_entry=entry,
        chain_fragment=first,
        chain_level=np.zeros(len(paths), np.int64),
        exit_fragment=first[len(paths) - exits + 1 :] - 1,
    )
    rows = [np.arange(start[f], start[f + 1]) for f in member.tolist()]
    row = torch.as_tensor(np.concatenate([*rows, np.zeros(int(not rows), np.int64)]), device=case.dout.device)
    inputs = Inputs(*(x[row] for x in case.inputs))
    return replace(case, plan=flat, inputs=inputs, dout=case.dout[row]), member


def item_errors(case: Case, got: list[torch.Tensor], member: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Of every result, the error of each fragment in ``member`` (the rows, one after the other) or of each state."""
    found, copies = {}, np.bincount(member, minlength=len(lengths))
    share = torch.as_tensor(np.repeat(1.0 / copies[member], lengths[member]), device=case.dout.device)
    for name, x, true in zip(NAMES, got, case.truth, strict=True):
        if not x.numel() or not len(member):
            continue
        # Means over a row or a state; a row counts once in the scale, however many paths hold it.
        square, size = ((y.flatten(1).square().mean(1)) for y in (x.double() - true, true))
        if name in STATES:
            errors, scale = square, size.mean()
        else:
            rows = len(share)
            errors = torch.stack([part.mean() for part in square[:rows].split(lengths[member].tolist())])
            scale = (size[:rows] * share).sum() / share.sum()
        found[name] = (errors / scale.clamp_min(1e-60)).sqrt().nan_to_num(torch.inf, torch.inf, torch.inf).cpu().numpy()
    return found


def errors_alone(case: Case) -> dict[str, np.ndarray]:
    """The largest error of each segment, and of each state, among both runs of the paths that hold it."""
    largest: dict[str, np.ndarray] = {}
    for cut in (False, True):
        flat, member = paths_alone(case, cut)
        for name, each in item_errors(flat, flat.run(flat.tables()), member, np.diff(case.plan.fragment_row)).items():
            found = largest.setdefault(name, np.zeros(len(each) if name in STATES else case.plan.fragments))
            np.maximum.at(found, np.arange(len(each)) if name in STATES else member, each)
    return largest


def with_short_together(errors: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The errors of longer segments, and one of all short ones."""
    short = lengths < SHORT
    if not short.any():
        return errors
    return np.append(errors[~short], np.sqrt(np.average(errors[short] ** 2, weights=lengths[short])))


def share_of_segments(errors: np.ndarray, floor: np.ndarray, lengths: np.ndarray) -> float:
    """How much of their bounds the errors of segments use, beside those of the paths alone; above 1 one is wrong."""
    kinds = np.round(np.log2(np.append(lengths[lengths >= SHORT], SHORT)))
    errors, floor = (with_short_together(x, lengths) for x in (errors, floor))
    return _share(errors, floor, kinds[: len(errors)])


def _share(errors: np.ndarray, floor: np.ndarray, kind: np.ndarray) -> float:
    usual = np.array([np.percentile(floor[kind == k], 99) for k in kind])
    each = errors / np.maximum(SEGMENT * np.maximum(floor, usual), 1e-30)
    return float(max(each.max(), errors.max() / max(WORST * floor.max(), 1e-30)))


def share_of_bounds(case: Case, tables=None) -> dict[str, float]:
    """How much of its bound each result of the Triton backend uses; above 1 it is wrong."""
    lengths, used = np.diff(case.plan.fragment_row), {}
    alone = errors_alone(case)
    tree = item_errors(case, case.run(tables or case.tables()), np.arange(len(lengths)), lengths)
    for name, errors in tree.items():
        if name in STATES:
            used[name] = _share(errors, alone[name], np.zeros(len(errors)))
        else:
            used[name] = share_of_segments(errors, alone[name], lengths)
    return used
