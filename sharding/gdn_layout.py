"""A second layout for the runs of recurrent layers of a hybrid model, where it is predicted to be cheaper.

Softmax attention wants equal pairs, for which deep trees are cut; at each cut recurrent layers wait for states. A run
of recurrent layers may work on a layout of its own, with whole subtrees on ranks: the hidden states of all tokens then
move once before the run and once after it. What the two layouts, and those moves, take is predicted for all layers, and
the smaller total wins; of equal ones the single layout.

Shapes: T tokens, S segments, U units, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from cp_engine.sharding.cost import H200, Costs, ModelShape
from cp_engine.sharding.deal import snapped_layout
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.hosts import ONE_HOST, Hosts, shared_links
from cp_engine.sharding.layer_time import LayerTime, StepTime, attention_parts, recurrent_time, relay_time, step_time
from cp_engine.sharding.layout import Layout, contiguous_layout, layout_from_cuts
from cp_engine.sharding.measure import CHUNK, Figures, Survey, between_ranks, measure, measure_recurrent, rows_moved
from cp_engine.sharding.recurrent_figures import RecurrentFigures
from cp_engine.sharding.search import balanced_layout

GDN_LAYOUTS = ("auto", "same", "own")
MOST_TOKENS_PERCENT = 10  # most tokens of a rank over the mean in the layout of recurrent layers, for its activations
SLACK_PER_MILLE = (0, 10, 30, 90)  # work over the mean up to which whole units are placed before one is cut
POLISH_ROUNDS = 4
POLISH_MOVES = 16  # of one part to another rank; with more of them nothing is polished
SMALL_UNITS = 32  # units of less than this part of a rank's work are placed together with their neighbours


@dataclass(frozen=True, eq=False)
class GdnLayout:
    """A layout of the recurrent layers beside that of all others, with what is predicted for it."""

    layout: Layout
    method: str
    tokens: np.ndarray  # int64 [P]
    recurrent: RecurrentFigures
    moved: np.ndarray  # int64 [P, P] as `measure.rows_moved` counts them, from the layout of all other layers
    gdn: tuple[LayerTime, LayerTime]  # one recurrent layer, forward and backward
    relay: tuple[LayerTime, LayerTime]  # the moves of one run

    def step(self, model: ModelShape) -> int:
        """Nanoseconds of all recurrent layers and moves; ranks wait for each other in every one."""
        layers = sum(int(part.total.max()) for part in self.gdn) * model.gdn_layers
        return layers + sum(int(part.total.max()) for part in self.relay) * model.gdn_runs


@dataclass(frozen=True, eq=False)
class PlacedLayers:
    """A forest, in the order of subtrees that was chosen, and who owns its tokens in which layers."""

    survey: Survey
    layout: Layout  # of softmax attention, embedding and head; of all layers where ``own`` is None
    method: str
    figures: Figures
    time: StepTime  # were ``layout`` that of all layers
    own: GdnLayout | None
    reason: str  # why the recurrent layers have, or have not, a layout of their own
    step: int  # predicted nanoseconds of all layers, forward and backward, moves included

    @property
    def forest(self) -> Forest:
        return self.survey.forest

    @property
    def gdn_layout(self) -> Layout | None:
        return None if self.own is None else self.own.layout


def place_layers(
    forest: Forest,
    world: int,
    *,
    model: ModelShape,
    costs: Costs = H200,
    hosts: Hosts = ONE_HOST,
    balanced: bool = True,
    gdn_layout: str = "auto",
) -> PlacedLayers:
    """Place a forest that has tokens on ``world`` ranks. A pure function; the same on every host.

    Args:
        hosts: where ranks stand.
        balanced: search the layout; else it is that of equal contiguous ranges.
        gdn_layout: ``same``: one layout for all layers. ``own``: recurrent layers get the best one found of their own,
            even where one layout is predicted faster; none where only that of the others is found. ``auto``: the
            smaller predicted time, ``same`` where equal.

    Raises:
        ValueError: for ``own`` with a model without recurrent layers.
    """
    assert gdn_layout in GDN_LAYOUTS, gdn_layout
    assert not model.gdn_layers or model.gdn_runs, "a shape with recurrent layers but no run of them"
    if gdn_layout == "own" and not model.gdn_layers:
        raise ValueError("gdn_layout own is for models with GDN layers, and this one has none: use auto or same")
    same = _placed(forest, world, model, costs, hosts, balanced)
    if gdn_layout == "same" or not model.gdn_layers or world == 1:
        reason = "set to the same" if gdn_layout == "same" and model.gdn_layers else "nothing to choose"
        return replace(same, reason=reason)
    shared = shared_links(costs, hosts, world)
    if gdn_layout == "auto" and _most_gain(same, model, shared) <= _least_relay(forest, world, model, shared):
        return replace(same, reason="moving hidden states would take longer than a perfect layout could gain")
    bases = [same]
    if balanced:
        bases.append(_placed(forest, world, model, costs, hosts, balanced, attention_alone=True))
    found = [_with_own(base, model, shared) for base in bases]
    own = min(found, key=lambda placed: (placed.own is None, placed.step))
    if own.own is None:
        return replace(same, reason="every layout of their own with few enough tokens on each rank is the same one")
    why = f"predicted step {_ms(own.step)} with a layout of their own, {_ms(same.step)} with one for all layers"
    if gdn_layout == "auto" and own.step >= same.step:
        return replace(same, reason=why)
    return replace(own, reason=why)


def _placed(
    forest: Forest,
    world: int,
    model: ModelShape,
    costs: Costs,
    hosts: Hosts,
    balanced: bool,
    attention_alone: bool = False,
) -> PlacedLayers:
    """One layout for all layers; with ``attention_alone`` it is searched as if there were no recurrent ones."""
    survey, layout, method = Survey(forest), contiguous_layout(forest, world), "contiguous"
    if balanced:
        searched = replace(model, gdn_layers=0, gdn_runs=0) if attention_alone else model
        found = balanced_layout(forest, world, model=searched, costs=costs, hosts=hosts)
        survey, layout, method = Survey(found.forest), found.layout, found.method
        if not attention_alone:
            return PlacedLayers(survey, layout, method, found.figures, found.time, None, "", found.time.step)
    figures = measure(survey, layout, window=model.window)
    rows = between_ranks(survey, layout) if hosts.several(world) else None
    time = step_time(figures, model, costs, hosts, rows)
    return PlacedLayers(survey, layout, method, figures, time, None, "", time.step)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"


def _most_gain(placed: PlacedLayers, model: ModelShape, costs: Costs) -> int:
    """What all layers would gain if no rank waited, neither for another one nor for an exchange, and none ran a
    recurrent pass again for another's sake."""
    time, figures = placed.time, placed.figures
    parts = attention_parts(time.attention, time.window, model)
    attention = sum(count * (int(part.total.max()) - int(part.compute.min())) for count, part in parts)
    uncut = recurrent_time(figures.tokens, RecurrentFigures(figures.recurrent.chunks), model, costs)
    gdn = sum(int(part.total.max()) - int(least.compute.min()) for part, least in zip(time.gdn, uncut, strict=True))
    return attention + gdn * model.gdn_layers


