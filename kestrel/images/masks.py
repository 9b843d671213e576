"""Masks and outlines: draw an SVG path into a mask, clean a mask, trace a mask back to an SVG path.

Path coordinates are relative to a bounding box (0..1 inside it); boxes are relative to the picture. Points are complex
numbers x + iy, so that turning and measuring are plain arithmetic.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import RequestError

Mask = NDArray[np.bool_]
Points = NDArray[np.complex128]

BOX_FIELDS = ("x_min", "y_min", "x_max", "y_max")

SCANLINES_PER_ROW = 4
FLATNESS_PX = 0.05
MAX_CURVE_PIECES = 1000
LARGEST_NUMBER = 1e9
SMALLEST_LENGTH = 1e-9

SPECK_AREA_PX = 2
TINY_LOOP_LENGTH = 12
TOLERANCE_PX = (0.42, 0.65)
TOLERANCE_PER_THICKNESS = 0.01
JOINT_REACH = 128
MAX_FIT_ROUNDS = 3
HOPELESS_ERROR = 4.0
CORNER_TURN = math.radians(40)
CORNER_REACH_PX = 1.0
CORNER_GAP = 2
SQUARE_RUN = 3
ARM_LENGTHS = (32, 16, 8, 5, 3)


def rasterise_path(svg_path: str, bbox: Mapping[str, float], height: int, width: int, supersample: int = 2) -> Mask:
    """The picture-sized mask a path covers (nonzero rule), at least half of each pixel.

    As SVG demands, a malformed path counts up to its first mistake.
    """
    for name, value in (("height", height), ("width", width), ("supersample", supersample)):
        if value < 1:
            raise RequestError(name, f"must be at least 1 (got {value})")
    x_min, y_min, x_max, y_max = box_values(bbox)
    pen = _Pen(complex(x_min * width, y_min * height), (x_max - x_min) * width, (y_max - y_min) * height)
    for command, numbers in _read_path(svg_path):
        pen.draw(command, numbers)
    return _coverage(pen.outlines, height, width, supersample * SCANLINES_PER_ROW) >= 0.5


def box_values(bbox: Mapping[str, float]) -> tuple[float, float, float, float]:
    """(x_min, y_min, x_max, y_max), checked."""
    missing = [name for name in BOX_FIELDS if name not in bbox]
    if missing:
        raise RequestError("bbox", f"lacks {', '.join(missing)}; give {', '.join(BOX_FIELDS)}")
    x_min, y_min, x_max, y_max = (float(bbox[name]) for name in BOX_FIELDS)
    if not (0 <= x_min <= x_max <= 1 and 0 <= y_min <= y_max <= 1):
        raise RequestError("bbox", f"needs numbers from 0 to 1 with min <= max (got {dict(bbox)})")
    return x_min, y_min, x_max, y_max


def clean_mask(mask: Mask, min_area_fraction: float = 0.0015) -> Mask:
    """Fill holes, drop islands smaller than a share of the picture (8-connected), then close 3x3 gaps.

    Any small background region counts as a hole, at the border too.
    """
    _check_mask(mask)
    min_area = min_area_fraction * mask.size
    filled = mask | _small_regions(~mask, min_area)
    return _close(filled & ~_small_regions(filled, min_area))


def trace_mask(mask: Mask) -> tuple[str, dict[str, float]] | None:
    """Outline of a mask as (path, box of its pixels); None when it holds nothing larger than a speck.

    Holes run against their outer outline, so both fill rules agree. Letters used: M L C Z.
    """
    _check_mask(mask)
    if not mask.any():
        return None
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    scale = (right - left, bottom - top)
    items: list[str] = []
    for loop in _boundary_loops(mask[top:bottom, left:right]):
        if abs(_signed_area(loop)) > SPECK_AREA_PX:
            items += _path_items(_outline_pieces(loop), scale)
    if not items:
        return None
    height, width = mask.shape
    box = {"x_min": left / width, "y_min": top / height, "x_max": right / width, "y_max": bottom / height}
    return " ".join(items), box


def _check_mask(mask: Mask) -> None:
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise RequestError("mask", f"must be [height, width] bool (got {mask.shape} {mask.dtype})")


# Path reading

_NUMBER_COUNTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_ARC_FLAGS = (3, 4)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_FLAG = re.compile(r"[01]")
_SEPARATOR = re.compile(r"\s*,?\s*")


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
        self._add(_cubic_at(np.array([self._at, control, second_control, end]), _fractions(pieces)), end)
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


def _cubic_at(bezier: Points, t: NDArray[np.float64]) -> Points:
    a, b, c, d = _cubic_weights(t)
    return bezier[0] * a + bezier[1] * b + bezier[2] * c + bezier[3] * d


def _cubic_weights(t: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    s = 1 - t
    return s * s * s, 3 * t * s * s, 3 * t * t * s, t * t * t


# Filling


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


# Cleaning


def _small_regions(mask: Mask, min_area: float) -> Mask:
    """Pixels of the 8-connected regions with fewer pixels than `min_area`."""
    rows, starts, ends = _runs(mask)
    labels = _label_runs(rows, starts, ends, mask.shape[1] + 2)
    areas = np.bincount(labels, weights=ends - starts, minlength=len(labels))
    small = areas[labels] < min_area
    steps = np.zeros((mask.shape[0], mask.shape[1] + 1), np.int8)
    steps[rows[small], starts[small]] = 1
    steps[rows[small], ends[small]] = -1
    return np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1].astype(np.bool_)


def _runs(mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(row, first column, column after the last) of every horizontal run of set pixels, in reading order."""
    steps = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(steps == 1)
    return rows, starts, np.nonzero(steps == -1)[1]


