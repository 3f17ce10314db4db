"""Bounds for 16-bit results of the gated delta rule: those of the same kernels on every root path alone.

In 16 bits an error says little by itself, since it grows with the keys and the decays. A tree is right when it is about
as far from float64 as its paths, each run alone, are from theirs: of every segment, at most 1.5 x the larger of the
paths' error on it and the 99th percentile of their errors on segments about as long; the worst at most 1.25 x the
paths' worst. An error is the root mean square over a segment's rows (or over a state), over that of the whole tensor.

Shapes: n rows, F fragments, p paths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cp_engine.kernels.gdn.reference import Inputs
from tests.kernels.gdn_cases import NAMES, Case

SEGMENT, WORST = 1.5, 1.25
STATES = ("B", "A", "dentry")  # one item an exit or an entry; the others are rows
SHORT = 16  # tokens; an error of few numbers is left to chance, so segments below are judged together


def paths_alone(case: Case) -> tuple[Case, np.ndarray]:
    """Every local root path (of a leaf, or of an exit) as a fragment of its own, and the fragments that they hold."""
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
    flat = replace(
        plan,
        fragment_row=np.cumsum([0] + [int(lengths[path].sum()) for path in paths]),
        fragment_parent=np.full(len(paths), -1),
        fragment_entry=np.array([plan.fragment_entry[path[0]] for path in paths], np.int64),
        chain_fragment=np.arange(len(paths) + 1),
        chain_level=np.zeros(len(paths), np.int64),
        exit_fragment=np.arange(len(paths) - exits, len(paths)),
    )
    rows = [np.arange(start[f], start[f + 1]) for f in member.tolist()]
    row = torch.as_tensor(np.concatenate([*rows, np.zeros(int(not rows), np.int64)]), device=case.dout.device)
    inputs = Inputs(*(x[row] for x in case.inputs))
    return replace(case, plan=flat, inputs=inputs, dout=case.dout[row]), member


def item_errors(case: Case, got: list[torch.Tensor], member: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Of every result, the error of each fragment in ``member`` (the rows, one after the other) or of each state."""
    found, copies = {}, np.bincount(member, minlength=len(lengths))
    share = torch.as_tensor(np.repeat(1.0 / copies[member], lengths[member]), device=case.dout.device)
    for name, x, true in zip(NAMES, got, case.truth(), strict=True):
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
    """The largest error of each segment among the paths that hold it."""
    flat, member = paths_alone(case)
    errors = item_errors(flat, flat.run(flat.tables()), member, np.diff(case.plan.fragment_row))
    for name, each in errors.items():
        if name not in STATES:
            errors[name] = np.zeros(case.plan.fragments)
            np.maximum.at(errors[name], member, each)
    return errors


def with_short_together(errors: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The errors of longer segments, and one of all short ones."""
    short = lengths < SHORT
    if not short.any():
        return errors
    return np.append(errors[~short], np.sqrt(np.average(errors[short] ** 2, weights=lengths[short])))


def share_of_bounds(case: Case, tables=None) -> dict[str, float]:
    """How much of its bound each result of the Triton backend uses; above 1 it is wrong."""
    lengths, used = np.diff(case.plan.fragment_row), {}
    kinds = np.round(np.log2(np.append(lengths[lengths >= SHORT], SHORT)))
    alone = errors_alone(case)
    tree = item_errors(case, case.run(tables or case.tables()), np.arange(len(lengths)), lengths)
    for name, errors in tree.items():
        floor, kind = alone[name], np.zeros(len(errors))
        if name not in STATES:
            errors, floor = (with_short_together(x, lengths) for x in (errors, floor))
            kind = kinds[: len(errors)]
        usual = np.array([np.percentile(floor[kind == k], 99) for k in kind])
        each = errors / np.maximum(SEGMENT * np.maximum(floor, usual), 1e-30)
        used[name] = float(max(each.max(), errors.max() / max(WORST * floor.max(), 1e-30)))
    return used
