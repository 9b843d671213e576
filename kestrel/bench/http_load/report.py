"""The page that shows one run or compares several: a single HTML file that loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kestrel.bench.http_load.charts import NUM_COLOURS, Chart, Line, chart_svg
from kestrel.bench.http_load.page_style import STYLE

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
        if (svg := chart_svg(chart))
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Kestrel HTTP benchmark</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Kestrel HTTP benchmark</h1>
<p class="note">{escape(_asked(runs))}</p>
<section><h2>At its best</h2>{_summary_table(runs)}</section>
<section><h2>As load grows</h2>{_legend(runs)}<div class="charts">{figures}</div></section>
{sections}
</main>
</body>
</html>
"""


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
    told = "not reached" if over is None else f"at {_load_text(over)}: {_reasons(over)}"
    cells = (
        _figure(best.get("throughput_rps"), 2),
        _load_text(best) if best else "—",
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


def _load_text(stage: dict[str, Any]) -> str:
    target = stage.get("target_rps")
    return f"{stage.get('concurrency_limit')} at once" if target is None else f"{target:g} req/s"


def _pair(summary: dict[str, Any] | None) -> str:
    values = [(summary or {}).get(share) for share in ("p50", "p95")]
    return " / ".join(_figure(None if value is None else value * 1000, 0) for value in values)


def _figure(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:,.{digits}f}"