def _label_runs(
    rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], stride: int
) -> NDArray[np.int64]:
    """For every run the lowest run index of its 8-connected region."""
    above = (rows - 1) * stride
    first = np.searchsorted(rows * stride + ends, above + starts)
    counts = np.maximum(np.searchsorted(rows * stride + starts, above + ends, side="right") - first, 0)
    lower = np.repeat(np.arange(len(rows)), counts)
    upper = np.arange(len(lower)) - np.repeat(np.cumsum(counts) - counts, counts) + first[lower]
    labels = np.arange(len(rows))
    while True:
        low, high = np.minimum(labels[lower], labels[upper]), np.maximum(labels[lower], labels[upper])
        if np.array_equal(low, high):
            return labels
        np.minimum.at(labels, high, low)
        while not np.array_equal(labels, labels[labels]):
            labels = labels[labels]


def _close(mask: Mask) -> Mask:
    """3x3 dilation, then 3x3 erosion; what lies beyond the border never counts against a pixel."""
    return ~_dilate(~_dilate(mask))


def _dilate(mask: Mask) -> Mask:
    wide = np.pad(mask, 1)
    tall = wide[:, :-2] | wide[:, 1:-1] | wide[:, 2:]
    return tall[:-2] | tall[1:-1] | tall[2:]


# Tracing


