"""The page that shows one run or compares several: a single HTML file that loads nothing from anywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

TIMES = (
    ("latency", "Latency", "latency_threshold_ms"),
    ("ttft", "Time to first token", "ttft_threshold_ms"),
    ("processing_latency", "Processing, as the server measures it", None),
    ("decode_latency", "Decode", None),
)
COLUMNS = (
    "Target RPS",
    "Observed RPS",
    "Concurrency",
    "Success / total",
    "Error %",
    "Latency p50 / p95 ms",
    "TTFT p50 / p95 ms",
    "Decode p50 / p95 ms",
    "Processing p50 / p95 ms",
    "Input tok/s",
    "Output tok/s",
    "Overloaded",
)


@dataclass(frozen=True)
class Run:
    """One JSON file."""

    name: str
    data: dict[str, Any]

    @property
    def stages(self) -> list[dict[str, Any]]:
        return self.data.get("results") or []

    @property
    def by_rate(self) -> bool:
        return any(stage.get("target_rps") is not None for stage in self.stages)


def render(runs: Sequence[Run]) -> str:
    by_rate = all(run.by_rate for run in runs)
    sections = "".join(_section(number, run) for number, run in enumerate(runs))
    figures = "".join(
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg}</figure>"
        for chart in _charts(runs, by_rate)
        if (svg := _chart_svg(chart))
    )
    return Template(_beside("page.html")).substitute(
        style=_beside("page.css"),
        asked=escape(_asked(runs)),
        summary=_summary_table(runs),
        legend=_legend(runs),
        figures=figures,
        sections=sections,
    )


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _asked(runs: Sequence[Run]) -> str:
    """What all runs asked; when they differ, each says it for itself."""
    asked = {_question(run.data) for run in runs}
    return asked.pop() if len(asked) == 1 else f"{len(runs)} runs side by side"


def _question(data: dict[str, Any]) -> str:
    images = data.get("images")
    parts = [
        str(data.get("url", "")),
        f"“{data['prompt']}”" if data.get("prompt") else "",
        "" if images is None else f"{len(images)} picture{'s' * (len(images) != 1)}",
        f"at most {data['max_new_tokens']} tokens" if data.get("max_new_tokens") else "",
        "streamed" if data.get("stream") else "",
    ]
    return ", ".join(part for part in parts if part)


# ---------------------------------------------------------------------- charts


def _charts(runs: Sequence[Run], by_rate: bool) -> list[Chart]:
    x_label = "requests a second asked for" if by_rate else "requests at once"
    charts = [
        Chart("Throughput", "requests/s", _plain_lines(runs, by_rate, "throughput_rps", "requests/s"), x_label),
        Chart("Output tokens", "tokens/s", _plain_lines(runs, by_rate, "output_per_s", "tokens/s"), x_label),
    ]
    for key, title, threshold in TIMES:
        lines = [
            line
            for number, run in enumerate(runs)
            for share in ("p50", "p95")
            if (line := _time_line(number, run, by_rate, key, share)).points
        ]
        limits = {run.data.get(threshold) for run in runs} if threshold else {None}
        limit = limits.pop() if len(limits) == 1 else None
        charts.append(Chart(title, "ms", lines, x_label, limit, f"limit for p95: {limit:g} ms" if limit else ""))
    if any(stage.get("error_rate") for run in runs for stage in run.stages):
        errors = _plain_lines(runs, by_rate, "error_rate", "% errors")
        charts.append(Chart("Errors", "%", errors, x_label, least_top=5.0))
    return charts


def _plain_lines(runs: Sequence[Run], by_rate: bool, key: str, unit: str) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        points = []
        for stage in run.stages:
            value = {**stage, **(stage.get("tokens") or {})}.get(key)
            if value is not None:
                value = value * 100 if key == "error_rate" else value
                points.append((_load(stage, by_rate), value, f"{value:.4g} {unit} at {_load(stage, by_rate):g}"))
        lines.append(Line(run.name, number, points))
    return lines


def _time_line(number: int, run: Run, by_rate: bool, key: str, share: str) -> Line:
    points = []
    for stage in run.stages:
        seconds = (stage.get(key) or {}).get(share)
        if seconds is not None:
            said = f"{share} {seconds * 1000:.4g} ms at {_load(stage, by_rate):g}"
            points.append((_load(stage, by_rate), seconds * 1000, said))
    return Line(run.name, number, points, dashed=share == "p95")


def _load(stage: dict[str, Any], by_rate: bool) -> float:
    return float(stage["target_rps"] if by_rate else stage["concurrency_limit"])


def _legend(runs: Sequence[Run]) -> str:
    keys = "".join(f"<li>{_swatch(number)}{escape(run.name)}</li>" for number, run in enumerate(runs))
    strokes = "".join(
        f'<li><svg class="stroke" viewBox="0 0 28 8" aria-hidden="true"><line class="sample{kind}" x1="1" x2="27" '
        f'y1="4" y2="4"/></svg>{name}</li>'
        for kind, name in (("", "p50"), (" dashed", "p95"))
    )
    return f'<ul class="legend">{keys}{strokes}</ul>'


def _swatch(number: int) -> str:
    return f'<span class="swatch c{number % NUM_COLOURS}"></span>'


# ---------------------------------------------------------------------- tables


def _summary_table(runs: Sequence[Run]) -> str:
    heads = ("Run", "Most req/s", "at load", "Latency p50 / p95 ms", "TTFT p50 / p95 ms", "Output tok/s", "Overload")
    rows = "".join(_summary_row(number, run) for number, run in enumerate(runs))
    return _table(heads, rows)


def _summary_row(number: int, run: Run) -> str:
    well = [stage for stage in run.stages if not stage.get("overloaded")]
    best = max(well or run.stages, key=lambda stage: stage.get("throughput_rps") or 0.0, default={})
    over = next((stage for stage in run.stages if stage.get("overloaded")), None)
    told = "not reached" if over is None else f"at {load_text(over)}: {_reasons(over)}"
    cells = (
        _figure(best.get("throughput_rps"), 2),
        load_text(best) if best else "—",
        _pair(best.get("latency")),
        _pair(best.get("ttft")),
        _figure((best.get("tokens") or {}).get("output_per_s"), 1),
    )
    body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    name = f'<th scope="row">{_swatch(number)}{escape(run.name)}</th>'
    return f'<tr>{name}{body}<td class="words">{escape(told)}</td></tr>'


def _section(number: int, run: Run) -> str:
    skipped = 0 if run.by_rate else 1
    rows = "".join(_stage_row(stage, skipped) for stage in run.stages)
    title = f"<h2>{_swatch(number)}{escape(run.name)}</h2>"
    notes = "".join(f'<p class="note">{escape(text)}</p>' for text in (_question(run.data), _parameters(run.data)))
    return f'<section>{title}{notes}<div class="stages">{_table(COLUMNS[skipped:], rows)}</div></section>'


def _stage_row(stage: dict[str, Any], skipped: int) -> str:
    """The cells of a stage without the first ones, which say nothing in this run."""
    tokens = stage.get("tokens") or {}
    cells = (
        _figure(stage.get("target_rps"), 1),
        _figure(stage.get("throughput_rps"), 2),
        str(stage.get("concurrency_limit", "—")),
        f"{stage.get('requests_success')} / {stage.get('requests_total')}",
        _figure((stage.get("error_rate") or 0.0) * 100, 1),
        *(_pair(stage.get(key)) for key in ("latency", "ttft", "decode_latency", "processing_latency")),
        _figure(tokens.get("input_per_s"), 1),
        _figure(tokens.get("output_per_s"), 1),
    )
    body = "".join(f"<td>{escape(cell)}</td>" for cell in cells[skipped:])
    words = _reasons(stage) if stage.get("overloaded") else "no"
    kind = ' class="overloaded"' if stage.get("overloaded") else ""
    return f'<tr{kind}>{body}<td class="words">{escape(words)}</td></tr>'


def _table(heads: Sequence[str], rows: str) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _parameters(data: dict[str, Any]) -> str:
    by_rate = data.get("start_rps") is not None
    kind = "rps" if by_rate else "concurrency"
    names = {
        "stage duration": ("stage_duration_s", " s"),
        f"start {kind}": (f"start_{kind}", ""),
        "step": (f"{kind}_step", ""),
        "most": (f"max_{kind}", ""),
        "latency limit": ("latency_threshold_ms", " ms"),
        "TTFT limit": ("ttft_threshold_ms", " ms"),
    }
    told = [f"{name} {data[key]:g}{unit}" for name, (key, unit) in names.items() if data.get(key) is not None]
    if data.get("error_threshold") is not None:
        told.append(f"error limit {data['error_threshold']:.1%}")
    when = f"{data['date']}; " if data.get("date") else ""
    return when + ", ".join(told)


def _reasons(stage: dict[str, Any]) -> str:
    return "; ".join(stage.get("overload_reasons") or []) or "yes"


def load_text(stage: dict[str, Any]) -> str:
    target = stage.get("target_rps")
    return f"{stage.get('concurrency_limit')} at once" if target is None else f"{target:g} req/s"


def _pair(summary: dict[str, Any] | None) -> str:
    values = [(summary or {}).get(share) for share in ("p50", "p95")]
    return " / ".join(_figure(None if value is None else value * 1000, 0) for value in values)


def _figure(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:,.{digits}f}"


# ---------------------------------------------------------------------- line charts as SVG
# Axes with round steps, one colour per run, solid for medians and dashed for p95.


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


def _chart_svg(chart: Chart) -> str:
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
        self.x_ticks = _x_ticks(sorted(set(xs)), self.low, self.high)

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


def _x_ticks(loads: Sequence[float], low: float, high: float) -> list[float]:
    """The loads themselves when there is room for them, else round values."""
    if len(loads) <= 10:
        nearest = min((b - a for a, b in itertools.pairwise(loads)), default=high - low)
        if nearest / (high - low) >= 0.06:
            return list(loads)
    return [tick for tick in round_ticks(0.0, high, 8) if low <= tick <= high]


def _number_text(value: float) -> str:
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
            f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_number_text(tick)}</text>'
        )
    middle, centre = (LEFT + right) / 2, (TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>'
        f'<text class="label" transform="translate(13 {centre}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _rounded(tick: float) -> str:
    return _number_text(float(f"{tick:.6g}"))


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
