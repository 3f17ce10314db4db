"""A small drawing of rectangles, straight lines, triangles and text, written as SVG or PNG."""

from __future__ import annotations

import colorsys
from html import escape

from cp_engine.raster import Raster

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, GREY, LIGHT, PAPER = "#222222", "#777777", "#e6e6e6", "#ffffff"
# Neighbours differ in hue and in lightness.
_FEW_COLOURS = ("#3b6ea8", "#f2932b", "#4f9d4b", "#d94f53", "#a271a8", "#56b4b9", "#e3bd3c", "#8c6a56")
_GOLDEN_ANGLE = 0.381966
PNG_SCALE = 2  # pixels of a unit
DASH, GAP = 4, 3
_HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="1.6" height="5" fill="#ffffff" fill-opacity="0.75"/></pattern></defs>'
)


def rank_colour(rank: int, world: int) -> str:
    """A colour that neighbours of the rank do not have."""
    if world <= len(_FEW_COLOURS):
        return _FEW_COLOURS[rank]
    red, green, blue = colorsys.hls_to_rgb(rank * _GOLDEN_ANGLE % 1, (0.42, 0.62, 0.52)[rank % 3], 0.55)
    return f"#{int(255 * red):02x}{int(255 * green):02x}{int(255 * blue):02x}"


class Drawing:
    """Shapes in units of a pixel on screen, y down, later ones above earlier ones."""

    def __init__(self, width: int):
        self.width, self.height = width, 0.0
        self._svg: list[str] = []
        self._painted: list[tuple] = []  # the same shapes: a method of `Raster` and its arguments

    def rect(self, x: float, y: float, width: float, height: float, fill: str, note: str = "", **data) -> None:
        """A filled rectangle; ``note`` shows under the pointer, ``data`` become data-* attributes."""
        self._rect(x, y, width, height, fill, note, data)
        self._painted.append(("rect", x, y, width, height, fill))

    def hatch(self, x: float, y: float, width: float, height: float, note: str = "", **data) -> None:
        """White stripes over a rectangle."""
        self._rect(x, y, width, height, "url(#hatch)", note, data)
        self._painted.append(("rect", x, y, width, height, PAPER, True))

    def _rect(self, x: float, y: float, width: float, height: float, fill: str, note: str, data: dict) -> None:
        extra = "".join(f' data-{name}="{value}"' for name, value in data.items())
        body = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{extra}'
        self._svg.append(f"{body}><title>{escape(note)}</title></rect>" if note else f"{body}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dashed=False) -> None:
        """A horizontal or vertical line."""
        dash = f' stroke-dasharray="{DASH} {GAP}"' if dashed else ""
        self._svg.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}" '
            f'stroke-width="{width:g}"{dash}/>'
        )
        assert x1 == x2 or y1 == y2, "only straight lines are painted"
        step = DASH + GAP if dashed else max(1e-9, x2 - x1)
        x = x1
        while y1 == y2 and x < x2:
            self._painted.append(("rect", x, y1 - width / 2, min(DASH if dashed else step, x2 - x), width, colour))
            x += step
        if y1 != y2:
            self._painted.append(("rect", x1 - width / 2, min(y1, y2), width, abs(y2 - y1), colour))

    def triangle(self, x: float, y: float, size: float, fill: str) -> None:
        """A triangle that points down to (x, y)."""
        points = f"{x:.2f},{y:.2f} {x - size / 2:.2f},{y - size:.2f} {x + size / 2:.2f},{y - size:.2f}"
        self._svg.append(f'<polygon points="{points}" fill="{fill}" stroke="{PAPER}" stroke-width="0.7"/>')
        self._painted.append(("triangle", x, y + 1, size + 2, PAPER))
        self._painted.append(("triangle", x, y, size, fill))

    def text(
        self, x: float, y: float, text: str, size: int = 12, colour: str = INK, anchor="start", bold=False
    ) -> None:
        """Text whose baseline starts, is centred or ends at (x, y)."""
        weight = ' font-weight="bold"' if bold else ""
        self._svg.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )
        self._painted.append(("text", x, y, text, size, colour, anchor, bold))

    def svg(self) -> str:
        """The whole picture."""
        height = round(self.height)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" font-family="{FONT}">\n{_HATCH}\n'
            f'<rect width="{self.width}" height="{height}" fill="{PAPER}"/>\n' + "\n".join(self._svg) + "\n</svg>\n"
        )

    def png(self) -> bytes:
        """The whole picture, at twice the size."""
        raster = Raster(self.width, round(self.height), PNG_SCALE)
        for method, *arguments in self._painted:
            getattr(raster, method)(*arguments)
        return raster.png()
