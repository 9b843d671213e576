"""What a person sees while the ramp runs: the stage at work, and a line for each that is done."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kestrel.bench.http_load.outcomes import Outcome
from kestrel.bench.http_load.stages import Stage

HEADING = "stage  load        req/s   ok / all     errors   latency p50 / p95 ms   TTFT p50 / p95 ms    out tok/s"
REDRAW_S = 0.25


class RampDisplay:
    """A `RampWatcher` for a console; without a terminal only the lines appear."""

    def __init__(self, console: Console, duration_s: float) -> None:
        self._console = console
        self._duration_s = duration_s
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("warming up", total=None, counts="")
        self._clock: asyncio.Task[None] | None = None
        self._number = self._num_ok = self._num_failed = 0

    def __enter__(self) -> RampDisplay:
        self._progress.start()
        self._console.print(HEADING, style="dim", highlight=False, soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_clock()
        self._progress.stop()

    def begins(self, number: int, stage: Stage) -> None:
        self._number, self._num_ok, self._num_failed = number, 0, 0
        self._progress.reset(self._task, total=self._duration_s, description=f"{number:>2}  {load_text(stage)}")
        self._stop_clock()
        self._clock = asyncio.ensure_future(self._tick())

    def answered(self, outcome: Outcome) -> None:
        if outcome.ok:
            self._num_ok += 1
        else:
            self._num_failed += 1

    def ended(self, report: dict[str, Any]) -> None:
        self._stop_clock()
        style = "red" if report["overloaded"] else None
        self._console.print(stage_line(self._number, report), style=style, highlight=False, soft_wrap=True)
        for reason in report["overload_reasons"]:
            self._console.print(f"       overloaded: {reason}", style="red", highlight=False, soft_wrap=True)

    async def _tick(self) -> None:
        while True:
            counts = f"{self._num_ok} answered, {self._num_failed} failed"
            self._progress.update(self._task, counts=counts)
            await asyncio.sleep(REDRAW_S)
            self._progress.advance(self._task, REDRAW_S)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def load_text(stage: Stage) -> str:
    if stage.target_rps is not None:
        return f"{stage.target_rps:g} req/s"
    return f"{stage.concurrency_limit} at once"


def stage_line(number: int, report: dict[str, Any]) -> str:
    target = report["target_rps"]
    load = f"{report['concurrency_limit']} at once" if target is None else f"{target:g} req/s"
    counts = f"{report['requests_success']} / {report['requests_total']}"
    return (
        f"{number:>5}  {load:<11} {report['throughput_rps']:>5.2f}   {counts:<12} {report['error_rate']:>6.1%}"
        f"   {_pair(report['latency']):>20}   {_pair(report['ttft']):>17}   {report['tokens']['output_per_s']:>10.1f}"
    )


def _pair(summary: dict[str, float | None]) -> str:
    return " / ".join("—" if (value := summary[p]) is None else f"{value * 1000:.0f}" for p in ("p50", "p95"))
