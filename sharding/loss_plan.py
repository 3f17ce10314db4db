"""Which edges (predictor -> target) a rank scores, and the occurrences that use them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest, expand_ranges
from cp_engine.sharding.layout import Layout


@dataclass(frozen=True, eq=False)
class LossPlan:
    """Edges whose predictor a rank owns and that some occurrence trains.

    Shapes: M predictors, E edges, O occurrences. One logits row per predictor serves all its edges.
    """

    predictor_row: np.ndarray  # int64 [M] local rows, ascending
    edge_predictor: np.ndarray  # int64 [E] index into predictor_row, ascending
    edge_target: np.ndarray  # int64 [E] target token id
    edge_token: np.ndarray  # int64 [E] the target's token index in the forest, which names the edge
    occurrence_edge: np.ndarray  # int64 [O] index into edges
    occurrence_rollout: np.ndarray  # int64 [O] rollout of the pack, ascending
    occurrence_position: np.ndarray  # int64 [O] position of the target in the rollout

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
    # Only tokens with a predictor on this rank are followed into the rollouts, so a rank's work is its own share.
    predictor = forest.token_parent
    mine = np.flatnonzero((predictor >= 0) & (layout.owner[predictor] == rank))
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
        predictor_row=layout.local_row[above[opens]],
        edge_predictor=np.cumsum(opens) - 1,
        edge_target=forest.token[edge_token],
        edge_token=edge_token,
        occurrence_edge=edge_of[token],
        occurrence_rollout=rollout,
        occurrence_position=position,
    )
