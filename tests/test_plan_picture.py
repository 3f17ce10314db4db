"""The picture of a plan, read back: who owns what, what moves, and bars that add up."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np
import pytest

from cp_engine.drawing import rank_colour
from cp_engine.forest_picture import fragments_of
from cp_engine.machines import MACHINES
from cp_engine.model_sizes import model_sizes
from cp_engine.plan_picture import MOST_PACKS, check_picture, picture, write_picture
from cp_engine.plan_report import PlanSettings, plan_packs
from cp_engine.raster import Raster
from cp_engine.rollouts import flatten_rollouts
from cp_engine.scaling import synthetic_rollouts
from tests.forests import Rows, random_layout, random_rows


def planned(rows: Rows, cp: int, **changed):
    settings = PlanSettings(cp=cp, model=model_sizes("qwen3-8b"), machine=MACHINES["h200"], **changed)
    return plan_packs(flatten_rollouts(rows.rollouts()), settings)


def rects(svg: str, **wanted) -> list[dict]:
    """Attributes of the rectangles that have these data-* values."""
    every = [each.attrib for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")]
    return [each for each in every if all(each.get(f"data-{key}") == str(value) for key, value in wanted.items())]


def branchy(width: int = 30) -> Rows:
    """A trunk with 6 children of several hundred tokens, so that every fragment is higher than a pixel."""
    trunk = [1] * 400
    return Rows([trunk + [10 + i] * (200 + width * i) + [50 + j] * 150 for i in range(6) for j in range(2)], [0] * 12)


@pytest.mark.parametrize("cp", [1, 2, 5, 8])
def test_one_rectangle_a_fragment_in_its_owners_colour(cp):
    (pack,) = planned(branchy(), cp)
    svg, placement = picture([pack]).svg(), pack.placement
    drawn = rects(svg, kind="fragment")
    fragments = fragments_of(placement.forest, placement.layout)
    assert len(drawn) == len(fragments.start)
    held = np.zeros(placement.forest.tokens, bool)
    for rect in drawn:
        start, end, rank = (int(rect[f"data-{name}"]) for name in ("start", "end", "rank"))
        assert (placement.layout.owner[start:end] == rank).all() and not held[start:end].any()
        assert rect["fill"] == rank_colour(rank, cp)
        held[start:end] = True
    assert held.all()
    # One scale of depth for all; gaps between segments take less than a pixel.
    lengths = np.array([int(rect["data-end"]) - int(rect["data-start"]) for rect in drawn])
    heights = np.array([float(rect["height"]) for rect in drawn])
    assert np.abs(heights - lengths * 440 / placement.forest.max_depth).max() <= 0.82
    assert len(rects(svg, kind="read")) == int(fragments.read.sum())


@pytest.mark.parametrize("seed", range(20))
def test_what_moves_is_marked(seed):
    """A fragment's keys move exactly if another rank owns a token below it."""
    rows = random_rows(seed, rows=15, longest=20)
    forest = rows.forest
    layout = random_layout(forest, seed)
    fragments = fragments_of(forest, layout)
    readers = [set() for _ in range(forest.tokens)]
    for token, path in enumerate(rows.paths):
        for key in path:
            readers[key].add(int(layout.owner[token]))
    for index, (start, end) in enumerate(zip(fragments.start, fragments.end, strict=True)):
        owner = int(fragments.owner[index])
        assert set(layout.owner[start:end].tolist()) == {owner}
        assert all((readers[token] != {owner}) == fragments.read[index] for token in range(start, end))
        above = forest.token_parent[start]
        parent = fragments.parent[index]
        assert parent == -1 if above < 0 else fragments.end[parent] == above + 1
        assert fragments.depth[index] == forest.position[start]


@pytest.mark.parametrize("cp", [3, 40])
def test_bars_add_up_to_the_totals(cp):
    (pack,) = planned(branchy(), cp)
    svg, figures = picture([pack]).svg(), pack.placement.figures
    for name in ("tokens", "pairs", "rows_in", "rows_out"):
        bars = rects(svg, chart=name)
        assert [int(bar["data-value"]) for bar in bars] == getattr(figures, name).tolist()
        assert [bar["fill"] for bar in bars] == [rank_colour(rank, cp) for rank in range(cp)]
        heights, values = np.array([float(bar["height"]) for bar in bars]), getattr(figures, name)
        assert np.abs(heights * values.sum() - values * heights.sum()).max() <= 0.02 * values.sum()
    assert sum(int(bar["data-value"]) for bar in rects(svg, chart="tokens")) == pack.placement.forest.tokens
    assert sum(int(bar["data-value"]) for bar in rects(svg, chart="pairs")) == pack.placement.forest.tree_pairs


def test_low_segments_and_many_paths_are_merged():
    chain = Rows([[1] * n for n in range(1, 3000)], [0] * 2999)  # one path of one-token segments
    (pack,) = planned(chain, 3)
    drawn = rects(picture([pack]).svg(), kind="fragment")
    assert len(drawn) < 20
    assert sum(int(rect["data-end"]) - int(rect["data-start"]) for rect in drawn) == 2999
    settings = PlanSettings(cp=64, model=model_sizes("qwen3-8b"), machine=MACHINES["h200"])
    (large,) = plan_packs(synthetic_rollouts("grpo_5k16"), settings)
    svg = picture([large]).svg()
    merged = rects(svg, kind="merged")
    assert not rects(svg, kind="fragment") and 390 <= len(merged) < 4000 and len(svg) < 10**6
    assert all(rect["fill"] == rank_colour(int(rect["data-rank"]), 64) for rect in merged)
    assert {int(rect["data-rank"]) for rect in merged} == set(range(64))


