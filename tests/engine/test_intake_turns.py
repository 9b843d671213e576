"""A flood is read in turns, and its pictures are decoded a bounded number ahead of the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kestrel.engine import intake
from kestrel.engine.intake import READ_AT_ONCE, PictureGate, ReadingTurns
from kestrel.engine.pools import PicturePool
from kestrel.errors import EngineStopped, RequestCancelled
from kestrel.runtime.contract import StepOutput
from kestrel.runtime.fake import FakeRuntime
from tests.engine.fake_engine import fake_engine, fake_limits

AGEING_S = 5.0
MOST_INSIDE = 4
MAX_DELAYS = 7


def never() -> int:
    return 0


async def test_a_few_are_read_in_each_round_and_others_are_heard_between_them() -> None:
    loop = asyncio.get_running_loop()
    turns, order = ReadingTurns(loop, never), []

    async def read(number: int) -> None:
        await turns.take()
        order.append(number)
        if number == 0:
            loop.call_soon(order.append, "heard")

    await asyncio.gather(*(read(number) for number in range(3 * READ_AT_ONCE)))
    assert [entry for entry in order if entry != "heard"] == list(range(3 * READ_AT_ONCE))
    assert order.index("heard") == READ_AT_ONCE


async def test_alone_nobody_waits_for_a_round() -> None:
    turns = ReadingTurns(asyncio.get_running_loop(), never)
    for _ in range(3 * READ_AT_ONCE):
        with pytest.raises(StopIteration):  # it ends without a pause
            turns.take().send(None)
        await asyncio.sleep(0)


async def test_who_leaves_while_waiting_takes_no_turn() -> None:
    turns = ReadingTurns(asyncio.get_running_loop(), never)
    tasks = [asyncio.create_task(turns.take()) for _ in range(2 * READ_AT_ONCE)]
    await asyncio.sleep(0)
    for task in tasks[READ_AT_ONCE:-1]:
        task.cancel()
    await asyncio.wait_for(tasks[-1], 5)


@pytest.mark.parametrize("busy_for", [3, 10**9])
async def test_a_round_waits_while_the_worker_prepares_a_step_but_not_for_ever(busy_for: int) -> None:
    asked: list[int] = []

    def num_delays() -> int:
        asked.append(sum(task.done() for task in tasks))
        return MAX_DELAYS if len(asked) <= busy_for else 0

    turns = ReadingTurns(asyncio.get_running_loop(), num_delays)
    tasks = [asyncio.create_task(turns.take()) for _ in range(READ_AT_ONCE + 1)]
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert asked == [READ_AT_ONCE] * (min(busy_for, MAX_DELAYS) + 1)


async def test_the_worker_does_not_prepare_anything_while_it_waits_for_the_device() -> None:
    seen: set[tuple[str, bool]] = set()

    class Watched(FakeRuntime):
        def launch(self, plan: Any) -> Any:
            seen.add(("launch", engine._worker.is_preparing))
            return super().launch(plan)

        def collect(self, step: Any) -> StepOutput:
            seen.add(("collect", engine._worker.is_preparing))
            return super().collect(step)

    async with fake_engine(Watched(fake_limits())) as engine:
        await engine.query(question="a b", settings={"max_tokens": 3})
        assert seen == {("launch", True), ("collect", False)}


# ---------------------------------------------------------------------- the gate


class Crowd:
    """Requests at a gate for two, in the order they got in."""

    def __init__(self) -> None:
        self.gate = PictureGate(asyncio.get_running_loop(), 2, AGEING_S)
        self.entered: list[str] = []

    async def arrive(self, *requests: tuple[str, str, int]) -> None:
        self.tasks = [asyncio.create_task(self._enter(*request)) for request in requests]
        await asyncio.sleep(0.01)

    async def _enter(self, request_id: str, client: str, priority: int) -> None:
        await self.gate.enter(request_id, client, priority)
        self.entered.append(request_id)

    async def leave(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.gate.leave(request_id)
        await asyncio.sleep(0.01)


async def test_the_client_with_the_fewest_inside_goes_first() -> None:
    crowd = Crowd()
    await crowd.arrive(*((f"a{n}", "a", 0) for n in range(5)), *((f"b{n}", "b", 0) for n in range(3)))
    assert crowd.entered == ["a0", "a1", "b0"]
    await crowd.leave("a0", "a1")
    assert crowd.entered[3:] == ["a2"], "nothing of it was inside"
    await crowd.leave("a2", "b0")
    assert crowd.entered[4:] == ["a3", "b1"]


async def test_priorities_order_those_at_the_gate() -> None:
    crowd = Crowd()
    await crowd.arrive(("a0", "a", 0), ("a1", "a", 0), ("later", "a", 3), ("usual", "a", 0), ("urgent", "a", -1))
    assert crowd.entered == ["a0", "a1", "urgent"]
    for one in ("a0", "a1", "urgent"):
        await crowd.leave(one)
    assert crowd.entered[3:] == ["usual", "later"]


async def test_who_waits_and_leaves_is_let_go_and_counts_nothing() -> None:
    crowd = Crowd()
    await crowd.arrive(("a0", "a", 0), ("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0))
    await crowd.leave("a2")
    assert crowd.entered == ["a0", "a1", "a2"]
    assert crowd.gate.num_inside == 2
    await crowd.leave("a0", "a0", "nobody")
    assert crowd.entered[-1] == "a3"
    await crowd.leave("a1", "a3")
    assert crowd.gate.num_inside == 0
    assert (crowd.gate._lines, crowd.gate._turns, dict(crowd.gate._num_inside)) == ({}, {}, {})


async def test_urgent_ones_and_clients_with_nothing_inside_do_not_wait() -> None:
    crowd = Crowd()
    await crowd.arrive(*((f"a{n}", "a", 0) for n in range(4)), ("b0", "b", 0), ("b1", "b", 0), ("urgent", "a", -1))
    assert crowd.entered == ["a0", "a1", "b0", "urgent"]
    await crowd.leave("urgent", "a0")
    assert crowd.entered == ["a0", "a1", "b0", "urgent"], "more than two are inside still"
    await crowd.leave("a1")
    assert crowd.entered[4:] == ["a2"]


async def test_an_id_that_comes_again_waits_anew() -> None:
    crowd = Crowd()
    await crowd.arrive(("a0", "a", 0), ("a1", "a", 0), ("again", "a", 0), ("a2", "a", 0))
    await crowd.leave("again")
    await crowd.arrive(("again", "a", 0))
    await crowd.leave("a0")
    assert crowd.entered == ["a0", "a1", "again", "a2"], "let go once, and behind the others then"
    await crowd.leave("a1")
    assert crowd.entered[4:] == ["again"]


# ---------------------------------------------------------------------- in the engine


async def test_requests_that_wait_to_be_read_are_drained_and_can_be_cancelled() -> None:
    engine = fake_engine(max_queue_size=1000)
    asks = [
        asyncio.create_task(engine.query(question="what?", settings={"max_tokens": 2}, request_id=f"r{number}"))
        for number in range(400)
    ]
    await asyncio.sleep(0)
    assert engine.snapshot().num_waiting > READ_AT_ONCE
    for number in range(100, 150):
        engine.cancel(f"r{number}")
    await engine.shutdown(drain=True, timeout_s=60)
    ended = await asyncio.gather(*asks, return_exceptions=True)
    cancelled = [number for number, one in enumerate(ended) if isinstance(one, RequestCancelled)]
    assert cancelled == list(range(100, 150))
    assert not any(isinstance(one, EngineStopped) for one in ended)


def pictures(number: int) -> list[np.ndarray]:
    return [np.full((8, 8, 3), value, dtype=np.uint8) for value in range(number)]


class Slow(FakeRuntime):
    def collect(self, step: Any) -> StepOutput:
        time.sleep(0.02)
        return super().collect(step)


@pytest.fixture
def most_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many requests' pictures were in memory, whenever one more was."""
    seen: list[int] = []
    hold = PicturePool.hold

    def noted(self: PicturePool, *arguments: object) -> object:
        held = hold(self, *arguments)
        seen.append(len(self._held))
        return held

    monkeypatch.setattr(PicturePool, "hold", noted)
    monkeypatch.setattr("kestrel.engine.api.PICTURES_AHEAD", MOST_INSIDE - 2)
    return seen


