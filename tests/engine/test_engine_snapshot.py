"""The engine's numbers add up to what its requests themselves report, and can be read at any moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from io import BytesIO

from PIL import Image

from kestrel.engine import EngineSnapshot, InferenceEngine
from kestrel.runtime.contract import RuntimeLimits, StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from tests.engine.fake_engine import fake_engine, fake_limits

PROMPT = list(range(100, 133))


class GatedRuntime(FakeRuntime):
    """Launches a step only when the test lets it."""

    def __init__(self, limits: RuntimeLimits) -> None:
        super().__init__(limits, vocab_size=320)
        self.gate = threading.Semaphore(0)
        self.num_launches_begun = 0

    def launch(self, plan: StepPlan) -> FakeStep:
        self.num_launches_begun += 1
        assert self.gate.acquire(timeout=60)
        return super().launch(plan)

    def open(self) -> None:
        self.gate.release(1_000_000)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came true")


def ask(engine: InferenceEngine, prompt: list[int], max_tokens: int = 8) -> asyncio.Task:
    return asyncio.create_task(engine.submit(prompt, max_tokens=max_tokens, temperature=0.0))


async def test_an_idle_engine_has_all_its_pages_and_no_totals() -> None:
    async with fake_engine() as engine:
        assert engine.snapshot() == EngineSnapshot(
            num_running=0,
            num_waiting=0,
            num_pages=2000,
            num_used_pages=0,
            num_cached_pages=0,
            page_size=16,
            max_batch_size=32,
            prefix_query_tokens_total=0,
            prefix_hit_tokens_total=0,
            evicted_pages_total=0,
            preemptions_total=0,
        )


async def test_running_and_waiting_are_told_apart_while_a_step_is_stuck() -> None:
    runtime = GatedRuntime(fake_limits(max_batch_size=2, steps_in_flight=0))
    async with fake_engine(runtime) as engine:
        calls = [ask(engine, [100] * 40)]
        await until(lambda: runtime.num_launches_begun == 1)
        calls += [ask(engine, [100 + n] * 40) for n in range(1, 5)]
        await until(lambda: engine.num_requests == 5)
        unread = engine.snapshot()
        assert (unread.num_running, unread.num_waiting) == (1, 4)
        assert unread.num_used_pages == 3
        assert unread.kv_usage == 3 / 2000
        runtime.gate.release()
        await until(lambda: runtime.num_launches_begun == 2)
        queued = engine.snapshot()
        assert (queued.num_running, queued.num_waiting) == (2, 3)
        assert queued.num_used_pages == 6
        runtime.open()
        await asyncio.gather(*calls)
    after = engine.snapshot()
    assert (after.num_running, after.num_waiting, after.num_used_pages) == (0, 0, 0)


async def test_requests_behind_anothers_picture_wait() -> None:
    runtime = GatedRuntime(fake_limits(steps_in_flight=0))
    scene = BytesIO()
    Image.new("RGB", (16, 16), "green").save(scene, "PNG")
    async with fake_engine(runtime) as engine:
        calls = [asyncio.create_task(engine.query(scene.getvalue(), f"what? {n}", max_new_tokens=2)) for n in range(3)]
        await until(lambda: engine.num_requests == 3 and runtime.num_launches_begun == 1)
        await until(lambda: engine.snapshot().num_running == 1 and engine.snapshot().num_waiting == 2)
        # While a picture is decoded its request waits too, but a step that begins then would begin without it.
        await until(lambda: not engine._unsent)
        runtime.gate.release()
        await until(lambda: engine.snapshot().num_running == 3)
        assert engine.snapshot().num_waiting == 0
        runtime.open()
        await asyncio.gather(*calls)


async def test_prefix_totals_are_the_sums_of_what_the_requests_report() -> None:
    async with fake_engine() as engine:
        results = [await ask(engine, PROMPT), await ask(engine, PROMPT), await ask(engine, [*PROMPT[:20], 7, 8])]
        taken = engine.snapshot()
    assert results[1].metrics.cached_tokens == 32
    assert results[2].metrics.cached_tokens == 20
    assert taken.prefix_query_tokens_total == sum(r.metrics.input_tokens for r in results) == 33 + 33 + 22
    assert taken.prefix_hit_tokens_total == sum(r.metrics.cached_tokens for r in results) == 52
    assert taken.num_cached_pages > 0
    assert taken.num_used_pages == 0


async def test_preemptions_are_counted_where_they_happen() -> None:
    limits = fake_limits(num_pages=12, page_size=4, max_seq_length=40, max_batch_size=6)
    async with fake_engine(FakeRuntime(limits, vocab_size=320)) as engine:
        results = await asyncio.gather(*(ask(engine, [100 + n] * 6, max_tokens=24) for n in range(6)))
        taken = engine.snapshot()
    assert sum(r.metrics.num_preemptions for r in results) == taken.preemptions_total > 0
    assert taken.evicted_pages_total > 0


async def test_it_can_be_read_at_any_moment() -> None:
    """Thousands of readings beside a busy worker: all possible, totals never fall."""
    limits = fake_limits(num_pages=60, page_size=4, max_seq_length=100, max_batch_size=6)
    async with fake_engine(FakeRuntime(limits, vocab_size=320)) as engine:
        num_readings, last = 0, engine.snapshot()
        while num_readings <= 1000:  # a slow machine needs more than one crowd for that
            calls = asyncio.gather(*(ask(engine, [100 + n % 7] * (3 + n % 9), max_tokens=20) for n in range(40)))
            while not calls.done():
                for _ in range(20):
                    taken = engine.snapshot()
                    assert 0.0 <= taken.kv_usage <= 1.0
                    assert 0 <= taken.num_running <= 6
                    assert taken.prefix_query_tokens_total >= last.prefix_query_tokens_total
                    assert taken.preemptions_total >= last.preemptions_total
                    num_readings, last = num_readings + 1, taken
                await asyncio.sleep(0.001)
            await calls