def _boundary_loops(mask: Mask) -> Iterator[Points]:
    """Pixel corners along every boundary, set pixels on the right hand; diagonal neighbours stay joined."""
    vertices, directions, stride = _boundary_edges(mask)
    keys = vertices * 4 + directions
    order = np.argsort(keys)
    keys, vertices, directions = keys[order], vertices[order], directions[order]
    ends = vertices + np.array([1, stride, -1, -stride])[directions]
    following = np.zeros(len(keys), np.int64)
    for turn in (1, 0, -1):
        wanted = ends * 4 + (directions + turn) % 4
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        following = np.where(keys[place] == wanted, place, following)
    corners = vertices % stride + 1j * (vertices // stride)
    successor, seen = following.tolist(), bytearray(len(keys))
    for first in range(len(successor)):
        loop: list[int] = []
        edge = first
        while not seen[edge]:
            seen[edge] = 1
            loop.append(edge)
            edge = successor[edge]
        if loop:
            yield corners[loop]


def _boundary_edges(mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """(start corners, directions, corners per row) of the sides between set and unset pixels.

    Directions: 0 right, 1 down, 2 left, 3 up.
    """
    stride = mask.shape[1] + 1
    unset = ~np.pad(mask, 1)
    neighbours = (unset[:-2, 1:-1], unset[1:-1, 2:], unset[2:, 1:-1], unset[1:-1, :-2])
    corners = ((0, 0), (0, 1), (1, 1), (1, 0))
    vertices, directions = [], []
    for direction, (neighbour, (down, right)) in enumerate(zip(neighbours, corners, strict=True)):
        rows, columns = np.nonzero(mask & neighbour)
        vertices.append((rows + down) * stride + columns + right)
        directions.append(np.full(len(rows), direction))
    return np.concatenate(vertices), np.concatenate(directions), stride


def _signed_area(loop: Points) -> float:
    return float((np.conj(loop) * np.roll(loop, -1)).imag.sum() / 2)


def _outline_pieces(loop: Points) -> list[Points]:
    """A closed chain of lines (2 points) and cubic curves (4 points) along a loop of pixel corners.

    The chain follows the middles of the pixel sides: staying within half a pixel of them keeps every pixel's side.
    """
    if len(loop) <= TINY_LOOP_LENGTH:
        turns = loop[np.roll(loop, -1) - loop != loop - np.roll(loop, 1)]
        return [np.array(pair) for pair in zip(turns, np.roll(turns, -1), strict=True)]
    middles = (loop + np.roll(loop, -1)) / 2
    tolerance = _tolerance(loop)
    corners = _find_corners(middles, loop, tolerance)
    pieces: list[Points] = []
    if not corners:
        half = len(middles) // 2
        place, along = _joint(np.roll(middles, half), half, tolerance)
        _fit_curves(np.concatenate([[place], middles[1:], [place]]), along, -along, tolerance, pieces)
    for (index, place), (next_index, next_place) in zip(corners, corners[1:] + corners[:1], strict=True):
        count = (next_index - index - 1) % len(middles)
        between = middles[(index + 1 + np.arange(count)) % len(middles)]
        _fit_span(np.concatenate([[place], between, [next_place]]), tolerance, pieces)
    return pieces


def _tolerance(loop: Points) -> float:
    """Pixels an outline may stray from the middles of the pixel sides: less where the shape is thin."""
    thickness = 2 * abs(_signed_area(loop)) / len(loop)
    tightest, loosest = TOLERANCE_PX
    return min(loosest, tightest + TOLERANCE_PER_THICKNESS * thickness)


def _find_corners(middles: Points, loop: Points, tolerance: float) -> list[tuple[int, complex]]:
    """(index of the side, place) of every corner: where the outline arrives and leaves in different directions."""
    square = _square_corners(loop)
    corners = [(int(index), complex(loop[index])) for index in square]
    indices = _coarse_polygon(middles, tolerance)
    if len(square):
        apart = np.abs(indices[:, None] - square)
        indices = indices[np.minimum(apart, len(loop) - apart).min(axis=1) > CORNER_GAP]
    return sorted(corners + _bent_corners(indices, middles, loop, tolerance), key=lambda corner: corner[0])


def _square_corners(loop: Points) -> NDArray[np.int64]:
    """Indices where two straight runs of pixel sides meet, each too long to be a step of a slanted line."""
    steps = np.roll(loop, -1) - loop
    turns = np.flatnonzero(steps != np.roll(steps, 1))
    runs = np.diff(turns, append=turns[0] + len(loop))
    return turns[np.minimum(runs, np.roll(runs, 1)) >= SQUARE_RUN]


def _bent_corners(
    indices: NDArray[np.int64], middles: Points, loop: Points, tolerance: float
) -> list[tuple[int, complex]]:
    """Those candidate sides at which smooth arms on both sides point in different directions."""
    reach = min(ARM_LENGTHS[0], len(middles) // 2)
    around = middles[(indices[:, None] + np.arange(-reach, reach + 1)) % len(middles)]
    back, towards_back, back_length = _arms(around[:, :reach][:, ::-1], tolerance)
    front, towards_front, front_length = _arms(around[:, reach + 1 :], tolerance)
    turns = np.pi - np.abs(np.angle(towards_front * np.conj(towards_back)))
    sharp = turns > CORNER_TURN * (1 + 4 / np.minimum(back_length, front_length))
    corners: list[tuple[int, complex]] = []
    last_turn = 0.0
    for row in np.flatnonzero(sharp):
        index = int(indices[row])
        if corners and index - corners[-1][0] <= CORNER_GAP:
            if turns[row] <= last_turn:
                continue
            corners.pop()
        place = _crossing(back[row], towards_back[row], front[row], towards_front[row])
        if place is None or abs(place - middles[index]) > CORNER_REACH_PX:
            ends, spots = around[row, [0, -1]], loop[[index, (index + 1) % len(loop)]]
            place = complex(max(spots, key=lambda spot: np.abs(spot - ends).sum()))
        corners.append((index, place))
        last_turn = float(turns[row])
    return corners


def _arms(points: Points, tolerance: float) -> tuple[Points, Points, NDArray[np.int64]]:
    """Per row: place and unit direction at its start, and the number of leading points one parabola describes."""
    steps = np.cumsum(np.abs(np.diff(points, axis=1, prepend=points[:, :1])), axis=1)
    places, directions = np.empty((2, len(points)), np.complex128)
    lengths = np.empty(len(points), np.int64)
    rows = np.arange(len(points))
    for length in (length for length in ARM_LENGTHS if length <= points.shape[1]):
        window, t = points[rows, :length], steps[rows, :length] / length
        basis = np.stack([np.ones_like(t), t, t * t], axis=2)
        turned = basis.transpose(0, 2, 1)
        fit = np.linalg.solve(turned @ basis, turned @ window[:, :, None])
        places[rows], directions[rows], lengths[rows] = fit[:, 0, 0], fit[:, 1, 0], length
        rows = rows[np.abs(basis @ fit - window[:, :, None]).max(axis=(1, 2)) > tolerance]
    return places, directions / np.maximum(np.abs(directions), 1e-12), lengths


def _crossing(a: complex, along_a: complex, b: complex, along_b: complex) -> complex | None:
    denominator = (along_a.conjugate() * along_b).imag
    if abs(denominator) < 0.2:
        return None
    return a + along_a * ((b - a).conjugate() * along_b).imag / denominator


def _coarse_polygon(middles: Points, tolerance: float) -> NDArray[np.int64]:
    """Sorted indices of a polygon that stays within the tolerance (Douglas-Peucker on the closed loop)."""
    start = int(np.abs(middles - middles.mean()).argmax())
    ring = np.append(np.roll(middles, -start), middles[start])
    far = int(np.abs(ring - ring[0]).argmax())
    kept, spans = {0, far}, [(0, far), (far, len(middles))]
    while spans:
        low, high = spans.pop()
        if high - low < 2:
            continue
        distance = _distance_to_line(ring[low : high + 1])
        peak = int(distance.argmax())
        if distance[peak] > tolerance:
            kept.add(low + peak)
            spans += [(low, low + peak), (low + peak, high)]
    return np.sort((np.array(list(kept)) + start) % len(middles))


def _distance_to_line(points: Points) -> NDArray[np.float64]:
    """Distance of every point to the line from the first to the last."""
    along = points[-1] - points[0]
    if along == 0:
        return np.abs(points - points[0])
    return np.abs(((points - points[0]) * np.conj(along)).imag) / abs(along) / _axis_share(along)


def _fit_span(points: Points, tolerance: float, pieces: list[Points]) -> None:
    """A line or curves from corner to corner."""
    if len(points) <= 2 or _distance_to_line(points).max() <= tolerance:
        pieces.append(points[[0, -1]])
    else:
        _, leave = _joint(points, 0, tolerance)
        _, arrive = _joint(points, len(points) - 1, tolerance)
        _fit_curves(points, leave, -arrive, tolerance, pieces)


def _fit_curves(points: Points, tangent: complex, end_tangent: complex, tolerance: float, pieces: list[Points]) -> None:
    """Cubic curves through points, smoothly joined; where one misses by too much, two take its place."""
    todo = [(points, tangent, end_tangent)]
    while todo:
        span, leave, arrive = todo.pop()
        if len(span) <= 4:
            pieces += [span[index : index + 2] for index in range(len(span) - 1)]
            continue
        bezier, errors = _fit_cubic(span, leave, arrive, tolerance)
        if errors.max() <= tolerance:
            pieces.append(bezier)
            continue
        margin = max(1, len(span) // 4)
        split = int(errors[margin:-margin].argmax()) + margin
        place, along = _joint(span, split, tolerance)
        left, right = span[: split + 1].copy(), span[split:].copy()
        left[-1] = right[0] = place
        todo += [(right, along, arrive), (left, leave, -along)]


def _joint(points: Points, index: int, tolerance: float) -> tuple[complex, complex]:
    """Place and unit direction of the outline at a point, from as many points around as one parabola describes."""
    steps = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(points)))])
    reach = min(len(points), JOINT_REACH)
    while True:
        low, high = max(0, index - reach), min(len(points), index + reach + 1)
        window = points[low:high]
        t = (steps[low:high] - steps[index]) / reach
        basis = np.stack([np.ones_like(t), t, t * t][: min(3, len(window))], axis=1)
        coefficients = np.linalg.lstsq(basis, window, rcond=None)[0]
        if reach <= 2 or np.abs(basis @ coefficients - window).max() <= tolerance:
            place, direction = coefficients[:2]
            return complex(place), complex(direction) / max(abs(direction), 1e-12)
        reach //= 2


