"""The ramp: stage after stage with more load, until one is too much or the last is done.

A stage is a number of clients at the same time, or a number of requests a second, for a while. It is a window in a
longer life: requests are in flight when it ends. Each answered request counts with the share of its time that lies in
the window, so that neither those cut off nor the quiet end distort the rates.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kestrel.bench.http_load.client import BROKEN, Connection, Outcome, Target, outcome_of
from kestrel.errors import KestrelError


class Sender:
    """Sends the bodies in turn, each within a time limit; connections are kept for later requests."""

    def __init__(self, target: Target, bodies: Sequence[bytes], timeout_s: float) -> None:
        self._target = target
        self._bodies: Iterator[bytes] = itertools.cycle(bodies)
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def send(self) -> Outcome:
        connection = self._idle.pop() if self._idle else Connection(self._target)
        started_s = time.perf_counter()
        try:
            exchange = await asyncio.wait_for(connection.post(next(self._bodies)), self._timeout_s)
        except asyncio.TimeoutError:
            return Outcome(started_s, time.perf_counter(), f"no answer in {self._timeout_s:g} s")
        except BROKEN as error:
            return Outcome(started_s, time.perf_counter(), type(error).__name__)
        self._idle.append(connection)
        return outcome_of(exchange)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


@dataclass
class StageRun:
    """What happened in a stage; those in flight when its time was over were waited for."""

    began_s: float
    duration_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    unsent: int = 0
    """Requests that were due but had no free client."""


OnOutcome = Callable[[Outcome], None]


class Stage(Protocol):
    """How load is made."""

    @property
    def concurrency_limit(self) -> int: ...

    @property
    def target_rps(self) -> float | None: ...

    async def run(self, sender: Sender, duration_s: float, on_outcome: OnOutcome) -> StageRun: ...


@dataclass(frozen=True)
class ConstantConcurrency:
    """A closed loop: so many clients, each of which asks again when it has its answer."""

    concurrency_limit: int
    target_rps: float | None = None

    async def run(self, sender: Sender, duration_s: float, on_outcome: OnOutcome) -> StageRun:
        stage = StageRun(time.perf_counter(), duration_s)
        end_s = stage.began_s + duration_s

        async def client() -> None:
            while time.perf_counter() < end_s:
                outcome = await sender.send()
                stage.outcomes.append(outcome)
                on_outcome(outcome)
                if not outcome.ok:
                    await asyncio.sleep(BACK_OFF_S)

        await asyncio.gather(*(client() for _ in range(self.concurrency_limit)))
        return stage


@dataclass(frozen=True)
class ConstantRate:
    """An open loop: requests are due at a steady rate, whether or not earlier ones are answered."""

    target_rps: float | None
    concurrency_limit: int
    """Requests that may be unanswered; what is due beyond that is counted and not sent."""

    async def run(self, sender: Sender, duration_s: float, on_outcome: OnOutcome) -> StageRun:
        assert self.target_rps is not None
        stage = StageRun(time.perf_counter(), duration_s)
        unanswered: set[asyncio.Task[None]] = set()

        async def send() -> None:
            outcome = await sender.send()
            stage.outcomes.append(outcome)
            on_outcome(outcome)

        for number in range(max(1, round(self.target_rps * duration_s))):
            due_s = stage.began_s + number / self.target_rps
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if len(unanswered) >= self.concurrency_limit:
                stage.unsent += 1
                continue
            task = asyncio.create_task(send())
            unanswered.add(task)
            task.add_done_callback(unanswered.discard)
        await asyncio.gather(*unanswered)
        return stage


BACK_OFF_S = 0.05
"""How long a refused client waits before it asks again, so that refusals do not become the load."""


# ---------------------------------------------------------------------- statistics of a stage


@dataclass(frozen=True)
class Thresholds:
    """Beyond one of them a stage is overloaded."""

    latency_ms: float
    ttft_ms: float
    error_rate: float

    def reasons(self, stage: dict[str, Any]) -> list[str]:
        """Why a stage is overloaded, in words; empty when it is not."""
        found: list[str] = []
        if stage["error_rate"] > self.error_rate:
            found.append(f"error rate {stage['error_rate']:.1%} > {self.error_rate:.1%}")
        for name, key, limit_ms in (("latency", "latency", self.latency_ms), ("TTFT", "ttft", self.ttft_ms)):
            p95_s = stage[key]["p95"]
            if p95_s is not None and p95_s * 1000 > limit_ms:
                found.append(f"p95 {name} {p95_s * 1000:.0f} ms > {limit_ms:g} ms")
        return found


def stage_report(stage: Stage, run: StageRun, thresholds: Thresholds) -> dict[str, Any]:
    """One entry of `results`. Times are in seconds."""
    answered = [outcome for outcome in run.outcomes if outcome.ok]
    failed = [outcome for outcome in run.outcomes if not outcome.ok]
    shares = [_share_within(outcome, run) for outcome in answered]
    total = len(run.outcomes) + run.unsent
    errors = Counter(str(outcome.error) for outcome in failed)
    if run.unsent:
        errors["not sent: no free client"] = run.unsent
    report: dict[str, Any] = {
        "target_rps": stage.target_rps,
        "throughput_rps": sum(shares) / run.duration_s,
        "concurrency_limit": stage.concurrency_limit,
        "duration_s": run.duration_s,
        "requests_total": total,
        "requests_success": len(answered),
        "requests_error": total - len(answered),
        "error_rate": (total - len(answered)) / total if total else 0.0,
        "errors": dict(errors.most_common()),
        "latency": summary(outcome.latency_s for outcome in answered),
        "ttft": summary(outcome.ttft_s for outcome in answered),
        "decode_latency": summary(outcome.decode_s for outcome in answered),
        "processing_latency": summary(outcome.processing_s for outcome in answered),
        "tokens": _tokens(answered, shares, run.duration_s),
    }
    reasons = thresholds.reasons(report)
    return {**report, "overloaded": bool(reasons), "overload_reasons": reasons}


def _share_within(outcome: Outcome, run: StageRun) -> float:
    """The part of a request's time that lies in the stage's window."""
    end_s = run.began_s + run.duration_s
    inside_s = min(outcome.ended_s, end_s) - max(outcome.started_s, run.began_s)
    return max(0.0, inside_s) / outcome.latency_s if outcome.latency_s > 0 else 1.0


def _tokens(answered: Sequence[Outcome], shares: Sequence[float], duration_s: float) -> dict[str, float]:
    pairs = list(zip(answered, shares, strict=True))
    return {
        "input": sum(outcome.input_tokens for outcome in answered),
        "output": sum(outcome.output_tokens for outcome in answered),
        "input_per_s": sum(outcome.input_tokens * share for outcome, share in pairs) / duration_s,
        "output_per_s": sum(outcome.output_tokens * share for outcome, share in pairs) / duration_s,
    }


def summary(values: Iterable[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    return {
        "mean": sum(known) / len(known),
        **{f"p{percent}": percentile(known, percent) for percent in (50, 95, 99)},
        "max": known[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest values, as numpy's default does."""
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# ---------------------------------------------------------------------- the ramp


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
