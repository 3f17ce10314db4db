"""The plan of Gated DeltaNet layers against its definition, on random forests and layouts."""

from __future__ import annotations

import numpy as np
import pytest

from cp_engine.sharding import gdn_plan as planning
from cp_engine.sharding.gdn_plan import GdnPlan, gdn_plan
from cp_engine.sharding.layout import Layout
from tests.forests import Rows
from tests.sharding.plan_cases import SEEDS, case, check_exchange, rank_rows


def check_fragments(rows: Rows, tokens: list[int], plan: GdnPlan) -> list[list[int]]:
    """Fragments cover the rows, each inside one segment, parents first; returns the tokens of each."""
    bounds = plan.fragment_row.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(tokens) and len(bounds) == plan.fragments + 1
    fragments = [tokens[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    for index, fragment in enumerate(fragments):
        assert fragment == list(range(fragment[0], fragment[0] + len(fragment)))
        assert len(set(rows.forest.segment_of[fragment].tolist())) == 1
        assert plan.fragment_parent[index] < index
        assert plan.fragment_parent[index] < 0 or plan.fragment_entry[index] < 0
    return fragments


def check_chains(plan: GdnPlan) -> None:
    heads = plan.chain_fragment.tolist()
    assert heads[0] == 0 and heads[-1] == plan.fragments
    chain_of = np.repeat(np.arange(len(heads) - 1), np.diff(heads))
    for index, parent in enumerate(plan.fragment_parent.tolist()):
        if index not in heads:
            assert parent == index - 1
            continue
        above = -1 if parent < 0 else plan.chain_level[chain_of[parent]]
        assert plan.chain_level[chain_of[index]] == above + 1


def fold_paths(plans: list[GdnPlan], fragments: list[list[list[int]]]) -> list[list[list[int]]]:
    """Run the state passes with "the tokens folded so far" as the state; returns what each fragment ends with."""
    fold = plans[0].fold
    first_exit, first_entry = (np.cumsum(c) - c for c in (fold.exit_counts, fold.entry_counts))
    below_entry, exit_state = [], []
    for rank, plan in enumerate(plans):
        ends: list[tuple[int, list[int]]] = []  # (global entry that the state builds on or -1, tokens since)
        for index, own in enumerate(fragments[rank]):
            parent, entry = int(plan.fragment_parent[index]), int(plan.fragment_entry[index])
            base, above = ends[parent] if parent >= 0 else (entry + first_entry[rank] if entry >= 0 else -1, [])
            ends.append((base, above + own))
        below_entry.append(ends)
        assert len(plan.exit_fragment) == fold.exit_counts[rank]
        for x, fragment in enumerate(plan.exit_fragment.tolist()):
            base, suffix = ends[fragment]
            assert base == fold.exit_entry[first_exit[rank] + x]
            assert plan.exit_entry[x] == (base - first_entry[rank] if base >= 0 else -1)
            exit_state.append((base, suffix))
    entry_state: list[list[int] | None] = [None] * len(fold.entry_exit)
    for entry in np.argsort(fold.entry_level, kind="stable").tolist():
        base, suffix = exit_state[fold.entry_exit[entry]]
        assert fold.entry_level[entry] == (0 if base < 0 else fold.entry_level[base] + 1)
        entry_state[entry] = (entry_state[base] if base >= 0 else []) + suffix
    return [[(entry_state[b] if b >= 0 else []) + suffix for b, suffix in ends] for ends in below_entry]


def check_history(rows: Rows, buffer: list[int], fragments: list[list[int]], plan: GdnPlan, width: int) -> None:
    assert plan.history.shape == (len(fragments), width - 1)
    for index, fragment in enumerate(fragments):
        above = rows.paths[fragment[0]][:-1][-(width - 1) :] if width > 1 else []
        found = [buffer[row] if row >= 0 else -1 for row in plan.history[index].tolist()]
        assert found == [-1] * (width - 1 - len(above)) + above


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_gdn_affine_plan(seed, width):
    rows, layout = case(seed)
    plans = [gdn_plan(rows.forest, layout, rank, "affine", width) for rank in range(layout.world)]
    tokens = [layout.rank_tokens(rank).tolist() for rank in range(layout.world)]
    fragments = [check_fragments(rows, tokens[rank], plan) for rank, plan in enumerate(plans)]
    for rank, plan in enumerate(plans):
        assert plan.exchange == "affine" and plan.order is None
        check_chains(plan)
        check_history(
            rows, rank_rows(layout, rank) + plan.history_fetch.recv_tokens.tolist(), fragments[rank], plan, width
        )
        for name, value in vars(plan.fold).items():
            assert np.array_equal(value, getattr(plans[0].fold, name)), name
    reads = [
        {t for fragment in parts for t in (rows.paths[fragment[0]][:-1][-(width - 1) :] if width > 1 else [])}
        for parts in fragments
    ]
    check_exchange(layout, [plan.history_fetch for plan in plans], reads)
    for rank, ends in enumerate(fold_paths(plans, fragments)):
        for fragment, path in zip(fragments[rank], ends, strict=True):
            assert path == rows.paths[fragment[-1]]
    check_crossings(rows, layout, fragments, plans)


def check_crossings(rows: Rows, layout: Layout, fragments: list[list[list[int]]], plans: list[GdnPlan]) -> None:
    """A state leaves a rank once for each fragment with remote children, and enters each rank once."""
    crossing = set()  # (reading rank, last token of the remote parent fragment)
    for rank, parts in enumerate(fragments):
        for fragment in parts:
            path = rows.paths[fragment[0]]
            if len(path) > 1 and layout.owner[path[-2]] != rank:
                crossing.add((rank, path[-2]))
    for rank, plan in enumerate(plans):
        exits = {fragments[rank][f][-1] for f in plan.exit_fragment}
        assert exits == {token for _, token in crossing if layout.owner[token] == rank}
        assert len(plan.exit_fragment) == len(exits)
        assert plan.fold.entry_counts[rank] == len({token for reader, token in crossing if reader == rank})


def hand_on_paths(plans: list[GdnPlan], fragments: list[list[list[int]]]) -> list[list[list[int]]]:
    """What each fragment ends with when "the tokens so far" is the state and rounds carry it; a state must be there in
    the round that sends it, and each entry must be given one, once."""
    given: list[dict[int, list[int]]] = [{} for _ in plans]  # by entry slot

    def ends_of(rank: int) -> list[list[int] | None]:
        plan, ends = plans[rank], []
        for index, own in enumerate(fragments[rank]):
            parent, entry = int(plan.fragment_parent[index]), int(plan.fragment_entry[index])
            above = ends[parent] if parent >= 0 else given[rank].get(entry) if entry >= 0 else []
            ends.append(None if above is None else above + own)
        return ends

    for number in range(len(plans[0].rounds)):
        sent: dict[tuple[int, int], list] = {}
        for rank, plan in enumerate(plans):
            ends, moves = ends_of(rank), plan.rounds[number].moves
            leaving = iter(plan.rounds[number].exits.tolist())
            for reader, count in enumerate(moves.send_counts):
                sent[rank, reader] = [ends[plan.exit_fragment[next(leaving)]] for _ in range(count)]
            assert next(leaving, None) is None
        for rank, plan in enumerate(plans):
            arriving = iter(plan.rounds[number].entries.tolist())
            for sender in range(len(plans)):
                for state in sent[sender, rank]:
                    slot = next(arriving)
                    assert state is not None and slot not in given[rank] and plan.entry_level[slot] == number
                    given[rank][slot] = state
            assert next(arriving, None) is None
    return [ends_of(rank) for rank in range(len(plans))]


@pytest.mark.parametrize("seed", SEEDS)
def test_states_handed_on(seed, monkeypatch):
    rows, layout = case(seed)
    monkeypatch.setattr(planning, "MOST_ROUNDS", 99)
    plans = [gdn_plan(rows.forest, layout, rank, "affine", 4) for rank in range(layout.world)]
    tokens = [layout.rank_tokens(rank).tolist() for rank in range(layout.world)]
    fragments = [check_fragments(rows, tokens[rank], plan) for rank, plan in enumerate(plans)]
    for rank, ends in enumerate(hand_on_paths(plans, fragments)):
        for fragment, path in zip(fragments[rank], ends, strict=True):
            assert path == rows.paths[fragment[-1]]


def test_deep_crossings_are_left_to_maps():
    deep = [case(seed) for seed in SEEDS]
    for rows, layout in deep:
        plan = gdn_plan(rows.forest, layout, 0, "affine", 4)
        by_maps = plan.fold.rounds > planning.MOST_ROUNDS
        assert len(plan.rounds) == (0 if by_maps else plan.fold.rounds)
        assert not (by_maps and plan.entry_level.any())
    most = planning.MOST_ROUNDS + 1
    found = {min(gdn_plan(r.forest, layout, 0, "affine", 4).fold.rounds, most) for r, layout in deep}
    assert found == set(range(most + 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_gdn_ulysses_plan(seed):
    rows, layout = case(seed)
    everything = [token for rank in range(layout.world) for token in rank_rows(layout, rank)]
    tokens = list(range(rows.forest.tokens))
    for rank in range(layout.world):
        plan = gdn_plan(rows.forest, layout, rank, "ulysses", 4)
        assert plan.exchange == "ulysses"
        assert np.array(everything)[plan.order.dfs_order].tolist() == tokens
        fragments = check_fragments(rows, tokens, plan)
        check_chains(plan)
        check_history(rows, tokens, fragments, plan, 4)
        assert plan.history_fetch.rows_in == plan.history_fetch.rows_out == 0
        assert len(plan.exit_fragment) == 0 and (plan.fragment_entry < 0).all()
        for fragment, path in zip(fragments, fold_paths([plan], [fragments])[0], strict=True):
            assert path == rows.paths[fragment[-1]]
