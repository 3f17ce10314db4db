"""`plan --picture`: who owns what and what moves, as SVG, HTML or PNG.

Each pack shows its forest (`forest_picture`) and three bar charts of all ranks: tokens, pairs, and rows moved.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cp_engine.drawing import GREY, INK, LIGHT, Drawing, rank_colour
from cp_engine.forest_picture import Frame, draw_forest, merges_columns
from cp_engine.plan_report import PlannedPack

KINDS = (".svg", ".html", ".png")
WIDTH, LEFT, RIGHT = 1280, 80, 30
FOREST_HEIGHT, CHART_HEIGHT, CHART_GAP = 440, 120, 50
MOST_PACKS = 8  # packs that are drawn
MOST_SWATCHES = 16  # ranks that get a swatch each in the legend


def check_picture(path: str) -> None:
    """Refuse a picture that cannot be written, before anything is planned.

    Raises:
        ValueError: naming what to choose.
    """
    if Path(path).suffix.lower() not in KINDS:
        raise ValueError(f"--picture expects a file that ends in {', '.join(KINDS)}; got {path!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--picture: there is no folder {Path(path).absolute().parent} to write into")


def write_picture(path: Path, planned: list[PlannedPack]) -> None:
    """Write the picture of the packs of one step."""
    drawing, kind = picture(planned), path.suffix.lower()
    if kind == ".png":
        path.write_bytes(drawing.png())
    elif kind == ".html":
        style = "body{margin:0;background:#f4f4f4}svg{display:block;margin:24px auto;max-width:96vw;height:auto}"
        head = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>plan</title><style>{style}</style>'
        path.write_text(f"{head}</head><body>\n{drawing.svg()}</body></html>\n", encoding="utf-8")
    else:
        path.write_text(drawing.svg(), encoding="utf-8")


def picture(planned: list[PlannedPack]) -> Drawing:
    """The drawing of the first `MOST_PACKS` packs."""
    drawing = Drawing(WIDTH)
    y = 20.0
    for index, pack in enumerate(planned[:MOST_PACKS]):
        y = _draw_pack(drawing, index, pack, y) + 40
    if len(planned) > MOST_PACKS:
        drawing.text(LEFT, y, f"{len(planned) - MOST_PACKS} more packs are not drawn", 13, GREY)
        y += 30
    drawing.height = y
    return drawing


def _draw_pack(drawing: Drawing, index: int, planned: PlannedPack, y: float) -> float:
    """Draw one pack below ``y``; returns where it ends."""
    placement, time = planned.placement, planned.time
    forest, world = placement.forest, placement.world
    title = f"Pack {index}: {forest.tokens:,} tokens in {forest.segments:,} segments on {world} ranks"
    drawing.text(LEFT, y + 14, title, 19, bold=True)
    moved = int(placement.figures.rows_in.sum())
    lines = (
        f"{forest.flat_tokens:,} tokens row by row. Layout: {placement.method}. Exchange: {planned.chosen}. "
        f"{moved:,} rows of keys and values are seen by ranks that do not own them.",
        f"Predicted: {time.step / 1e6:,.1f} ms for all decoder layers, forward and backward, "
        f"{time.exposed / 1e6:,.1f} ms of it exposed exchange.",
    )
    for place, line in enumerate(lines):
        drawing.text(LEFT, y + 36 + 17 * place, line, 12, GREY)
    _draw_rank_legend(drawing, world, y + 68)
    width = WIDTH - LEFT - RIGHT
    merged = merges_columns(forest, width)
    if not merged:
        _draw_marks_legend(drawing, y + 94)
    frame = Frame(LEFT, y + (118 if merged else 144), width, FOREST_HEIGHT)
    caption = draw_forest(drawing, forest, placement.layout, frame)
    y = frame.y + frame.height + 22
    drawing.text(LEFT, y, caption, 11, GREY)
    return _draw_charts(drawing, planned, y + 34)


def _draw_rank_legend(drawing: Drawing, world: int, y: float) -> None:
    if world <= MOST_SWATCHES:
        for rank in range(world):
            x = LEFT + 72 * rank
            drawing.rect(x, y, 13, 13, rank_colour(rank, world))
            drawing.text(x + 18, y + 11, f"rank {rank}", 12)
        return
    width = min(8.0, 700 / world)
    drawing.text(LEFT, y + 11, "ranks 0", 12)
    for rank in range(world):
        drawing.rect(LEFT + 50 + rank * width, y, width, 13, rank_colour(rank, world))
    drawing.text(LEFT + 56 + world * width, y + 11, f"to {world - 1}", 12)


def _draw_marks_legend(drawing: Drawing, y: float) -> None:
    plain = rank_colour(0, 1)
    drawing.rect(LEFT, y, 13, 18, plain)
    drawing.text(LEFT + 18, y + 13, "seen by its own rank only", 12)
    x = LEFT + 205
    drawing.rect(x, y, 13, 18, plain)
    drawing.hatch(x, y, 13, 18)
    drawing.text(x + 18, y + 13, "other ranks read its keys and values", 12)
    x += 290
    drawing.rect(x, y - 3, 13, 11, plain)
    drawing.rect(x, y + 9, 13, 11, rank_colour(1, 2))
    drawing.line(x - 5, y + 8.5, x + 18, y + 8.5, INK, 1.8)
    drawing.text(x + 24, y + 13, "a path goes on on another rank", 12)
    x += 275
    drawing.rect(x, y + 2, 14, 16, rank_colour(1, 2))
    drawing.line(x - 22, y + 2, x + 7, y + 2, INK, 1.6)
    drawing.triangle(x + 7, y + 12, 8, INK)
    drawing.text(x + 20, y + 13, "a state arrives from another rank (recurrent layers)", 12)


def _draw_charts(drawing: Drawing, planned: PlannedPack, y: float) -> float:
    figures = planned.placement.figures
    width = (WIDTH - LEFT - RIGHT - 2 * CHART_GAP) / 3
    for place, (name, unit, value) in enumerate(
        (("tokens", "tokens", figures.tokens), ("pairs", "visible pairs", figures.pairs))
    ):
        x = LEFT + place * (width + CHART_GAP)
        ratio = float(value.max()) * len(value) / max(1.0, float(value.sum()))
        drawing.text(x, y, f"{unit}, largest over mean {ratio:.3f}", 13, bold=True)
        _draw_bars(drawing, name, value, Frame(x, y + 26, width, CHART_HEIGHT), int(value.max()), labels=True)
        mean = y + 26 + CHART_HEIGHT * (1 - float(value.mean()) / max(1, int(value.max())))
        drawing.line(x, mean, x + width, mean, INK, 1, dashed=True)
    x = LEFT + 2 * (width + CHART_GAP)
    most, half = max(1, figures.busiest_rows), CHART_HEIGHT / 2
    drawing.text(x, y, f"rows in (up) and rows out (down): at most {figures.busiest_rows:,}", 13, bold=True)
    _draw_bars(drawing, "rows_in", figures.rows_in, Frame(x, y + 26, width, half), most, labels=False)
    _draw_bars(
        drawing, "rows_out", figures.rows_out, Frame(x, y + 26 + half, width, half), most, labels=True, down=True
    )
    return y + 26 + CHART_HEIGHT + 24


def _draw_bars(
    drawing: Drawing, name: str, value: np.ndarray, frame: Frame, most: int, labels: bool, down=False
) -> None:
    """One bar a rank, upwards from the bottom of the frame, or downwards from its top."""
    world = len(value)
    pitch = min(90.0, frame.width / world)
    base = frame.y if down else frame.y + frame.height
    for rank, amount in enumerate(value.tolist()):
        x, height = frame.x + rank * pitch, frame.height * amount / max(1, most)
        bar = pitch * 0.8 if pitch > 3 else pitch
        colour = rank_colour(rank, world)
        top = base if down else base - height
        drawing.rect(x, top, bar, height, colour, f"rank {rank}: {amount:,}", chart=name, rank=rank, value=amount)
        if pitch >= 36:
            # Beside other bars' ends and the line of the mean, a row above all bars is the place that stays free.
            beside = frame.y - 5 if name in ("tokens", "pairs") else base + height + 12 if down else top - 4
            drawing.text(x + bar / 2, beside, _short(amount), 10, GREY, "middle")
        if labels and pitch >= 14:
            drawing.text(x + bar / 2, frame.y + frame.height + (28 if down else 14), str(rank), 10, INK, "middle")
    drawing.line(frame.x, base, frame.x + frame.width, base, LIGHT if down else GREY)


def _short(amount: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if amount >= size:
            return f"{amount / (size if letter != 'k' else 1000):.3g}{letter}"
    return f"{amount:,}"
