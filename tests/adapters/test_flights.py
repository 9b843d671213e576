"""Work wanted by several callers: done once, ended with the last of them, never remembered."""

from __future__ import annotations

import asyncio

import pytest

from kestrel.adapters.single_flight import SingleFlight
from kestrel.errors import EngineStopped


class Work:
    def __init__(self) -> None:
        self.num_started = 0
        self.num_ended_early = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.num_started += 1
        number = self.num_started
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_ended_early += 1
            raise
        if self.error is not None:
            raise self.error
        return number


async def waiting(flights: SingleFlight[int], work: Work, num: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.join("key", work)) for _ in range(num)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_callers_at_the_same_time_share_one_run_and_later_ones_start_another() -> None:
    flights, work = SingleFlight[int](), Work()
    tasks = await waiting(flights, work, 5)
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [1] * 5
    assert await flights.join("key", work) == 2


async def test_one_caller_who_leaves_does_not_disturb_the_others() -> None:
    flights, work = SingleFlight[int](), Work()
    first, second = await waiting(flights, work, 2)
    first.cancel()
    await asyncio.wait([first])
    work.may_end.set()
    assert await second == 1
    assert work.num_ended_early == 0


async def test_the_work_ends_when_the_last_caller_leaves_and_the_next_one_starts_anew() -> None:
    flights, work = SingleFlight[int](), Work()
    for task in await waiting(flights, work, 3):
        task.cancel()
    await asyncio.sleep(0)
    (later,) = await waiting(flights, work, 1)
    work.may_end.set()
    assert await later == 2
    assert (work.num_ended_early, flights.num_running) == (1, 0)


async def test_a_failure_reaches_all_who_waited_and_nobody_after_them() -> None:
    flights, work = SingleFlight[int](), Work()
    work.error = ValueError("no")
    tasks = await waiting(flights, work, 3)
    work.may_end.set()
    assert [str(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == ["no"] * 3
    work.error = None
    assert await flights.join("key", work) == 2


async def test_closing_ends_the_work_and_says_so() -> None:
    flights, work = SingleFlight[int](), Work()
    (task,) = await waiting(flights, work, 1)
    await flights.close()
    with pytest.raises(EngineStopped, match="shut down"):
        await task
    with pytest.raises(EngineStopped):
        await flights.join("key", work)
    assert work.num_ended_early == 1