def _fit_cubic(points: Points, leave: complex, arrive: complex, tolerance: float) -> tuple[Points, NDArray[np.float64]]:
    """Least-squares cubic with given end directions, and its distance from every point."""
    lengths = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(points)))])
    t = lengths / lengths[-1]
    bezier = _solve_cubic(points, t, leave, arrive, lengths[-1])
    for _ in range(MAX_FIT_ROUNDS):
        t, errors = _closest(bezier, points, t)
        if errors.max() > HOPELESS_ERROR * tolerance:
            return bezier, errors
        bezier = _solve_cubic(points, t, leave, arrive, lengths[-1])
    return bezier, _closest(bezier, points, t)[1]


def _solve_cubic(points: Points, t: NDArray[np.float64], leave: complex, arrive: complex, length: float) -> Points:
    first, last = points[0], points[-1]
    start_weight, near, far, end_weight = _cubic_weights(t)
    rest = points - first * (start_weight + near) - last * (far + end_weight)
    a, b, c = near @ near, (near @ far) * (leave.conjugate() * arrive).real, far @ far
    u, v = near @ (leave.conjugate() * rest).real, far @ (arrive.conjugate() * rest).real
    near_handle = far_handle = abs(last - first) / 3
    determinant = a * c - b * b
    if determinant > 1e-9:
        solved = (u * c - v * b) / determinant, (v * a - u * b) / determinant
        if min(solved) > 0 and max(solved) < length:
            near_handle, far_handle = solved
    return np.array([first, first + leave * near_handle, last + arrive * far_handle, last])


