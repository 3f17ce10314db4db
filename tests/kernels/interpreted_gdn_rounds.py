"""States handed on from rank to rank, in Triton's interpreter: the ranks one after the other in this process, states
and their gradients carried by hand. `test_gdn_triton.py` runs this file.

Shapes: T tokens of a forest, n rows of a rank, P ranks, X exits and Y entries of a rank; states are [H, K, V].
"""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_engine.kernels.gdn import triton as gdn
from cp_engine.kernels.gdn.reference import Inputs
from cp_engine.kernels.gdn.triton import backward_pass, forward_pass, packing
from cp_engine.kernels.gdn.triton.forward_pass import Chains
from cp_engine.sharding import gdn_plan as planning
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import Layout, layout_from_cuts
from tests.forests import random_layout
from tests.gdn_oracle import forest_of_segments, random_forest, relative_errors
from tests.kernels.attention_oracle import poisoned_memory
from tests.kernels.gdn_cases import Case, case, whole_plan
from tests.kernels.interpreted_gdn import BOUND, CHAIN_TABLES

SIZES = (1, 2, 16, 16)


@pytest.fixture(autouse=True, scope="module")
def one_configuration():
    single_configurations()


class Rank:
    """One rank's share of a case, and what reaches it."""

    def __init__(self, forest: Forest, layout: Layout, rank: int, whole: Case):
        self.tokens = tokens = torch.as_tensor(layout.rank_tokens(rank))
        rows = max(1, len(tokens))
        self.plan = p = planning.gdn_plan(forest, layout, rank, "affine", 4)

        def mine(x: torch.Tensor) -> torch.Tensor:
            return x[tokens] if len(tokens) else x.new_zeros((1, *x.shape[1:]))

        self.inputs, self.dout = Inputs(*(mine(x) for x in whole.inputs)), mine(whole.dout)
        fragments = (p.fragment_row, p.fragment_parent, p.fragment_entry, p.chain_fragment, p.chain_level)
        self.tables = gdn.chain_tables(*fragments, p.exit_fragment, p.exit_entry, p.entry_level, rows)
        self.entry_states = whole.entry_states.new_full((len(p.entry_level), *SIZES[1:]), torch.nan)
        self.dexit = whole.entry_states.new_full((len(p.exit_fragment), *SIZES[1:]), torch.nan)


def carry(ranks: list[Rank], number: int, exits: list[torch.Tensor]) -> None:
    """A round's states, from every rank to every other."""
    for giver, states in zip(ranks, exits, strict=True):
        for place, taker in enumerate(ranks):
            sent = of_peer(giver.plan.rounds[number].exits, giver.plan.rounds[number].moves.send_counts, place)
            counts = taker.plan.rounds[number].moves.recv_counts
            taker.entry_states[of_peer(taker.plan.rounds[number].entries, counts, ranks.index(giver))] = states[sent]


def carry_back(ranks: list[Rank], number: int, dentries: list[torch.Tensor]) -> None:
    for place, giver in enumerate(ranks):
        rounds = giver.plan.rounds[number]
        giver.dexit[rounds.exits] = 0
        for taker, dentry in zip(ranks, dentries, strict=True):
            arrived = of_peer(taker.plan.rounds[number].entries, taker.plan.rounds[number].moves.recv_counts, place)
            index = of_peer(rounds.exits, rounds.moves.send_counts, ranks.index(taker))
            giver.dexit[index] += dentry[arrived]


def of_peer(index: np.ndarray, counts: list[int], peer: int) -> torch.Tensor:
    first = sum(counts[:peer])
    return torch.as_tensor(index[first : first + counts[peer]])


def forward_of(ranks: list[Rank], stages: list) -> list[torch.Tensor]:
    walks = [gdn.forward(rank.inputs, own, rank.tables) for rank, own in zip(ranks, stages, strict=True)]
    for turn in range(len(ranks[0].plan.rounds) + 1):
        if turn < len(ranks[0].plan.rounds):
            carry(ranks, turn, [walk.leaving(turn, rank.entry_states) for walk, rank in zip(walks, ranks, strict=True)])
        for walk, rank in zip(walks, ranks, strict=True):
            walk.run(turn, rank.entry_states)
    return [walk.outputs() for walk in walks]


def backward_of(ranks: list[Rank], stages: list) -> list[Inputs]:
    walks = []
    for rank, own in zip(ranks, stages, strict=True):
        local = gdn.backward_stages(rank.inputs, own, rank.dout, rank.tables)
        walks.append(gdn.backward(rank.inputs, own, rank.dout, local, rank.entry_states, rank.tables))

    def given(rank: Rank) -> Callable[[], torch.Tensor]:
        return lambda: rank.dexit

    for turn in range(len(ranks[0].plan.rounds), 0, -1):
        dentries = [walk.entering(turn, given(rank)) for walk, rank in zip(walks, ranks, strict=True)]
        carry_back(ranks, turn - 1, dentries)
        for dentry in dentries:
            dentry.fill_(torch.nan)  # while they are on their way no later turn touches them
    return [walk.gradients(given(rank)) for walk, rank in zip(walks, ranks, strict=True)]


