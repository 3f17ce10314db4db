"""The same forest in another of its depth-first orders."""

from __future__ import annotations

import numpy as np

from cp_engine.sharding.forest import Forest, expand_ranges


def reorder_segments(forest: Forest, old: np.ndarray) -> Forest:
    """The forest with segment ``old[i]`` at place i.

    Args:
        old: int64 [S], a permutation that is a preorder of the same trees and leaves first children in place.
    """
    new = np.empty(forest.segments, np.int64)
    new[old] = np.arange(forest.segments)
    length = forest.segment_length[old]
    start = np.concatenate([[0], np.cumsum(length)])
    below = (forest.subtree_end - forest.segment_start[:-1])[old]
    return Forest(
        token=forest.token[expand_ranges(forest.segment_start[:-1][old], length)],
        segment_start=start,
        parent=np.where(forest.parent[old] >= 0, new[forest.parent[old]], -1),
        depth=forest.depth[old],
        subtree_end=start[:-1] + below,
        end_segment=new[forest.end_segment],
    )
