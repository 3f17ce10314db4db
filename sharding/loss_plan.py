"""Which edges (predictor -> target) a rank scores, and the occurrences that use them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.forest import Forest
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
    rollout = np.repeat(np.arange(forest.rollouts), length)
    position = np.arange(len(loss_mask)) - np.repeat(np.cumsum(length) - length, length)
    trained = np.flatnonzero(loss_mask & (position > 0))
    token = forest.flat_to_tree()[trained]
    predictor = forest.token_parent[token]
    mine = layout.owner[predictor] == rank
    trained, token = trained[mine], token[mine]
    # Edges in the order of (predictor, target): siblings' first tokens follow their common predictor.
    edge_token, edge_of = np.unique(token, return_inverse=True)
    order = np.lexsort((edge_token, forest.token_parent[edge_token]))
    rank_of_edge = np.empty(len(order), np.int64)
    rank_of_edge[order] = np.arange(len(order))
    edge_token = edge_token[order]
    predictor_token, edge_predictor = np.unique(forest.token_parent[edge_token], return_inverse=True)
    return LossPlan(
        predictor_row=layout.local_row[predictor_token],
        edge_predictor=edge_predictor.astype(np.int64),
        edge_target=forest.token[edge_token],
        edge_token=edge_token,
        occurrence_edge=rank_of_edge[edge_of],
        occurrence_rollout=rollout[trained],
        occurrence_position=position[trained],
    )