def worst_error(forest: Forest, layout: Layout, tamper: Callable[[Rank], None] = lambda rank: None) -> float:
    """Of outputs and gradients against float64 on one rank: the largest difference over the largest value, infinite
    where anything is not a number."""
    whole = case(whole_plan(forest), 0, SIZES)
    ranks = [Rank(forest, layout, rank, whole) for rank in range(layout.world)]
    for rank in ranks:
        tamper(rank)
    with poisoned_memory():
        stages = [gdn.chunk_stages(rank.inputs, rank.tables) for rank in ranks]
        found = zip(forward_of(ranks, stages), backward_of(ranks, stages), strict=True)
    truth = whole.truth
    truth = [truth[0], *truth[4:]]
    together = [torch.full_like(x, torch.nan) for x in truth]
    for rank, (o, grads) in zip(ranks, found, strict=True):
        for x, part in zip(together, (o, *grads), strict=True):
            x[rank.tokens] = part[: len(rank.tokens)].double()
    return max(relative_errors(together, truth))


def cut_trunk() -> tuple[Forest, Layout]:
    """A trunk over both ranks, with branches on either side of its end and one of a single chunk."""
    forest = forest_of_segments([(-1, 200), (0, 70), (0, 30), (2, 80), (0, 66), (0, 20), (0, 90)])
    start = forest.segment_start
    return forest, layout_from_cuts([0, 96, int(start[2]), int(start[4]), forest.tokens], [0, 1, 0, 1], 2)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trunk_over_two_ranks(packed, monkeypatch):
    if not packed:
        monkeypatch.setattr(packing, "LEAST_SPARED", 2.0)
    forest, layout = cut_trunk()
    plan = planning.gdn_plan(forest, layout, 0, "affine", 4)
    assert len(plan.rounds) == 2
    assert worst_error(forest, layout) <= BOUND


@pytest.mark.parametrize(("seed", "wave"), [(0, 3), (7, 4096)])
def test_random_forests_over_three_ranks(seed, wave, monkeypatch):
    monkeypatch.setattr(planning, "MOST_ROUNDS", 99)
    monkeypatch.setattr(CHAIN_TABLES, "WAVE", wave)
    forest = random_forest(seed, 9)
    layout = random_layout(forest, seed, 3)
    assert len(planning.gdn_plan(forest, layout, 0, "affine", 4).rounds) > 2
    assert worst_error(forest, layout) <= BOUND


def test_chains_are_walked_once_and_those_that_lead_to_an_exit_first(monkeypatch):
    forest, layout = cut_trunk()
    forward, backward, launch, launch_back = [], [], forward_pass._launch, backward_pass._launch

    def recorded(*rows, chains, **options):
        walk = rows[8]
        number = {
            Chains.OPEN: lambda level: level.open_end - level.begin,
            Chains.ALL: lambda level: level.end - level.begin,
        }
        number[Chains.CLOSED] = lambda level: level.end - level.open_end
        forward.append((chains, sum(number[chains](level) for level in walk.levels)))
        return launch(*rows, chains=chains, **options)

    def recorded_back(tensors, below, starts, drows, first_kept, walk, number, end, *rest, **options):
        backward.append(end - walk.levels[number].begin)
        return launch_back(tensors, below, starts, drows, first_kept, walk, number, end, *rest, **options)

    whole = case(whole_plan(forest), 0, SIZES)
    ranks = [Rank(forest, layout, rank, whole) for rank in range(2)]
    stages = [gdn.chunk_stages(rank.inputs, rank.tables) for rank in ranks]
    monkeypatch.setattr(forward_pass, "_launch", recorded)
    monkeypatch.setattr(backward_pass, "_launch", recorded_back)
    forward_of(ranks, stages)
    chains = sum(len(wave.chains) for rank in ranks for wave in rank.tables.waves)
    assert sum(count for _, count in forward) == chains
    kinds = [kind for kind, _ in forward]
    assert kinds.count(Chains.OPEN) == kinds.count(Chains.CLOSED) == 2 and kinds[0] is Chains.OPEN
    backward_of(ranks, stages)
    assert sum(backward) == chains


def with_rounds_swapped(rank: Rank) -> None:
    """States of two entries arrive in each other's place."""
    first, *rest = rank.plan.rounds
    if len(first.entries) > 1:
        first = replace(first, entries=first.entries[::-1].copy())
        rank.plan = replace(rank.plan, rounds=(first, *rest))


def in_one_turn(rank: Rank) -> None:
    """Trees below entries do not wait for the round in which their states arrive."""
    rank.tables = replace(rank.tables, waves=tuple(replace(wave, turn=min(wave.turn, 1)) for wave in rank.tables.waves))


@pytest.mark.parametrize("tamper", [with_rounds_swapped, in_one_turn])
def test_planted_faults_are_seen(tamper):
    forest = forest_of_segments([(-1, 100), (0, 40), (0, 70), (-1, 90), (3, 66), (3, 20)])
    start = forest.segment_start
    cuts = [0, 64, int(start[1]), int(start[2]), int(start[3]), int(start[3]) + 64, int(start[4]), forest.tokens]
    layout = layout_from_cuts(cuts, [0, 1, 0, 1, 0, 1, 0], 2)
    assert worst_error(forest, layout) <= BOUND
    assert worst_error(forest, layout, tamper) > 1e-2
