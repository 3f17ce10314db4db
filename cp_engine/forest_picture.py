"""A placed forest as a drawing: depth down, segments by length, colours by owner, and what moves between ranks.

Each heavy path (`Forest.chain_head`) is one column, so a segment stands below its parent or hangs to the right of it.
Where columns would be narrower than a few pixels, neighbouring ones are drawn as one, in the colour of the rank that
owns most of the tokens at each height.

Shapes: T tokens, S segments, F fragments, C columns, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_engine.drawing import GREY, INK, LIGHT, Drawing, rank_colour
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.layout import Layout

PITCH = 3.0  # pixels of the narrowest column that is drawn on its own
WIDEST_PITCH, WIDEST_BAR, TREE_GAP = 110.0, 24.0, 0.5  # pixels, pixels, columns between two trees
CELL = 3.0  # pixels of the height at which merged columns are sampled
SMALLEST_MARK = 3.0  # pixels of a triangle
FAR = 0.05  # of the width: shorter lines between merged columns are left out
MOST_SAMPLES = 1 << 21  # tokens that are looked at where columns are merged


@dataclass(frozen=True)
class Frame:
    """Where a forest is drawn, in pixels."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, eq=False)
class Fragments:
    """The fragments of all ranks in depth-first order; int64 or bool [F]."""

    start: np.ndarray  # first token
    end: np.ndarray
    segment: np.ndarray
    owner: np.ndarray
    parent: np.ndarray  # fragment, -1 at a root
    depth: np.ndarray  # of the first token
    read: np.ndarray  # whether another rank has a token below, so that keys and values of this fragment move


def fragments_of(forest: Forest, layout: Layout) -> Fragments:
    """Cut the segments at the borders of the pieces."""
    bounds = np.union1d(forest.segment_start, layout.piece_start)
    start, end = bounds[:-1], bounds[1:]
    segment = np.searchsorted(forest.segment_start, start, side="right") - 1
    piece = np.searchsorted(layout.piece_start, start, side="right") - 1
    above = np.where(
        start > forest.segment_start[segment], start - 1, forest.segment_start[forest.parent[segment] + 1] - 1
    )
    rooted = (start == forest.segment_start[segment]) & (forest.parent[segment] < 0)
    parent = np.where(rooted, -1, np.searchsorted(bounds, above, side="right") - 1)
    # Neighbouring pieces have different owners: tokens of one piece are the only ones that all have this owner.
    last_below = np.searchsorted(layout.piece_start, forest.subtree_end[segment] - 1, side="right") - 1
    return Fragments(
        start=start,
        end=end,
        segment=segment,
        owner=layout.piece_rank[piece],
        parent=parent,
        depth=forest.depth[segment] + start - forest.segment_start[segment],
        read=last_below > piece,
    )


class _Columns:
    """The column of each segment, and where columns stand."""

    def __init__(self, forest: Forest, frame: Frame):
        head = np.flatnonzero(forest.chain_head == np.arange(forest.segments))
        self.count = len(head)
        self.of_segment = np.searchsorted(head, forest.chain_head)
        self.gaps = np.cumsum(forest.parent[head] < 0) - 1  # trees to the left of each column
        units = self.count + TREE_GAP * self.gaps[-1]
        self.pitch = min(WIDEST_PITCH, frame.width / units)
        self.bar = min(WIDEST_BAR, max(2.0, 0.55 * self.pitch))
        self.left = frame.x + (np.arange(self.count) + TREE_GAP * self.gaps) * self.pitch
        self.merged = self.pitch < PITCH


def merges_columns(forest: Forest, width: float) -> bool:
    """Whether a forest has too many paths for a column each."""
    return _Columns(forest, Frame(0, 0, width, 0)).merged


