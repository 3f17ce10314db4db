"""Which edges (predictor -> target) a rank scores, and the occurrences that use them.

A predictor costs the head as much as some layers do, and trunks are seldom trained: with one owner for both, a rank
with more trained tokens than others would keep them waiting. So predictors are dealt out evenly, and the hidden states
of those that another rank scores move there: a few rows of C channels against a row of logits each.

Shapes: T tokens, N flat tokens of the pack's rollouts, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest, expand_ranges
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.relayout import Relayout


@dataclass(frozen=True, eq=False)
class LossPlan:
    """Edges that a rank scores, all of a predictor's by one rank, and the occurrences that train them.

    Shapes: M predictors, E edges, O occurrences. One logits row per predictor serves all its edges.
    """

    hidden: Relayout  # from the owners' rows to those of predictors, [n] to [M], in the order of their tokens
    edge_predictor: np.ndarray  # int64 [E] index into the M predictors, ascending
    edge_target: np.ndarray  # int64 [E] target token id
    edge_token: np.ndarray  # int64 [E] the target's token index in the forest, which names the edge
    occurrence_edge: np.ndarray  # int64 [O] index into edges
    occurrence_rollout: np.ndarray  # int64 [O] rollout of the pack, ascending
    occurrence_position: np.ndarray  # int64 [O] position of the target in the rollout

    @property
    def predictors(self) -> int:
        return self.hidden.rows_after

    @property
    def edges(self) -> int:
        return len(self.edge_target)

    @property
    def occurrences(self) -> int:
        return len(self.occurrence_edge)


def loss_plan(forest: Forest, layout: Layout, rank: int, loss_mask: np.ndarray) -> LossPlan:
    """Plan one rank's part of the loss.

    Args:
        loss_mask: bool [N] over the pack's rollouts, one after the other; True on trained tokens. A rollout's first
            token has no predictor and never counts.
    """
    length = forest.rollout_length
    loss_mask = np.asarray(loss_mask, bool)
    assert len(loss_mask) == int(length.sum()), "loss mask does not cover the rollouts"
    predictor = forest.token_parent
    scorer = _scorers(forest, layout, loss_mask)
    # Only tokens whose predictor this rank scores are followed into the rollouts, so its work is its own share.
    mine = np.flatnonzero((predictor >= 0) & (scorer[predictor] == rank))
    first = np.searchsorted(mine, forest.segment_start)
    rollout, segment = forest.path_segments()
    count = (first[1:] - first[:-1])[segment]
    token = mine[expand_ranges(first[segment], count)]
    rollout = np.repeat(rollout, count)
    position = forest.position[token]
    trained = loss_mask[(np.cumsum(length) - length)[rollout] + position]
    token, rollout, position = token[trained], rollout[trained], position[trained]

    used = np.zeros(forest.tokens, bool)
    used[token] = True
    edge_token = np.flatnonzero(used)
    # Edges in the order of (predictor, target): siblings' first tokens follow their common predictor.
    order = np.argsort(predictor[edge_token], kind="stable")
    edge_of = np.empty(forest.tokens, np.int64)
    edge_of[edge_token[order]] = np.arange(len(order))
    edge_token = edge_token[order]
    above = predictor[edge_token]
    opens = np.ones(len(above), bool)
    opens[1:] = above[1:] != above[:-1]
    return LossPlan(
        hidden=_to_scorers(layout, rank, scorer, above[opens]),
        edge_predictor=np.cumsum(opens) - 1,
        edge_target=forest.token[edge_token],
        edge_token=edge_token,
        occurrence_edge=edge_of[token],
        occurrence_rollout=rollout,
        occurrence_position=position,
    )


def _scorers(forest: Forest, layout: Layout, loss_mask: np.ndarray) -> np.ndarray:
    """int64 [T]: the rank that scores each predictor, for other tokens their owner.

    Ranks end with equal numbers of predictors, or one more; those with too many give away their last ones.
    """
    if layout.world == 1:
        return layout.owner
    predictor = np.flatnonzero(_predictors(forest, loss_mask))
    owner = layout.owner[predictor]
    count = np.bincount(owner, minlength=layout.world)
    even, more = divmod(len(predictor), layout.world)
    share = np.full(layout.world, even)
    share[np.argsort(-count, kind="stable")[:more]] += 1  # fewest rows move
    by_owner = np.argsort(owner, kind="stable")
    place = np.arange(len(predictor)) - (np.cumsum(count) - count)[owner[by_owner]]
    leaving = by_owner[place >= share[owner[by_owner]]]
    scorer = layout.owner.copy()
    scorer[predictor[leaving]] = np.repeat(np.arange(layout.world), np.maximum(share - count, 0))
    return scorer


def _predictors(forest: Forest, loss_mask: np.ndarray) -> np.ndarray:
    """bool [T]: tokens of which some rollout trains a token below."""
    rollout, segment = forest.path_segments()
    length = forest.rollout_length
    start = (np.cumsum(length) - length)[rollout] + forest.position[forest.segment_start[segment]]
    size = forest.segment_length[segment]
    so_far = np.append(0, np.cumsum(loss_mask))
    trained = so_far[start + size] - so_far[start]
    used = np.zeros(forest.tokens, bool)
    # A rollout trains most segments as a whole or not at all.
    used[expand_ranges(*_each_once(forest, segment[trained == size]))] = True
    mixed = (trained > 0) & (trained < size)
    token = expand_ranges(forest.segment_start[segment[mixed]], size[mixed])
    used[token[loss_mask[expand_ranges(start[mixed], size[mixed])]]] = True
    above = forest.token_parent[used]
    predicts = np.zeros(forest.tokens, bool)
    predicts[above[above >= 0]] = True
    return predicts


def _each_once(forest: Forest, segment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    segment = np.unique(segment)
    return forest.segment_start[segment], forest.segment_length[segment]


def _to_scorers(layout: Layout, rank: int, scorer: np.ndarray, scored: np.ndarray) -> Relayout:
    """The move of hidden states of predictors, ``scored`` (ascending tokens) being those of this rank."""
    owner = layout.owner[scored]
    from_others = np.flatnonzero(owner != rank)
    from_others = from_others[np.argsort(owner[from_others], kind="stable")]
    moved = np.flatnonzero(scorer != layout.owner)
    sent = moved[layout.owner[moved] == rank]
    sent = sent[np.argsort(scorer[sent], kind="stable")]
    stay = np.flatnonzero(owner == rank)
    return Relayout(
        rows_before=int(layout.rank_rows[rank]),
        rows_after=len(scored),
        moved=len(moved),
        stay_from=layout.local_row[scored[stay]],
        stay_to=stay,
        send_rows=layout.local_row[sent],
        send_counts=np.bincount(scorer[sent], minlength=layout.world),
        recv_rows=from_others,
        recv_counts=np.bincount(owner[from_others], minlength=layout.world),
    )
