"""Fill an SVG path into a mask."""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import RequestError
from kestrel.images.masks.geometry import Mask, Points, box_values, cubic_at

SCANLINES_PER_ROW = 4


def rasterise_path(svg_path: str, bbox: Mapping[str, float], height: int, width: int, supersample: int = 2) -> Mask:
    """The picture-sized mask a path covers (nonzero rule), at least half of each pixel.

    Path coordinates are relative to the box. As SVG demands, a malformed path counts up to its first mistake.
    """
    for name, value in (("height", height), ("width", width), ("supersample", supersample)):
        if value < 1:
            raise RequestError(name, f"must be at least 1 (got {value})")
    x_min, y_min, x_max, y_max = box_values(bbox)
    origin = complex(x_min * width, y_min * height)
    outlines = path_outlines(svg_path, origin, (x_max - x_min) * width, (y_max - y_min) * height)
    return _coverage(outlines, height, width, supersample * SCANLINES_PER_ROW) >= 0.5


def _coverage(outlines: list[list[Points]], height: int, width: int, scanlines: int) -> NDArray[np.float32]:
    """Share of every pixel inside the outlines: exact along a scanline, `scanlines` of them per pixel row."""
    cover = np.zeros((height, width + 2), np.float32)
    rows, crossings, winding_steps = _scanline_crossings(outlines, height * scanlines, scanlines)
    order = np.lexsort((crossings, rows))
    rows, crossings, winding_steps = rows[order], crossings[order], winding_steps[order]
    winding = np.cumsum(winding_steps)
    enters = (winding != 0) & (winding == winding_steps)
    leaves = (winding == 0) & (winding_steps != 0)
    for edge, sign in ((enters, 1.0), (leaves, -1.0)):
        x = np.clip(crossings[edge], 0, width)
        column = x.astype(np.int64)
        share = x - column
        np.add.at(cover, (rows[edge] // scanlines, column), sign * (1 - share))
        np.add.at(cover, (rows[edge] // scanlines, column + 1), sign * share)
    np.cumsum(cover, axis=1, out=cover)
    cover /= scanlines
    return cover[:, :width]


def _scanline_crossings(
    outlines: list[list[Points]], num_lines: int, scanlines: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """(scanline, x, +1 downwards or -1 upwards) of every crossing of an outline with the middle of a scanline."""
    loops = [np.concatenate(outline) for outline in outlines]
    start = np.concatenate([np.empty(0, np.complex128), *loops])
    end = np.concatenate([np.empty(0, np.complex128), *(np.roll(loop, -1) for loop in loops)])
    y_start, y_end = start.imag * scanlines - 0.5, end.imag * scanlines - 0.5
    first = np.ceil(np.clip(np.minimum(y_start, y_end), 0, num_lines)).astype(np.int64)
    last = np.ceil(np.clip(np.maximum(y_start, y_end), 0, num_lines)).astype(np.int64)
    counts = last - first
    edge = np.repeat(np.arange(len(start)), counts)
    rows = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    slope = (end.real - start.real)[edge] / (y_end - y_start)[edge]
    crossings = start.real[edge] + (rows - y_start[edge]) * slope
    return rows, crossings, np.where(y_end > y_start, 1, -1)[edge]


# ---------------------------------------------------------------------- path text to outlines

FLATNESS_PX = 0.05
MAX_CURVE_PIECES = 1000
LARGEST_NUMBER = 1e9
SMALLEST_LENGTH = 1e-9

_NUMBER_COUNTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_ARC_FLAGS = (3, 4)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_FLAG = re.compile(r"[01]")
_SEPARATOR = re.compile(r"\s*,?\s*")


def path_outlines(svg_path: str, origin: complex, x_scale: float, y_scale: float) -> list[list[Points]]:
    """Every closed outline as consecutive strokes in pixels, every curve flattened.

    The path's 0..1 starts at `origin` and is `x_scale` by `y_scale` large.
    """
    pen = _Pen(origin, x_scale, y_scale)
    for command, numbers in _read_path(svg_path):
        pen.draw(command, numbers)
    return pen.outlines


def _read_path(text: str) -> Iterator[tuple[str, list[float]]]:
    """(letter, numbers) per drawn step, repeated arguments spelt out; ends at the first mistake."""
    position, started = _skip(text, 0), False
    while position < len(text):
        letter = text[position]
        if letter.upper() not in _NUMBER_COUNTS or not (started or letter in "Mm"):
            return
        started, position = True, _skip(text, position + 1)
        if letter in "Zz":
            yield letter, []
            continue
        while True:
            numbers, position = _read_numbers(text, position, letter.upper())
            if numbers is None:
                return
            yield letter, numbers
            letter = {"M": "L", "m": "l"}.get(letter, letter)
            if position >= len(text) or text[position].isalpha():
                break


def _read_numbers(text: str, position: int, kind: str) -> tuple[list[float] | None, int]:
    numbers: list[float] = []
    for index in range(_NUMBER_COUNTS[kind]):
        pattern = _FLAG if kind == "A" and index in _ARC_FLAGS else _NUMBER
        match = pattern.match(text, position)
        if match is None or abs(float(match[0])) > LARGEST_NUMBER:
            return None, position
        numbers.append(float(match[0]))
        position = _skip(text, match.end())
    return numbers, position


def _skip(text: str, position: int) -> int:
    match = _SEPARATOR.match(text, position)
    return position if match is None else match.end()


class _Pen:
    """Follows path commands and leaves closed outlines in pixels."""

    def __init__(self, origin: complex, x_scale: float, y_scale: float) -> None:
        self.outlines: list[list[Points]] = []
        self._origin, self._x_scale, self._y_scale = origin, x_scale, y_scale
        self._at = self._start = self._last_control = 0j
        self._last_kind = "Z"

    def draw(self, command: str, numbers: list[float]) -> None:
        kind = command.upper()
        base = self._at if command.islower() else 0j
        if kind == "M":
            self._at = self._start = base + complex(numbers[0], numbers[1])
        elif kind == "Z":
            self._at = self._start
        else:
            if self._last_kind in "MZ":
                self.outlines.append([self._to_pixels(np.array([self._at]))])
            self._stroke(kind, base, numbers)
        self._last_kind = kind

    def _stroke(self, kind: str, base: complex, numbers: list[float]) -> None:
        if kind == "H":
            self._line(complex(numbers[0] + base.real, self._at.imag))
        elif kind == "V":
            self._line(complex(self._at.real, numbers[0] + base.imag))
        elif kind == "A":
            self._arc(numbers, base + complex(numbers[5], numbers[6]))
        else:
            points = [base + complex(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
            if kind == "L":
                self._line(points[0])
            elif kind in "CS":
                self._cubic(*(points if kind == "C" else [self._reflected("CS"), *points]))
            else:
                self._quadratic(*(points if kind == "Q" else [self._reflected("QT"), *points]))

    def _reflected(self, smooth_after: str) -> complex:
        return 2 * self._at - self._last_control if self._last_kind in smooth_after else self._at

    def _line(self, end: complex) -> None:
        self._add(np.array([end]), end)

    def _quadratic(self, control: complex, end: complex) -> None:
        self._cubic(self._at + (control - self._at) * 2 / 3, end + (control - end) * 2 / 3, end)
        self._last_control = control

    def _cubic(self, control: complex, second_control: complex, end: complex) -> None:
        points = self._to_pixels(np.array([self._at, control, second_control, end]))
        bend = float(np.abs(np.diff(points, 2)).max())
        pieces = _num_pieces(math.sqrt(0.75 * bend / FLATNESS_PX))
        self._add(cubic_at(np.array([self._at, control, second_control, end]), _fractions(pieces)), end)
        self._last_control = second_control

    def _arc(self, numbers: list[float], end: complex) -> None:
        x_radius, y_radius = abs(numbers[0]), abs(numbers[1])
        if min(x_radius, y_radius, abs(end - self._at)) < SMALLEST_LENGTH:
            return self._line(end)
        axis = cmath.rect(1, math.radians(numbers[2]))
        start_angle, turn, centre, grow = _arc_angles(
            _on_unit_circle(self._at / axis, x_radius, y_radius),
            _on_unit_circle(end / axis, x_radius, y_radius),
            large=numbers[3] == 1,
            sweep=numbers[4] == 1,
        )
        radius_px = grow * max(x_radius, y_radius) * max(self._x_scale, self._y_scale)
        pieces = _num_pieces(abs(turn) * math.sqrt(radius_px / (8 * FLATNESS_PX)))
        circle = centre + grow * np.exp(1j * (start_angle + turn * _fractions(pieces)))
        self._add((circle.real * x_radius + 1j * circle.imag * y_radius) * axis, end)

    def _add(self, points: Points, end: complex) -> None:
        points[-1] = end
        self.outlines[-1].append(self._to_pixels(points))
        self._at = end

    def _to_pixels(self, points: Points) -> Points:
        return self._origin + points.real * self._x_scale + 1j * (points.imag * self._y_scale)


def _num_pieces(wanted: float) -> int:
    return math.ceil(min(max(wanted, 1), MAX_CURVE_PIECES))


def _fractions(pieces: int) -> NDArray[np.float64]:
    return np.arange(1, pieces + 1) / pieces


def _on_unit_circle(point: complex, x_radius: float, y_radius: float) -> complex:
    return complex(point.real / x_radius, point.imag / y_radius)


def _arc_angles(start: complex, end: complex, large: bool, sweep: bool) -> tuple[float, float, complex, float]:
    """(first angle, turn, centre, radius) of a circle arc; the radius exceeds 1 when the ends lie too far apart."""
    half = (end - start) / 2
    radius = max(1.0, abs(half))
    offset = math.sqrt(max(0.0, (radius / abs(half)) ** 2 - 1))
    centre = (start + end) / 2 + (1j if large != sweep else -1j) * half * offset
    turn = cmath.phase((end - centre) / (start - centre))
    if sweep != (turn > 0):
        turn += 2 * math.pi if sweep else -2 * math.pi
    return cmath.phase(start - centre), turn, centre, radius