def _closest(bezier: Points, points: Points, t: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One Newton step towards the nearest place on the curve for every point, and the distance there."""
    s = 1 - t
    first, second, third = 3 * np.diff(bezier)
    offset = _cubic_at(bezier, t) - points
    velocity = first * (s * s) + second * (2 * s * t) + third * (t * t)
    bend = 2 * ((second - first) * s + (third - second) * t)
    curvature = (np.conj(velocity) * velocity + np.conj(offset) * bend).real
    step = np.where(curvature > 1e-9, (np.conj(offset) * velocity).real / np.maximum(curvature, 1e-9), 0.0)
    t = np.clip(t - step, 0.0, 1.0)
    return t, np.abs(_cubic_at(bezier, t) - points) / _axis_share(velocity)


def _axis_share(direction: Points) -> NDArray[np.float64]:
    """1 along an axis down to 0.71 on a diagonal, where a pixel changes sides sooner."""
    larger = np.maximum(np.abs(direction.real), np.abs(direction.imag))
    return np.maximum(larger / np.maximum(np.abs(direction), 1e-12), math.sqrt(0.5))


def _path_items(pieces: list[Points], scale: tuple[int, int]) -> list[str]:
    items = ["M", *_coordinates(pieces[0][:1], scale)]
    # Z itself draws a last straight line.
    for piece in pieces if len(pieces[-1]) > 2 else pieces[:-1]:
        items += ["L" if len(piece) == 2 else "C", *_coordinates(piece[1:], scale)]
    return [*items, "Z"]


def _coordinates(points: Points, scale: tuple[int, int]) -> list[str]:
    return [
        f"{round(float(value), 3) + 0.0:.3f}".rstrip("0").rstrip(".")
        for point in points
        for value in (point.real / scale[0], point.imag / scale[1])
    ]
