"""Replayed expert routes: which experts each token of a rollout was sent to when it was sampled.

Shapes: L tokens of one rollout, N tokens of all of them, T tree tokens, M MoE layers, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cp_engine.models.routers import RouterShape
from cp_engine.rollout_fields import RolloutError
from cp_engine.rollouts import FlatRollouts, Rollout
from cp_engine.sharding.forest import expand_ranges
from cp_engine.sharding.packing import Pack


def check_routes(rollouts: Sequence[Rollout], shape: RouterShape | None) -> None:
    """Refuse routes that are not of the model.

    Args:
        shape: of the model's routers; None for a model without MoE layers.

    Raises:
        RolloutError: naming the rollout.
    """
    for rollout in rollouts:
        if rollout.routes is None:
            continue
        where = f"rollout {rollout.rollout!r} of group {rollout.group!r}"
        if shape is None:
            raise RolloutError(where, "routes", "expected none, because the model has no expert routers; leave it out")
        layers, experts, top_k = shape.layers, shape.experts, shape.top_k
        found = rollout.routes.shape[1:]
        if found != (layers, top_k):
            raise RolloutError(
                where,
                "routes",
                f"expected {layers} MoE layers with {top_k} experts for each token, as the model has, got {found[0]} "
                f"with {found[1]}",
            )
        if rollout.routes.max() >= experts:
            raise RolloutError(
                where, "routes", f"expected experts below {experts}, as the model has, got {rollout.routes.max()}"
            )


def row_routes(flat: FlatRollouts, pack: Pack, tokens: np.ndarray) -> np.ndarray | None:
    """Routes of a rank's rows of a pack, int64 [M, n, k]; None where rollouts carry none.

    The padding row of a rank without tokens takes the first experts.

    Args:
        pack: whose forest stands in the order that the layout cuts.
        tokens: int64 [n] tree tokens of the rank; [0] of a rank without tokens.
    """
    if flat.routes is None:
        return None
    layers, top_k = flat.routes.shape[1:]
    if not len(tokens):
        return np.broadcast_to(np.arange(top_k), (layers, 1, top_k)).copy()
    starts = flat.row_start[pack.rollouts]
    of_flat = expand_ranges(starts, flat.row_start[pack.rollouts + 1] - starts)
    # One of the flat tokens that share a tree token; all of them have its route.
    source = np.empty(pack.forest.tokens, np.int64)
    source[pack.forest.flat_to_tree()] = of_flat
    return flat.routes[source[tokens]].transpose(1, 0, 2).astype(np.int64)
