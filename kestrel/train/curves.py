"""Training curves: a CSV row every few steps, and a picture of it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLOURS = {"text": "#2563eb", "coord": "#dc2626", "size": "#16a34a", "token_accuracy": "#9333ea"}
SHARES = frozenset({"token_accuracy", "val_f1", "val_ap50"})
"""Columns from 0 to 1; the others are losses."""
WIDTH, MARGIN, FONT_PX = 960, 60, 15
PANEL, GAP = 300, 72
"""Heights: of a panel, and of what is above each of them and below the last."""
LOWEST, HIGHEST = -2, 1
"""Powers of ten that the scale of losses shows."""
MOST_TICKS = 8
GRID, INK = "#dddddd", "black"


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
    """Losses above, on a log scale; shares below, from 0 to 1. Both against scenes seen."""
    with csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses, shares = ({name: c for name, c in colours.items() if (name in SHARES) == is_share} for is_share in (0, 1))
    powers = {f"{10.0**power:g}": _log(10.0**power) for power in range(LOWEST, HIGHEST + 1)}
    fifths = {f"{fifth / 5:g}": fifth / 5 for fifth in range(6)}
    picture = Image.new("RGB", (WIDTH, 2 * PANEL + 3 * GAP), "white")
    draw = ImageDraw.Draw(picture)
    _Panel(draw, GAP, rows, axis, powers).draw(losses, _log)
    _Panel(draw, PANEL + 2 * GAP, rows, axis, fifths).draw(shares, lambda share: min(max(share, 0.0), 1.0))
    draw.text((WIDTH / 2, picture.height - 6), f"{axis} seen", fill=INK, font=_font(), anchor="ms")
    picture.save(png_path)


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(FONT_PX)


def _log(value: float) -> float:
    """0 at the lowest power of ten, 1 at the highest; what is beyond lies on the edge."""
    return (min(max(math.log10(max(value, 1e-30)), LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


class _Panel:
    def __init__(
        self,
        draw: ImageDraw.ImageDraw,
        top: int,
        rows: Sequence[Mapping[str, str]],
        axis: str,
        ticks: Mapping[str, float],
    ) -> None:
        """`ticks`: texts of the y axis, and how far up they are from 0 to 1."""
        self._draw = draw
        self._top = top
        self._rows = rows
        self._axis = axis
        self._last = max(float(rows[-1][axis]), 1.0) if rows else 1.0
        self._ticks = ticks

    def draw(self, colours: Mapping[str, str], height_of: Callable[[float], float]) -> None:
        self._draw_axes()
        for index, (name, colour) in enumerate(colours.items()):
            # Rows without a value of a column are passed over in its curve.
            measured = [(float(row[self._axis]), float(row[name])) for row in self._rows if row.get(name)]
            if measured:
                points = [(self._x(x), self._y(height_of(y))) for x, y in measured]
                self._curve(points, colour)
                place = (MARGIN + 180 * index, self._top - 12)
                self._draw.text(place, f"{name} {measured[-1][1]:.4g}", fill=colour, font=_font(), anchor="ls")

    def _draw_axes(self) -> None:
        draw, bottom = self._draw, self._y(0.0)
        for told, height in self._ticks.items():
            y = self._y(height)
            draw.line([(MARGIN, y), (WIDTH - MARGIN, y)], fill=GRID)
            draw.text((MARGIN - 8, y), told, fill=INK, font=_font(), anchor="rm")
        for value in tick_values(self._last):
            x = self._x(value)
            draw.line([(x, self._top), (x, bottom + 5)], fill=GRID)
            draw.text((x, bottom + 8), f"{value:,}", fill=INK, font=_font(), anchor="ma")

    def _curve(self, points: list[tuple[float, float]], colour: str) -> None:
        self._draw.line(points, fill=colour, width=2)
        if len(points) == 1:
            (x, y) = points[0]
            self._draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)

    def _x(self, value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * value / self._last

    def _y(self, height: float) -> float:
        return self._top + (1.0 - height) * PANEL


def tick_values(last: float) -> list[int]:
    """Round numbers from 0 to `last`: steps of 1, 2 or 5 times a power of ten."""
    steps = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    step = next(step for step in steps if last / step < MOST_TICKS)
    return list(range(0, int(last) + 1, step))
