"""One picture of PERFORMANCE.md: requests per second against batch size, ours, the peer's and the limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

WIDTH, HEIGHT = 880, 400
LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT, GAP = 56, 64, 370, 240, 64
FONT = 'font-family="system-ui, sans-serif"'
INK, FAINT = "#1f2328", "#d8dee4"
STEP = 20


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    colour: str
    points: Mapping[int, float]
    """Requests per second by batch size."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: tuple[Line, ...]


def throughput_svg(title: str, panels: tuple[Panel, Panel]) -> str:
    """Both panels on one scale."""
    sizes = sorted({size for panel in panels for line in panel.lines for size in line.points})
    most = max((value for panel in panels for line in panel.lines for value in line.points.values()), default=STEP)
    top = STEP * math.ceil(most / STEP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT} font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">{title}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (PANEL_WIDTH + GAP), sizes, top)
    parts += _legend(panels[0].lines)
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, left: float, sizes: list[int], top: float) -> Iterator[str]:
    def y_of(value: float) -> float:
        return TOP + PANEL_HEIGHT * (1 - value / top)

    def x_of(size: int) -> float:
        return left + PANEL_WIDTH * (sizes.index(size) + 0.5) / len(sizes)

    yield f'<text x="{left}" y="{TOP - 14}">{panel.title}</text>'
    for value in range(0, int(top) + 1, STEP):
        y = y_of(value)
        yield f'<path d="M{left} {y:.1f}h{PANEL_WIDTH}" stroke="{FAINT}"/>'
        yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{value}</text>'
    for size in sizes:
        yield f'<text x="{x_of(size):.1f}" y="{TOP + PANEL_HEIGHT + 20}" text-anchor="middle">{size}</text>'
    middle, below = left + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 42
    yield f'<text x="{middle:.1f}" y="{below}" text-anchor="middle" fill="#57606a">max batch size</text>'
    for line in panel.lines:
        places = [(x_of(size), y_of(value), value) for size, value in sorted(line.points.items())]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)
        dashes = ' stroke-dasharray="5 5"' if line.is_dashed else ""
        yield f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dashes}/>'
        if not line.is_dashed:
            for x, y, value in places:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"/>'
                label = f'x="{x:.1f}" y="{y - 10:.1f}" text-anchor="middle" font-size="12" fill="{line.colour}"'
                yield f"<text {label}>{value:.1f}</text>"


def _legend(lines: tuple[Line, ...]) -> Iterator[str]:
    x, y = LEFT, HEIGHT - 22
    for line in lines:
        dashes = ' stroke-dasharray="5 5"' if line.is_dashed else ""
        if len(line.points) > 1:
            yield f'<path d="M{x} {y - 4}h26" stroke="{line.colour}" stroke-width="2.5"{dashes}/>'
        if not line.is_dashed:
            yield f'<circle cx="{x + 13}" cy="{y - 4}" r="4" fill="{line.colour}"/>'
        yield f'<text x="{x + 34}" y="{y}">{line.name}</text>'
        x += 60 + 8 * len(line.name)