@pytest.mark.parametrize("cp", [2, 12, 200])
def test_everything_stays_on_the_page(cp):
    (pack,) = planned(branchy(200), cp)
    root = ElementTree.fromstring(picture([pack]).svg())
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in rects(picture([pack]).svg()):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        if "patternUnits" not in rect:
            assert 0 <= x and x + float(rect["width"]) <= width and 0 <= y and y + float(rect["height"]) <= height
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        # 0.62 em is wider than the mean letter of a sans-serif face.
        length = 0.62 * float(text.get("font-size")) * len(text.text)
        begin = float(text.get("x")) - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
        assert 0 <= begin and begin + length <= width and 0 < float(text.get("y")) < height, text.text


def test_neighbours_have_different_colours():
    for world in (2, 8, 9, 64, 512):
        colours = [rank_colour(rank, world) for rank in range(world)]
        assert all(a != b for a, b in zip(colours, colours[1:], strict=False))
        if world <= 64:
            assert len(set(colours)) == world


def test_files(tmp_path):
    packs = planned(random_rows(1, rows=40, longest=12), 2, max_pack_tokens=14)
    assert len(packs) > 1
    write_picture(tmp_path / "a.svg", packs)
    write_picture(tmp_path / "a.html", packs)
    svg = (tmp_path / "a.svg").read_text()
    assert svg == picture(packs).svg() and svg in (tmp_path / "a.html").read_text()
    many = [packs[0]] * (MOST_PACKS + 3)
    assert "3 more packs are not drawn" in picture(many).svg()


def png_pixels(data: bytes) -> np.ndarray:
    """uint8 [height, width, 3] of a PNG without filters; lengths and checksums of its chunks are checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, size = 8, b"", (0, 0)
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + length]
        assert zlib.crc32(name + content) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        if name == b"IHDR":
            size = struct.unpack(">II", content[:8])
        body += content if name == b"IDAT" else b""
        at += 12 + length
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(size[1], 1 + 3 * size[0])
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(size[1], size[0], 3)


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


@pytest.mark.parametrize("cp", [2, 12])
def test_png_shows_what_the_svg_shows(cp, tmp_path):
    packs = planned(branchy(), cp)
    write_picture(tmp_path / "a.png", packs)
    drawing = picture(packs)
    pixels = png_pixels((tmp_path / "a.png").read_bytes())
    assert pixels.shape == (2 * round(drawing.height), 2 * drawing.width, 3)
    svg = drawing.svg()
    hatched = {(rect["x"], rect["y"]) for rect in rects(svg, kind="read")}
    checked = 0
    for rect in rects(svg, kind="fragment") + rects(svg, chart="tokens") + rects(svg, chart="pairs"):
        x, y, width, height = (float(rect[name]) for name in ("x", "y", "width", "height"))
        column, row = round(2 * (x + width / 4)), round(2 * (y + 0.7 * height))
        if height > 30 and (rect["x"], rect["y"]) not in hatched:
            assert pixels[row, column].tolist() == rgb(rect["fill"])
            checked += 1
    assert checked > 2 * cp
    assert (pixels == 255).all(2).mean() > 0.5  # paper


def test_pixels_by_hand():
    raster = Raster(20, 12, 1)
    raster.rect(2.5, 1, 2, 3, "#0000ff")
    red = 255 - raster.pixels[:, :, 0]
    assert red[1:4, 2:5].tolist() == [[127.5, 255, 127.5]] * 3 and red.sum() == 6 * 255
    raster = Raster(20, 12, 1)
    raster.text(1, 9, "T", 11, "#000000", "start", False)
    ink = raster.pixels[:, :, 0] == 0
    assert np.argwhere(ink).min(0).tolist() == [2, 1] and np.argwhere(ink).max(0).tolist() == [8, 5]
    assert ink[2, 1:6].all() and ink[2:9, 3].all() and ink.sum() == 5 + 6 + 2  # its serifs hang one pixel
    raster = Raster(20, 12, 1)
    raster.triangle(10, 10, 8, "#000000")
    widths = (raster.pixels[:, :, 0] < 128).sum(1)
    assert widths[2] >= 7 and widths[9] <= 2 and (np.diff(widths[2:10]) <= 0).all() and not widths[:2].any()
    for x, y in ((-5, -5), (18, 11), (40, 40)):  # what lies outside is cut off
        raster.rect(x, y, 10, 10, "#123456", True)
        raster.text(x, y, "no \u00e9", 12, "#123456", "middle", True)


def test_wrong_pictures_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expects a file that ends in .svg, .html, .png; got 'a.pdf'"):
        check_picture("a.pdf")
    with pytest.raises(ValueError, match="there is no folder"):
        check_picture(str(tmp_path / "missing" / "a.svg"))