def draw_forest(drawing: Drawing, forest: Forest, layout: Layout, frame: Frame) -> str:
    """Draw a forest that has tokens; returns a sentence on what a column is."""
    columns = _Columns(forest, frame)
    scale = frame.height / forest.max_depth
    _draw_axis(drawing, forest.max_depth, scale, frame)
    if columns.merged:
        held = _draw_merged(drawing, forest, layout, columns, scale, frame)
        return f"{columns.count:,} paths, about {held:,.1f} a column; colour: the owner of most tokens at each height"
    _draw_fragments(drawing, fragments_of(forest, layout), columns, scale, frame, layout.world)
    return "one column a heavy path; the other children of a branch point hang to its right"


def _draw_axis(drawing: Drawing, depth: int, scale: float, frame: Frame) -> None:
    step = 10 ** int(np.log10(max(1, depth)))
    while depth / step < 4 and step > 1:
        step = step // 2 if str(step)[0] == "1" else step // 5 * 2 if step >= 5 else 1
    drawing.text(frame.x - 10, frame.y - 8, "depth", 11, GREY, "end")
    for value in range(0, depth + 1, step):
        y = frame.y + value * scale
        drawing.line(frame.x - 4, y, frame.x + frame.width, y, LIGHT)
        drawing.text(frame.x - 10, y + 4, f"{value:,}", 11, GREY, "end")


def _draw_fragments(drawing, fragments: Fragments, columns: _Columns, scale: float, frame: Frame, world: int) -> None:
    column = columns.of_segment[fragments.segment]
    left, top = columns.left[column], frame.y + fragments.depth * scale
    height = (fragments.end - fragments.start) * scale
    parent = fragments.parent
    crosses = (parent >= 0) & (fragments.owner[parent] != fragments.owner)
    _draw_branches(
        drawing, np.flatnonzero((parent >= 0) & (column[parent] != column)), parent, left, top, crosses, columns
    )
    for first, last in _drawn_runs(fragments, column, height, crosses):
        owner, bottom = int(fragments.owner[first]), top[last] + height[last]
        tokens = int((fragments.end[first : last + 1] - fragments.start[first : last + 1]).sum())
        read = bool(fragments.read[first])
        note = f"rank {owner}: {tokens:,} tokens from depth {int(fragments.depth[first]):,}"
        note += "; keys and values move to other ranks" if read else "; stays on its rank"
        at = {"rank": owner, "start": int(fragments.start[first]), "end": int(fragments.end[last])}
        box = (left[first], top[first], columns.bar, max(0.5, bottom - top[first] - (0.8 if height[last] > 4 else 0)))
        drawing.rect(*box, rank_colour(owner, world), note, kind="fragment", **at)
        if read:
            drawing.hatch(*box, note, kind="read", rank=owner)
        if columns.pitch - columns.bar > 44 and box[3] > 14:
            drawing.text(box[0] + columns.bar + 5, box[1] + box[3] / 2 + 4, f"{tokens:,}", 10, GREY)
    stretch = _stretch(fragments, column, height)
    for fragment in np.flatnonzero(crosses):
        x, y, vertical = left[fragment], top[fragment], column[parent[fragment]] == column[fragment]
        if vertical:
            over = min(5.0, 0.2 * columns.pitch)
            drawing.line(x - over, y - 0.4, x + columns.bar + over, y - 0.4, INK, 1.8 if columns.bar > 5 else 1)
        size = min(9.0, 0.6 * columns.bar, 0.8 * stretch[fragment])
        if size >= SMALLEST_MARK:
            drawing.triangle(x + columns.bar / 2, y + size + 1, size, INK)


def _stretch(fragments: Fragments, column: np.ndarray, height: np.ndarray) -> np.ndarray:
    """Pixels from the top of each fragment down to where its column changes its colour or ends."""
    index = np.arange(1, len(column))
    ends = np.append((fragments.parent[1:] != index - 1) | (column[1:] != column[:-1]), True)
    ends[:-1] |= fragments.owner[1:] != fragments.owner[:-1]
    last = np.flatnonzero(ends)[np.cumsum(np.append(0, ends[:-1]))]
    below = np.cumsum(height)
    return below[last] - below + height


