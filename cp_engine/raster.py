"""Shapes to pixels to PNG, with numpy and zlib: rectangles, hatching, triangles, text in a face of 5 x 7 pixels."""

from __future__ import annotations

import struct
import zlib

import numpy as np

# Columns of each glyph from " " to "~", five bytes a glyph, lowest bit at the top; bit 7 hangs below the line.
_GLYPHS = bytes.fromhex(
    "0000000000" "00005f0000" "0007000700" "147f147f14" "242a7f2a12" "2313086462" "3649562050" "0008070300"
    "001c224100" "0041221c00" "2a1c7f1c2a" "08083e0808" "0080703000" "0808080808" "0000606000" "2010080402"
    "3e5149453e" "00427f4000" "7249494946" "2141494d33" "1814127f10" "2745454539" "3c4a494931" "4121110907"
    "3649494936" "464949291e" "0000140000" "0040340000" "0008142241" "1414141414" "0041221408" "0201590906"
    "3e415d594e" "7c1211127c" "7f49494936" "3e41414122" "7f4141413e" "7f49494941" "7f09090901" "3e41415173"
    "7f0808087f" "00417f4100" "2040413f01" "7f08142241" "7f40404040" "7f021c027f" "7f0408107f" "3e4141413e"
    "7f09090906" "3e4151215e" "7f09192946" "2649494932" "03017f0103" "3f4040403f" "1f2040201f" "3f4038403f"
    "6314081463" "0304780403" "6159494d43" "007f414141" "0204081020" "004141417f" "0402010204" "4040404040"
    "0003070800" "2054547840" "7f28444438" "3844444428" "384444287f" "3854545418" "00087e0902" "18a4a49c78"
    "7f08040478" "00447d4000" "2040403d00" "7f10284400" "00417f4000" "7c04780478" "7c08040478" "3844444438"
    "fc18242418" "18242418fc" "7c08040408" "4854545424" "04043f4424" "3c4040207c" "1c2040201c" "3c4030403c"
    "4428102844" "4c9090907c" "4464544c44" "0008364100" "0000770000" "0041360800" "0201020402"
)  # fmt: skip
_FACE = np.unpackbits(np.frombuffer(_GLYPHS, np.uint8).reshape(-1, 5, 1), axis=2, bitorder="little").swapaxes(1, 2)
ADVANCE, CAP_ROWS = 6, 7  # pixels of the face from letter to letter, and of a capital's height


class Raster:
    """An RGB picture of ``scale`` pixels a unit, white at first. Coordinates are in units, y down."""

    def __init__(self, width: float, height: float, scale: int):
        self.scale = scale
        self.pixels = np.full((round(height * scale), round(width * scale), 3), 255.0, np.float32)

    def rect(self, x: float, y: float, width: float, height: float, colour: str, hatched: bool = False) -> None:
        """A rectangle; edges between pixels are blended. ``hatched`` paints only slanted stripes of it."""
        rows, down = _covered(y * self.scale, (y + height) * self.scale, self.pixels.shape[0])
        columns, across = _covered(x * self.scale, (x + width) * self.scale, self.pixels.shape[1])
        share = down[:, None] * across
        if hatched:
            place = np.arange(rows.start, rows.stop)[:, None] + np.arange(columns.start, columns.stop)
            share = share * np.where(place % (7 * self.scale) < 2.2 * self.scale, 0.75, 0)
        self._blend(rows, columns, share, colour)

    def triangle(self, x: float, y: float, size: float, colour: str) -> None:
        """A triangle that points down to (x, y)."""
        rows, columns = (
            slice(int((y - size) * self.scale), int(y * self.scale) + 1),
            slice(int((x - size / 2) * self.scale), int((x + size / 2) * self.scale) + 1),
        )
        height = y - (np.arange(rows.start, rows.stop)[:, None] + 0.5) / self.scale
        away = np.abs((np.arange(columns.start, columns.stop) + 0.5) / self.scale - x)
        inside = np.clip((height / 2 - away) * self.scale + 0.5, 0, 1) * (height <= size)
        self._blend(rows, columns, inside, colour)

    def text(self, x: float, y: float, text: str, size: float, colour: str, anchor: str, bold: bool) -> None:
        """A line of text whose baseline starts, is centred or ends at (x, y); letters outside ASCII become "?"."""
        zoom = max(1, round(0.62 * size * self.scale / CAP_ROWS))
        codes = [ord(letter) if " " <= letter <= "~" else ord("?") for letter in text]
        face = np.zeros((8, len(codes), ADVANCE), np.float32)
        face[:, :, :5] = _FACE[np.array(codes, np.int64) - 32].swapaxes(0, 1)
        mask = face.reshape(8, -1).repeat(zoom, 0).repeat(zoom, 1)
        if bold:
            mask[:, 1:] = np.maximum(mask[:, 1:], mask[:, :-1])
        top = round(y * self.scale) - CAP_ROWS * zoom
        left = round(x * self.scale - {"start": 0, "middle": 0.5, "end": 1}[anchor] * mask.shape[1])
        self._blend(slice(top, top + mask.shape[0]), slice(left, left + mask.shape[1]), mask, colour)

    def _blend(self, rows: slice, columns: slice, share: np.ndarray, colour: str) -> None:
        target = self.pixels[max(0, rows.start) : max(0, rows.stop), max(0, columns.start) : max(0, columns.stop)]
        share = share[max(0, -rows.start) :, max(0, -columns.start) :][: target.shape[0], : target.shape[1], None]
        paint = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.float32)
        target += share * (paint - target)

    def png(self) -> bytes:
        """The picture as an 8-bit RGB file."""
        height, width, _ = self.pixels.shape
        lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with filter 0
        lines[:, 1:] = np.rint(self.pixels).reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
        body = (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _covered(low: float, high: float, size: int) -> tuple[slice, np.ndarray]:
    """The pixels that an interval touches, and how much of each it covers."""
    first, last = max(0, int(np.floor(low))), min(size, int(np.ceil(high)))
    edge = np.arange(first, max(first, last))
    return slice(first, max(first, last)), np.clip(np.minimum(edge + 1, high) - np.maximum(edge, low), 0, 1)
