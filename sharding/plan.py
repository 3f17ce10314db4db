"""One rank's whole plan for one pack: a pure function of (forest, loss mask, layout, rank)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from cp_engine.sharding.attention_plan import AttentionPlan, attention_plan
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_plan import GdnPlan, gdn_plan
from cp_engine.sharding.layout import Layout
from cp_engine.sharding.loss_plan import LossPlan, loss_plan
from cp_engine.sharding.relayout import Relayout, relayout


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """What one rank does with one pack. Rows are local rows; a rank without tokens has one padding row."""

    rank: int
    world: int
    token_id: np.ndarray  # int64 [n] ids; 0 on the padding row
    position: np.ndarray  # int64 [n] RoPE positions; 0 on the padding row
    rollouts: np.ndarray  # int64 [n] rollouts that pass through each row; 0 on the padding row
    gdn_rollouts: np.ndarray  # int64 [m] the same for rows of the layout of the recurrent layers
    tokens: int  # rows that are tokens: n, or 0 on a rank with a padding row
    pieces: int
    attention: AttentionPlan
    window_attention: AttentionPlan | None  # of layers with a sliding window; None for models without such layers
    gdn: GdnPlan | None  # None for models without recurrent layers
    relayout: Relayout | None  # into the layout of the recurrent layers; None where that is the one of all others
    loss: LossPlan
    digest: str  # equal on all ranks that planned the same pack in the same way

    @property
    def rows(self) -> int:
        return len(self.token_id)


def shard_plan(
    forest: Forest,
    layout: Layout,
    rank: int,
    loss_mask: np.ndarray,
    exchange: str = "gather",
    gdn_exchange: str = "affine",
    conv_width: int | None = None,
    window: int | None = None,
    gdn_layout: Layout | None = None,
) -> ShardPlan:
    """Plan one rank's part of a pack.

    Args:
        loss_mask: bool [N] trained tokens of the pack's rollouts, one rollout after the other.
        exchange: how attention moves keys and values: see `attention_plan`.
        gdn_exchange: how GDN layers cross ranks: ``affine`` or ``ulysses``.
        conv_width: taps of the GDN convolution; None for a model without GDN layers.
        window: tokens that a row of a sliding-window layer sees, itself included; None for a model without such layers.
        gdn_layout: owners of the tokens in the GDN layers, where they are others than in all other layers. Rows of
            ``gdn`` are rows of that layout.
    """
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank must lie in [0, {layout.world}), got {rank}")
    tokens = layout.rank_tokens(rank)
    padded = len(tokens) == 0
    zero = np.zeros(1, np.int64)
    of_gdn = layout if gdn_layout is None else gdn_layout
    return ShardPlan(
        rank=rank,
        world=layout.world,
        token_id=zero if padded else forest.token[tokens],
        position=zero if padded else forest.position[tokens],
        rollouts=_row_rollouts(forest, layout, rank),
        gdn_rollouts=_row_rollouts(forest, of_gdn, rank),
        tokens=len(tokens),
        pieces=len(layout.pieces(rank)[0]),
        attention=attention_plan(forest, layout, rank, exchange),
        window_attention=None if window is None else attention_plan(forest, layout, rank, exchange, window),
        gdn=None if conv_width is None else gdn_plan(forest, of_gdn, rank, gdn_exchange, conv_width),
        relayout=None if gdn_layout is None else relayout(layout, gdn_layout, rank),
        loss=loss_plan(forest, layout, rank, loss_mask),
        digest=plan_digest(forest, layout, loss_mask, exchange, gdn_exchange, conv_width, window, gdn_layout),
    )


def _row_rollouts(forest: Forest, layout: Layout, rank: int) -> np.ndarray:
    tokens = layout.rank_tokens(rank)
    return forest.segment_rollouts[forest.segment_of[tokens]] if len(tokens) else np.zeros(1, np.int64)


def plan_digest(
    forest: Forest, layout: Layout, loss_mask, exchange, gdn_exchange, conv_width, window, gdn_layout: Layout | None
) -> str:
    """Hash of everything that every rank's plan is computed from."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((layout.world, exchange, gdn_exchange, conv_width, window, gdn_layout is None)).encode())
    loss_mask = np.asarray(loss_mask, bool)
    # The two long arrays in few bytes: ids are below 2**32, and hashing is a good part of planning.
    arrays = (
        forest.token.astype(np.uint32),
        forest.segment_start,
        forest.parent,
        forest.end_segment,
        layout.piece_start,
        layout.piece_rank,
        *(() if gdn_layout is None else (gdn_layout.piece_start, gdn_layout.piece_rank)),
        np.array([len(loss_mask)]),
        np.packbits(loss_mask),
    )
    for array in arrays:
        digest.update(str(len(array)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
