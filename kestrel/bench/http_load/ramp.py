"""The ramp: stage after stage with more load, until one is too much or the last is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kestrel.bench.http_load.outcomes import Outcome
from kestrel.bench.http_load.stages import ConstantConcurrency, ConstantRate, Sender, Stage
from kestrel.bench.http_load.statistics import Thresholds, stage_report
from kestrel.errors import KestrelError


class ServerUnusable(KestrelError):
    """The endpoint does not answer even one request at a time."""


class RampWatcher(Protocol):
    """Told of what goes on."""

    def begins(self, number: int, stage: Stage) -> None: ...

    def answered(self, outcome: Outcome) -> None: ...

    def ended(self, report: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Ramp:
    """From `start` to `most` in steps: clients at once, or with `by_rate` requests a second."""

    start: float
    step: float
    most: float
    by_rate: bool = False
    concurrency_limit: int = 0
    """With `by_rate`: requests that may be unanswered."""

    def stages(self) -> Iterator[Stage]:
        load = self.start
        while load <= self.most:
            if self.by_rate:
                yield ConstantRate(load, self.concurrency_limit)
            else:
                yield ConstantConcurrency(int(load))
            load += self.step


async def warm_up(sender: Sender, num_requests: int) -> None:
    """Raises ServerUnusable when an answer fails: a ramp against a wrong address measures refusals."""
    for _ in range(num_requests):
        outcome = await sender.send()
        if not outcome.ok:
            raise ServerUnusable(f"a request of the warm-up failed ({outcome.error}); check --url and the server")


async def run_ramp(
    stages: Iterator[Stage] | Sequence[Stage],
    sender: Sender,
    duration_s: float,
    thresholds: Thresholds,
    watcher: RampWatcher,
) -> list[dict[str, Any]]:
    """The reports of the stages; the first overloaded one is the last."""
    results: list[dict[str, Any]] = []
    for number, stage in enumerate(stages, start=1):
        watcher.begins(number, stage)
        run = await stage.run(sender, duration_s, watcher.answered)
        results.append(stage_report(stage, run, thresholds))
        watcher.ended(results[-1])
        if results[-1]["overloaded"]:
            break
    return results
