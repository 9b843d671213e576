"""What the worker does while a step runs beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kestrel.engine import InferenceEngine
from kestrel.engine.intake import READ_AT_ONCE
from kestrel.engine.worker import Cancel
from kestrel.errors import EngineStopped
from kestrel.runtime.contract import StepOutput, StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from tests.engine.fake_engine import fake_engine, fake_limits

WAIT_S = 10.0


class StepsBeside(FakeRuntime):
    """Runs a step until the test lets it end."""

    def __init__(self) -> None:
        super().__init__(fake_limits(steps_in_flight=0, launch_waits=False), vocab_size=320)
        self.may_end = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.fails_at = 0

    def launch(self, plan: StepPlan) -> FakeStep:
        self.sizes.append(len(plan.prefill) + len(plan.decode))
        if len(self.sizes) == self.fails_at:
            raise OSError("nobody is there")
        return super().launch(plan)

    def collect(self, step: FakeStep) -> StepOutput:
        assert self.may_end.acquire(timeout=WAIT_S)
        return super().collect(step)


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), WAIT_S)


async def asleep(engine: InferenceEngine) -> None:
    """Not before its first turn, in which a worker reads what is there."""
    await asyncio.wait_for(engine.submit([100, 102], max_tokens=1, temperature=0.0), WAIT_S)
    await until(lambda: engine.busy_since_s is None)


async def a_short_one_behind_a_long_one(engine: InferenceEngine, runtime: StepsBeside) -> list[asyncio.Task]:
    """The long one's first step runs; of the short one's answer the second step is all."""
    long = asyncio.create_task(engine.submit([101, 102], max_tokens=3, temperature=0.0))
    await until(lambda: len(runtime.sizes) == 1)
    short = asyncio.create_task(engine.submit([103, 102], max_tokens=1, temperature=0.0))
    await until(lambda: engine.num_requests == 2)
    return [long, short]


async def test_what_a_step_gave_is_handed_out_while_the_next_one_runs() -> None:
    runtime = StepsBeside()
    async with fake_engine(runtime) as engine:
        long, short = await a_short_one_behind_a_long_one(engine, runtime)
        runtime.may_end.release(2)
        await asyncio.wait_for(short, WAIT_S)
        assert runtime.sizes == [1, 2, 1], "the third was launched first, and runs"
        assert not long.done()
        runtime.may_end.release()
        assert (await asyncio.wait_for(long, WAIT_S)).metrics.output_tokens == 3


async def test_whoever_comes_while_a_step_runs_is_part_of_the_next() -> None:
    runtime = StepsBeside()
    async with fake_engine(runtime) as engine:
        calls = [asyncio.create_task(engine.submit([101, 102], max_tokens=2, temperature=0.0))]
        await until(lambda: len(runtime.sizes) == 1)
        calls += [
            asyncio.create_task(engine.submit([number, 102], max_tokens=1, temperature=0.0)) for number in (103, 104)
        ]
        await until(lambda: engine.num_requests == 3)
        runtime.may_end.release(100)
        await asyncio.wait_for(asyncio.gather(*calls), WAIT_S)
    assert runtime.sizes == [1, 3]


async def test_an_idle_worker_gets_all_of_a_round_for_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = StepsBeside()
    runtime.may_end.release(100)
    async with fake_engine(runtime) as engine:
        await asleep(engine)
        send = engine._send

        def send_late(*request: Any) -> None:
            time.sleep(0.01)  # leaves the interpreter to the worker, which could begin with the ones before
            send(*request)

        monkeypatch.setattr(engine, "_send", send_late)
        asks = [engine.submit([100 + number, 102], max_tokens=1, temperature=0.0) for number in range(READ_AT_ONCE)]
        await asyncio.wait_for(asyncio.gather(*asks), WAIT_S)
    assert runtime.sizes == [1, READ_AT_ONCE]


async def test_a_worker_that_will_be_woken_counts_as_preparing_a_step() -> None:
    """So that the next round of a flood waits for it."""
    runtime = StepsBeside()
    runtime.may_end.release(100)
    async with fake_engine(runtime) as engine:
        await asleep(engine)
        assert not engine._worker.is_preparing
        engine._worker.try_send(Cancel("nobody"), wakes=False)
        assert engine._worker.is_preparing
        assert engine.busy_since_s is None, "it sleeps on"
        engine._worker.wake()
        await until(lambda: not engine._worker.is_preparing)


async def test_an_answer_that_was_settled_before_a_fault_is_handed_out() -> None:
    runtime = StepsBeside()
    async with fake_engine(runtime) as engine:
        long, short = await a_short_one_behind_a_long_one(engine, runtime)
        runtime.fails_at = 3
        runtime.may_end.release(100)
        assert (await asyncio.wait_for(short, WAIT_S)).metrics.output_tokens == 1
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(long, WAIT_S)