def _least_relay(forest: Forest, world: int, model: ModelShape, costs: Costs) -> int:
    """Moves in which no row leaves its rank: they are packed and placed all the same."""
    stays = np.diag(np.full(world, forest.tokens // world))
    return sum(int(part.total.max()) for part in relay_time(stays, model, costs)) * model.gdn_runs


def _with_own(base: PlacedLayers, model: ModelShape, costs: Costs) -> PlacedLayers:
    """The placement with the best layout that is found for the recurrent layers; with none if none is better balanced
    than allowed or differs from the layout of the others."""
    parts = attention_parts(base.time.attention, base.time.window, model)
    attention = sum(count * int(part.total.max()) for count, part in parts)
    best: GdnLayout | None = None
    for name, layout in _candidates(base.survey, base.layout, model, costs).items():
        best = _better(best, base, name, layout, model, costs)
    if best is not None:
        best = _polished(best, base, model, costs)
    return replace(base, own=best, step=base.time.step if best is None else attention + best.step(model))


def _better(
    best: GdnLayout | None, base: PlacedLayers, name: str, layout: Layout, model: ModelShape, costs: Costs
) -> GdnLayout | None:
    """The layout if it may be used, is not that of the other layers, and is predicted faster than ``best``."""
    if layout.rank_token_count.max() * layout.world * 100 > layout.tokens * (100 + MOST_TOKENS_PERCENT):
        return best
    moved = rows_moved(base.layout, layout)
    if not (moved.sum() - np.trace(moved)):
        return best
    tokens, counts = measure_recurrent(base.survey, layout)
    gdn, relay = recurrent_time(tokens, counts, model, costs), relay_time(moved, model, costs)
    found = GdnLayout(layout, name, tokens, counts, moved, gdn, relay)
    return found if best is None or found.step(model) < best.step(model) else best


def _polished(best: GdnLayout, base: PlacedLayers, model: ModelShape, costs: Costs) -> GdnLayout:
    """The layout after moves of single parts, and swaps of two, while they gain."""
    name = best.method + "+polish"
    for _ in range(POLISH_ROUNDS):
        before = best
        for layout in _neighbours(base.survey, before.layout):
            best = _better(best, base, name, layout, model, costs)
        if best is before:
            break
    return best


def _neighbours(survey: Survey, layout: Layout) -> list[Layout]:
    """Layouts in which one part of a segment has another rank, or two have each other's; none where they are many."""
    cuts = np.union1d(layout.piece_start, survey.start)
    rank = layout.piece_rank[np.searchsorted(layout.piece_start, cuts[:-1], side="right") - 1]
    moves = [((part, to),) for part in range(len(rank)) for to in range(layout.world) if to != rank[part]]
    if len(moves) > POLISH_MOVES:
        return []
    swaps = combinations(range(len(rank)), 2)
    moves += [((one, rank[other]), (other, rank[one])) for one, other in swaps if rank[one] != rank[other]]
    found = []
    for changes in moves:
        changed = rank.copy()
        for part, to in changes:
            changed[part] = to
        found.append(layout_from_cuts(cuts, changed, layout.world))
    return found


def _candidates(survey: Survey, near: Layout, model: ModelShape, costs: Costs) -> dict[str, Layout]:
    """Layouts for recurrent layers, by name. Ranks are numbered so that many tokens stay where ``near`` has them."""
    forest, world = survey.forest, near.world
    found = {"contiguous": contiguous_layout(forest, world), "snapped": snapped_layout(forest, world)}
    found["even work"] = _even_work(survey, world, model, costs)
    found = {name: renumbered(layout, near) for name, layout in found.items()}
    for slack in SLACK_PER_MILLE:
        found[f"whole subtrees, slack {slack}"] = _whole_subtrees(survey, near, model, costs, slack)
    return found


def renumbered(layout: Layout, near: Layout) -> Layout:
    """The layout with its ranks named after those of ``near`` that share most tokens with them."""
    shared = rows_moved(near, layout)
    name = np.full(layout.world, -1, np.int64)
    taken = np.zeros(layout.world, bool)
    for pair in np.argsort(-shared, axis=None, kind="stable").tolist():
        ours, theirs = divmod(pair, layout.world)
        if name[ours] < 0 and not taken[theirs]:
            name[ours], taken[theirs] = theirs, True
    return Layout(layout.world, layout.piece_start, name[layout.piece_rank])


def _work(tokens: np.ndarray, chunks: np.ndarray, model: ModelShape, costs: Costs) -> np.ndarray:
    """Nanoseconds of a recurrent layer, forward and backward, without anything that a cut adds."""
    forward, backward = recurrent_time(tokens, RecurrentFigures(chunks), model, costs)
    return forward.compute + backward.compute


def _even_work(survey: Survey, world: int, model: ModelShape, costs: Costs) -> Layout:
    """Contiguous ranges of equal work: short segments have part chunks, so equal tokens are unequal work."""
    above = _work(survey.start, survey.chunks_above, model, costs)
    target = int(above[-1]) * np.arange(1, world) // world
    segment = np.searchsorted(above, target, side="right") - 1
    inside = np.maximum(1, above[segment + 1] - above[segment])
    length = survey.start[segment + 1] - survey.start[segment]
    step = (target - above[segment]) * length // inside // CHUNK * CHUNK
    cuts = np.concatenate([[0], survey.start[segment] + step, [survey.forest.tokens]])
    return layout_from_cuts(cuts, np.arange(world), world)


def _units(survey: Survey, above: np.ndarray, share: int) -> np.ndarray:
    """int64 [U + 1] segment borders of what is placed whole: the largest subtrees with at most a rank's work, and each
    segment above them. Small neighbours are one unit."""
    forest = survey.forest
    stop = np.searchsorted(survey.start, forest.subtree_end)
    heavy = above[stop] - above[:-1] > share
    opens = heavy | (forest.parent < 0) | heavy[forest.parent]  # a light segment below a light one opens nothing
    first = np.flatnonzero(opens)
    bucket = above[first] * SMALL_UNITS // share
    small = above[np.append(first[1:], forest.segments)] - above[first] < share // SMALL_UNITS
    joins = small[1:] & small[:-1] & ~heavy[first[1:]] & ~heavy[first[:-1]] & (bucket[1:] == bucket[:-1])
    return np.append(first[np.append(True, ~joins)], forest.segments)


def _whole_subtrees(survey: Survey, near: Layout, model: ModelShape, costs: Costs, slack: int) -> Layout:
    """Units placed whole, most work first, each on the rank with room that has most of its tokens already; one that
    fits nowhere is cut to fill the emptiest ranks."""
    world, forest = near.world, survey.forest
    above = _work(survey.start, survey.chunks_above, model, costs)
    share = -(-int(above[-1]) // world)
    most = share * (1000 + slack) // 1000
    bounds = _units(survey, above, share)
    work, at = np.diff(above[bounds]), survey.start[bounds]
    here = _tokens_by_rank(near, at)
    load = np.zeros(world, np.int64)
    placed: list[tuple[int, int]] = []  # first token and rank
    for unit in np.argsort(-work, kind="stable").tolist():
        start, end, left = int(at[unit]), int(at[unit + 1]), int(work[unit])
        fits = np.flatnonzero(load + left <= most)
        if len(fits):
            rank = int(fits[np.lexsort((load[fits], -here[unit, fits]))[0]])
            placed.append((start, rank))
            load[rank] += left
            continue
        while left:
            rank = int(load.argmin())
            part = (end - start) * max(0, share - int(load[rank])) // left // CHUNK * CHUNK
            if not 0 < part < end - start:
                part = end - start
            taken = left * part // (end - start)
            placed.append((start, rank))
            load[rank] += taken
            start, left = start + part, left - taken
            if start == end:
                break
    placed.sort()
    cuts = np.array([token for token, _ in placed] + [forest.tokens])
    return layout_from_cuts(cuts, np.array([rank for _, rank in placed]), world)


def _tokens_by_rank(layout: Layout, at: np.ndarray) -> np.ndarray:
    """int64 [U, P]: tokens of each range between the borders ``at`` [U + 1] that each rank owns."""
    cut = np.union1d(layout.piece_start, at)
    unit = np.searchsorted(at, cut[:-1], side="right") - 1
    rank = layout.piece_rank[np.searchsorted(layout.piece_start, cut[:-1], side="right") - 1]
    found = np.zeros((len(at) - 1, layout.world), np.int64)
    np.add.at(found, (unit, rank), np.diff(cut))
    return found