def _draw_branches(drawing, branches, parent, left, top, crosses, columns: _Columns) -> None:
    """Lines from branch points to children in other columns; those on which a state moves are drawn last, and dark."""
    for moves in (False, True):
        for fragment in branches[crosses[branches] == moves]:
            begin, y = left[parent[fragment]] + columns.bar, top[fragment]
            colour, width = (INK, 1.6 if columns.bar > 5 else 1) if moves else ("#b5b5b5", 1)
            drawing.line(begin, y, left[fragment] + columns.bar / 2, y, colour, width)


def _drawn_runs(fragments: Fragments, column: np.ndarray, height: np.ndarray, crosses: np.ndarray):
    """Ranges (first, last) of fragments that are drawn as one: those of a column, alike, and lower than a pixel."""
    index = np.arange(1, len(column))
    alike = (column[1:] == column[:-1]) & (fragments.owner[1:] == fragments.owner[:-1])
    alike &= (fragments.read[1:] == fragments.read[:-1]) & ((height[1:] < 1) | (height[:-1] < 1)) & ~crosses[1:]
    # In depth-first order a column's fragments may stand apart; only neighbours are joined.
    alike &= fragments.parent[1:] == index - 1
    first = np.append(0, index[~alike])
    last = np.append(index[~alike] - 1, len(column) - 1)
    return zip(first.tolist(), last.tolist(), strict=True)


def _draw_merged(drawing, forest: Forest, layout: Layout, columns: _Columns, scale: float, frame: Frame) -> float:
    """Draw several columns as one; returns how many, in the mean."""
    bins, cells = int(frame.width / PITCH), max(1, int(frame.height / CELL))
    stride = -(-forest.tokens // MOST_SAMPLES)
    token = np.arange(0, forest.tokens, stride)
    segment = np.searchsorted(forest.segment_start, token, side="right") - 1
    owner = layout.piece_rank[np.searchsorted(layout.piece_start, token, side="right") - 1]
    depth = forest.depth[segment] + token - forest.segment_start[segment]
    place = columns.of_segment[segment] * bins // columns.count
    cell = np.minimum(cells - 1, (depth * scale / CELL).astype(np.int64))
    key, count = np.unique((place * cells + cell) * layout.world + owner, return_counts=True)
    where, owner = key // layout.world, key % layout.world
    order = np.lexsort((owner, -count, where))
    keep = order[np.append(True, where[order][1:] != where[order][:-1])]
    where, owner = where[keep], owner[keep]
    opens = np.append(True, (np.diff(where) != 1) | (np.diff(owner) != 0) | (where[1:] % cells == 0))
    first = np.flatnonzero(opens)
    length = np.diff(np.append(first, len(where)))
    _draw_merged_branches(drawing, forest, columns, bins, scale, frame)
    for run, cells_high in zip(first.tolist(), length.tolist(), strict=True):
        x, y = frame.x + where[run] // cells * PITCH, frame.y + where[run] % cells * CELL
        rank = int(owner[run])
        colour = rank_colour(rank, layout.world)
        drawing.rect(x, y, PITCH - 0.5, cells_high * CELL, colour, f"rank {rank}", kind="merged", rank=rank)
    return columns.count / bins


def _draw_merged_branches(drawing, forest: Forest, columns: _Columns, bins: int, scale: float, frame: Frame) -> None:
    """A line from each branch point to its farthest child, where that is far: one for each column and height."""
    child = np.flatnonzero((forest.parent >= 0) & (forest.chain_head == np.arange(forest.segments)))
    begin = columns.of_segment[forest.parent[child]] * bins // columns.count
    end = columns.of_segment[child] * bins // columns.count
    height = (forest.depth[child] * scale / CELL).astype(np.int64)
    key = begin * (int(height.max(initial=0)) + 1) + height
    order = np.lexsort((end, key))
    last = order[np.append(key[order][1:] != key[order][:-1], True)] if len(order) else order
    for branch in last[end[last] - begin[last] >= bins * FAR].tolist():
        y = frame.y + forest.depth[child[branch]] * scale
        drawing.line(frame.x + begin[branch] * PITCH, y, frame.x + (end[branch] + 0.8) * PITCH, y, "#b5b5b5")
