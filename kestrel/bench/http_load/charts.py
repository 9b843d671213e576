"""Line charts as SVG text: axes with round steps, one colour per run, solid for medians and dashed for p95."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 44
NUM_COLOURS = 8
"""Of the style sheet, as c0 to c7; later runs begin again with another marker."""


@dataclass(frozen=True)
class Line:
    """`points` are (load, value, what to say about it)."""

    name: str
    run: int
    points: Sequence[tuple[float, float, str]]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    y_label: str
    lines: Sequence[Line]
    x_label: str = "requests at once"
    limit: float | None = None
    """Drawn across when it lies within the values."""
    limit_name: str = ""
    least_top: float = field(default=0.0)
    """The y axis reaches at least this far."""


def chart_svg(chart: Chart) -> str:
    xs = [x for line in chart.lines for x, _, _ in line.points]
    ys = [y for line in chart.lines for _, y, _ in line.points]
    if not xs:
        return ""
    frame = _Frame(xs, max([*ys, chart.least_top]))
    parts = [*_axes(chart, frame), *_limit(chart, frame)]
    for line in chart.lines:
        parts += _line(line, frame)
    label = escape(f"{chart.title} against {chart.x_label}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


class _Frame:
    """From values to places."""

    def __init__(self, xs: Sequence[float], top: float) -> None:
        self.y_ticks = round_ticks(0.0, top)
        self.top = self.y_ticks[-1]
        self.low, self.high = min(xs), max(xs)
        if self.low == self.high:
            self.low, self.high = self.low - 1, self.high + 1
        self.x_ticks = x_ticks(sorted(set(xs)), self.low, self.high)

    def x(self, value: float) -> float:
        return LEFT + 10 + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT - 20)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """From `low` on in steps of 1, 2 or 5 times a power of ten, the last at or above `high`."""
    span = high - low if high > low else 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= span * (1 - 1e-9))
    num_steps = max(1, math.ceil((span - 1e-9 * step) / step))
    return [low + step * i for i in range(num_steps + 1)]


def x_ticks(loads: Sequence[float], low: float, high: float) -> list[float]:
    """The loads themselves when there is room for them, else round values."""
    if len(loads) <= 10:
        nearest = min((b - a for a, b in itertools.pairwise(loads)), default=high - low)
        if nearest / (high - low) >= 0.06:
            return list(loads)
    return [tick for tick in round_ticks(0.0, high, 8) if low <= tick <= high]


def number_text(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.10g}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def _axes(chart: Chart, frame: _Frame) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in frame.y_ticks:
        y = frame.y(tick)
        kind = "axis" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_rounded(tick)}</text>')
    for tick in frame.x_ticks:
        x = frame.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number_text(tick)}</text>'
        )
    middle, centre = (LEFT + right) / 2, (TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>'
        f'<text class="label" transform="translate(13 {centre}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _rounded(tick: float) -> str:
    return number_text(float(f"{tick:.6g}"))


def _limit(chart: Chart, frame: _Frame) -> list[str]:
    if chart.limit is None or not 0 < chart.limit <= frame.top:
        return []
    y = frame.y(chart.limit)
    return [
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="limit-name" x="{LEFT + 6}" y="{y - 5:.1f}">{escape(chart.limit_name)}</text>',
    ]


def _line(line: Line, frame: _Frame) -> list[str]:
    places = [(frame.x(x), frame.y(y), said) for x, y, said in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    colour, dashed = f"c{line.run % NUM_COLOURS}", " dashed" if line.dashed else ""
    parts = [f'<polyline class="line {colour}{dashed}" points="{path}"/>']
    for x, y, said in places:
        told = f"<title>{escape(line.name)}: {escape(said)}</title>"
        parts.append(f'<g class="mark {colour}{dashed}">{_marker(line.run // NUM_COLOURS, x, y)}{told}</g>')
    return parts


def _marker(kind: int, x: float, y: float) -> str:
    if kind % 2 == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
