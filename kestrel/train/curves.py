"""Training curves: a CSV row every few steps, and a picture of it."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLOURS = {"text": "#2563eb", "coord": "#dc2626", "size": "#16a34a", "token_accuracy": "#9333ea"}
WIDTH, HEIGHT, MARGIN, FONT_PX = 960, 540, 60, 15
LOWEST, HIGHEST = -2, 1
"""Powers of ten that the scale shows."""


class CurveWriter:
    """Appends to `curves.csv`; runs that resume go on in the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] | None = None
        if path.exists():
            with path.open(newline="") as file:
                self._columns = next(csv.reader(file), None)

    def write(self, row: Mapping[str, float | int | str]) -> None:
        is_new = self._columns is None
        self._columns = self._columns or list(row)
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def draw_curves(csv_path: Path, png_path: Path, axis: str = "scenes", colours: Mapping[str, str] = COLOURS) -> None:
    """Losses on a log scale against scenes seen. Rows without a value of a column are passed over in its curve."""
    with csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(FONT_PX)
    for exponent in range(LOWEST, HIGHEST + 1):
        y = _y(10.0**exponent)
        draw.line([(MARGIN, y), (WIDTH - MARGIN, y)], fill="#dddddd")
        draw.text((MARGIN - 8, y), f"{10.0**exponent:g}", fill="black", font=font, anchor="rm")
    if rows:
        last = float(rows[-1][axis])
        for index, (name, colour) in enumerate(colours.items()):
            measured = [row for row in rows if row.get(name)]
            if not measured:
                continue
            values = [float(row[name]) for row in measured]
            draw.line(_points([float(row[axis]) for row in measured], values, last), fill=colour, width=2)
            place = (MARGIN + 180 * index, MARGIN - 20)
            draw.text(place, f"{name} {values[-1]:.4g}", fill=colour, font=font, anchor="ls")
        legend = f"{axis} seen: 0 to {last:,.0f}"
        draw.text((MARGIN, HEIGHT - MARGIN + 24), legend, fill="black", font=font, anchor="ls")
    picture.save(png_path)


def _points(xs: list[float], ys: list[float], last: float) -> list[tuple[float, float]]:
    return [(MARGIN + (WIDTH - 2 * MARGIN) * x / max(last, 1.0), _y(y)) for x, y in zip(xs, ys, strict=True)]


def _y(value: float) -> float:
    """Log scale, the lowest power of ten at the bottom."""
    share = (math.log10(max(value, 10.0**LOWEST)) - LOWEST) / (HIGHEST - LOWEST)
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)
