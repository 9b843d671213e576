"""One stage: a number of clients at once, or a number of requests a second, for a while."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kestrel.bench.http_load.client import BROKEN, Connection, Target
from kestrel.bench.http_load.outcomes import Outcome, outcome_of


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
