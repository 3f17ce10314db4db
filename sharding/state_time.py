"""Predicted time of what states that cross ranks add to a recurrent layer: handed on in rounds, or by affine maps.

Integers (nanoseconds), so that every host predicts the same number.

Shapes: P ranks, R rounds. Times are int64 [P] nanoseconds of one layer unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.cost import MIB, Costs, ModelShape
from cp_engine.sharding.recurrent_figures import MapFigures, RecurrentFigures, TurnFigures


def chunk_time(chunks: np.ndarray, cost: int, shape: ModelShape) -> np.ndarray:
    """Nanoseconds of a pass over so many chunks for all value heads; ``cost`` is that of 1,000 chunks of one head."""
    return chunks * cost * head_scale(shape) // 1000


def head_scale(shape: ModelShape) -> int:
    """Recurrent value heads, in heads of the measured size 128."""
    return -(-shape.gdn_value_heads * shape.gdn_head_dim**2 // 128**2)


def gate_time(tokens: np.ndarray, shape: ModelShape, costs: Costs) -> np.ndarray:
    """Forward of the output gate's products, which hide what crosses ranks; backward has two."""
    product = 2 * shape.hidden * shape.gdn_value_heads * shape.gdn_head_dim * shape.gdn_own_gate
    return tokens * (product * costs.tera_product // 10**9) // 1000


@dataclass(frozen=True, eq=False)
class Crossing:
    """What states that cross ranks add to one direction of a layer; int64 [P]."""

    again: np.ndarray  # passes that are run a second time, for the sake of other ranks
    exposed: np.ndarray  # waiting for states or their gradients, and for the convolution's history rows


def crossing_time(
    tokens: np.ndarray, counts: RecurrentFigures, shape: ModelShape, costs: Costs
) -> tuple[Crossing, Crossing]:
    """Forward and backward."""
    nothing = np.zeros_like(tokens)
    if counts.crossing is None:
        return Crossing(nothing, nothing), Crossing(nothing, nothing)
    if isinstance(counts.crossing, TurnFigures):
        turns = counts.crossing
        waits = (round_wait(rounds, shape, costs) for rounds in state_rounds(tokens, turns, shape, costs))
        found = zip((nothing, nothing), waits, (turns.arrive.sum(0), turns.leave.sum(0)), strict=True)
    else:
        both = state_moves(tokens, counts.chunks, counts.crossing, shape, costs)
        found = ((moves.again, state_wait(moves, shape, costs), moves.arrive) for moves in both)
    forward, backward = (
        Crossing(again, wait + np.where(arrive > 0, costs.history_latency, 0)) for again, wait, arrive in found
    )
    return forward, backward


@dataclass(frozen=True, eq=False)
class StateRounds:
    """One direction of states that are handed on: nanoseconds where not said otherwise.

    A rank computes ``before[0]`` and sends the states of round 0; for each round it computes ``meanwhile``, waits for
    what arrives, and computes the next ``before``, with which it has what leaves in the next round.
    """

    before: np.ndarray  # int64 [R + 1, P] passes that other ranks wait for, but for the last
    meanwhile: np.ndarray  # int64 [R, P]
    leave: np.ndarray  # int64 [R, P] states
    arrive: np.ndarray  # int64 [R, P] states


def state_rounds(
    tokens: np.ndarray, turns: TurnFigures, shape: ModelShape, costs: Costs
) -> tuple[StateRounds, StateRounds]:
    """Forward: chains that lead to exits come first in each turn; its other chains and all its outputs hide the
    exchange. So does the output gate's product: of the first round, or where a rank's first trees have exits, of the
    round that follows them (`GdnPlan.awaited_turn`). Backward, from the last turn to the first: dqkwg of the trees of
    the turn before, the trees without exits of the next one and, at first, the gate's two products hide it."""

    def passes(count: np.ndarray, cost: int) -> np.ndarray:
        return chunk_time(count, cost, shape)

    gate = gate_time(tokens, shape, costs)
    exits, chains, others = turns.exit_trees, turns.exit_chains, turns.other_trees
    every = exits + others
    meanwhile = passes((every - chains)[:-1], costs.chunk_states) + passes(every[:-1], costs.chunk_output)
    rank = np.arange(len(tokens))
    first = (every > 0).argmax(0)
    meanwhile[np.where(exits[first, rank] > 0, first, 0), rank] += gate
    forward = StateRounds(passes(chains, costs.chunk_states), meanwhile, turns.leave, turns.arrive)
    # From here on the last turn first. No tree of that one has an exit: it is walked before anything arrives.
    exits, others = exits[::-1].copy(), others[::-1].copy()
    exits[0], others[0] = others[0], 0
    meanwhile = passes(others[1:], costs.chunk_both_passes) + passes(exits[:-1] + others[1:], costs.chunk_dqkwg)
    meanwhile[0] += 2 * gate
    before = passes(exits, costs.chunk_both_passes)
    return forward, StateRounds(before, meanwhile, turns.arrive[::-1], turns.leave[::-1])


def round_wait(rounds: StateRounds, shape: ModelShape, costs: Costs) -> np.ndarray:
    """int64 [P]: how long each rank stands still until its states are there, in all rounds together.

    An exchange has a barrier of all ranks, so the last one that comes to it holds up all that receive something.
    """
    each = shape.state_bytes * (costs.state_mib + costs.round_mib)
    now, wait = rounds.before[0], np.zeros_like(rounds.before[0])
    for number, (leave, arrive) in enumerate(zip(rounds.leave, rounds.arrive, strict=True)):
        travel = np.maximum(arrive, leave.max()) * each // MIB + costs.round_latency
        there = np.where(arrive > 0, now.max() + travel, 0)
        now = now + rounds.meanwhile[number]
        late = np.maximum(0, there - now)
        wait += late
        now = now + late + rounds.before[number + 1]
    return wait


@dataclass(frozen=True, eq=False)
class StateMoves:
    """What affine maps, and the states made of them, ask of each rank in one direction: int64 [P], nanoseconds where
    not said otherwise.

    A rank computes, in this order: ``before``; then its states are sent; ``products``; ``passes``; and ``others``. Only
    then does it need the states of other ranks.
    """

    before: np.ndarray  # passes that other ranks wait for
    again: np.ndarray  # passes that are run a second time, for the sake of other ranks
    products: np.ndarray  # of the output gate
    passes: np.ndarray  # state passes of local trees; they fill the card
    others: np.ndarray  # the rest of what these trees take
    leave: np.ndarray  # states and maps that leave
    arrive: np.ndarray  # states that arrive
    folded: int  # states and maps of all ranks that the fold reads and writes


def state_moves(
    tokens: np.ndarray, chunks: np.ndarray, counts: MapFigures, shape: ModelShape, costs: Costs
) -> tuple[StateMoves, StateMoves]:
    """Forward: summaries become entry states; backward: their gradients become those of exit states.

    While states travel a rank multiplies for its output gate (once, in backward twice) and works off the local trees
    that need none of them; in backward it makes the states of the other trees meanwhile. Passes of trees below an
    entry come before all that in backward, and are final but for what leads to an exit.
    """

    def passes(count: np.ndarray, cost: int) -> np.ndarray:
        return chunk_time(count, cost, shape)

    gate = gate_time(tokens, shape, costs)
    folded = int((counts.exits + counts.maps + counts.entries).sum())
    free = chunks - counts.entry_chunks
    # A map has as many columns as a state.
    summary = passes(counts.exit_chunks + counts.through_chunks, costs.chunk_summary)
    forward = StateMoves(
        before=summary,
        again=summary,
        products=gate,
        passes=passes(free, costs.chunk_states),
        others=passes(free, costs.chunk_output),
        leave=counts.exits + counts.maps,
        arrive=counts.entries,
        folded=folded,
    )
    closed = chunks - counts.exit_tree_chunks
    ahead = counts.exit_tree_chunks - (counts.entry_chunks - counts.entry_only_chunks)
    spared = costs.chunk_both_passes - costs.chunk_adjoint
    backward = StateMoves(
        before=passes(counts.entry_chunks, costs.chunk_both_passes),
        again=passes(counts.through_chunks, costs.chunk_adjoint),
        products=2 * gate,
        passes=passes(closed - counts.entry_only_chunks, costs.chunk_both_passes) + passes(ahead, costs.chunk_states),
        # States made ahead spare less than they take, since they would have been made beside the adjoint.
        others=passes(closed, costs.chunk_dqkwg) - passes(ahead, costs.chunk_states - spared),
        leave=counts.entries,
        arrive=counts.exits,
        folded=folded,
    )
    return forward, backward


def state_wait(moves: StateMoves, shape: ModelShape, costs: Costs) -> np.ndarray:
    """int64 [P]: how long each rank stands still until its states are there.

    Every rank folds a share of the heads of all states, so the slowest rank that sends any holds up all that receive
    some. So does a rank whose state passes begin before it can fold: they leave the fold no room until they end. The
    share that a rank folds itself does not travel.
    """
    world = len(moves.leave)
    if not moves.leave.any():
        return np.zeros(world, np.int64)

    def travel(states: np.ndarray) -> np.ndarray:
        busier = np.maximum(states, -(-states.sum() // world))  # out or in
        return busier * shape.state_bytes * costs.state_mib * (world - 1) // (MIB * world)

    sent = int(moves.before[moves.leave > 0].max()) + int(travel(moves.leave).max())
    fold = moves.folded * shape.state_bytes * costs.fold_mib // (MIB * world) + costs.state_latency
    begins = moves.before + moves.products
    blocked = (moves.passes > 0) & (sent + fold > begins)
    rest = np.minimum(fold, sent + fold - begins)  # of a fold that passes stop
    done = np.where(blocked, np.maximum(sent, begins + moves.passes) + rest, sent + fold)
    there = int(done.max()) + travel(moves.arrive)
    ready = begins + moves.passes + moves.others
    return np.where(moves.arrive > 0, np.maximum(0, there - ready), 0)
