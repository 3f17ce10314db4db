"""The same forest with its trees, or the non-first children of a segment, in another order."""

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


def reorder_roots(forest: Forest, order: np.ndarray) -> Forest:
    """The forest with its trees in another order: tree ``order[i]`` (counted in the present order) comes i-th."""
    root = np.flatnonzero(forest.parent < 0)
    count = np.diff(np.append(root, forest.segments))
    return reorder_segments(forest, expand_ranges(root[order], count[order]))


def canonical_root_order(forest: Forest) -> np.ndarray:
    """int64 [roots]: trees with most tokens first, ties by their token ids and shape.

    The order does not depend on the order in which rollouts were given: trees that stay tied are equal.
    """
    root = np.flatnonzero(forest.parent < 0)
    bounds = np.append(root, forest.segments).tolist()
    start = forest.segment_start.tolist()
    token, parent, depth = (np.ascontiguousarray(a) for a in (forest.token, forest.parent, forest.depth))

    def key(tree: int):
        low, high = bounds[tree], bounds[tree + 1]
        shape = (parent[low + 1 : high] - low).tobytes(), depth[low:high].tobytes()
        return start[low] - start[high], token[start[low] : start[high]].tobytes(), *shape

    return np.asarray(sorted(range(len(root)), key=key), np.int64)