async def test_pictures_are_decoded_a_bounded_number_ahead_and_all_are_answered(most_held: list[int]) -> None:
    engine = fake_engine(FakeRuntime(fake_limits(max_batch_size=2), vocab_size=320))
    try:
        asks = [engine.caption(picture, settings={"max_tokens": 3}) for picture in pictures(40)]
        answers = await asyncio.wait_for(asyncio.gather(*asks), 60)
    finally:
        await engine.shutdown()
    assert len(answers) == 40
    assert max(most_held) == MOST_INSIDE
    assert engine._gate.num_inside == 0


async def test_a_request_at_the_gate_can_be_cancelled_and_an_engine_shut_down(most_held: list[int]) -> None:
    engine = fake_engine(Slow(fake_limits(max_batch_size=2), vocab_size=320))
    ids = [f"r{number}" for number in range(12)]
    asks = [
        asyncio.create_task(engine.caption(picture, settings={"max_tokens": 200}, request_id=request_id))
        for picture, request_id in zip(pictures(12), ids, strict=True)
    ]
    while engine._gate.num_inside < MOST_INSIDE:
        await asyncio.sleep(0.001)
    engine.cancel("r9")
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(asks[9], 5)
    asks[8].cancel()
    await engine.shutdown(drain=False, timeout_s=10)
    ended = await asyncio.gather(*asks, return_exceptions=True)
    assert isinstance(ended[8], asyncio.CancelledError)
    assert all(isinstance(one, (EngineStopped, RequestCancelled)) for n, one in enumerate(ended) if n != 8)
    assert engine._gate.num_inside == 0
    assert intake.PICTURES_AHEAD > MOST_INSIDE
