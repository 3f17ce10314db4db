"""A small drawing of rectangles, lines, triangles and text, written as SVG."""

from __future__ import annotations

import colorsys
from html import escape

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, GREY, LIGHT, PAPER = "#222222", "#777777", "#e6e6e6", "#ffffff"
# Neighbours differ in hue and in lightness.
_FEW_COLOURS = ("#3b6ea8", "#f2932b", "#4f9d4b", "#d94f53", "#a271a8", "#56b4b9", "#e3bd3c", "#8c6a56")
_GOLDEN_ANGLE = 0.381966


def rank_colour(rank: int, world: int) -> str:
    """A colour that neighbours of the rank do not have."""
    if world <= len(_FEW_COLOURS):
        return _FEW_COLOURS[rank]
    red, green, blue = colorsys.hls_to_rgb(rank * _GOLDEN_ANGLE % 1, (0.42, 0.62, 0.52)[rank % 3], 0.55)
    return f"#{int(255 * red):02x}{int(255 * green):02x}{int(255 * blue):02x}"


class Drawing:
    """Shapes in pixels, y down, later ones above earlier ones."""

    def __init__(self, width: int):
        self.width, self.height = width, 0.0
        self.shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, note: str = "", **data) -> None:
        """A filled rectangle; ``note`` shows under the pointer, ``data`` become data-* attributes."""
        title = f"<title>{escape(note)}</title>" if note else ""
        extra = "".join(f' data-{name}="{value}"' for name, value in data.items())
        body = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{extra}'
        self.shapes.append(f"{body}>{title}</rect>" if title else f"{body}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dashed=False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}" '
            f'stroke-width="{width:g}"{dash}/>'
        )

    def triangle(self, x: float, y: float, size: float, fill: str) -> None:
        """A triangle that points down to (x, y)."""
        points = f"{x:.2f},{y:.2f} {x - size / 2:.2f},{y - size:.2f} {x + size / 2:.2f},{y - size:.2f}"
        self.shapes.append(f'<polygon points="{points}" fill="{fill}" stroke="{PAPER}" stroke-width="0.7"/>')

    def text(
        self, x: float, y: float, text: str, size: int = 12, colour: str = INK, anchor="start", bold=False
    ) -> None:
        """Text whose baseline starts, is centred or ends at (x, y)."""
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def svg(self) -> str:
        """The whole picture; ``url(#read)`` is its hatching."""
        height = round(self.height)
        hatch = (
            '<defs><pattern id="read" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="1.6" height="5" fill="#ffffff" fill-opacity="0.75"/>'
            "</pattern></defs>"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" font-family="{FONT}">\n{hatch}\n'
            f'<rect width="{self.width}" height="{height}" fill="{PAPER}"/>\n' + "\n".join(self.shapes) + "\n</svg>\n"
        )
