"""What callers rely on: both call styles, streams, refusals, cancellation, faults, shutdown."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine, pools
from kestrel.errors import (
    AdapterNotFound,
    CheckpointError,
    EngineStopped,
    QueueFull,
    RequestCancelled,
    RequestError,
)
from kestrel.images.picture import ShrunkImage
from kestrel.runtime.contract import StepOutput
from kestrel.runtime.fake import FakeRuntime, FakeStep
from tests.engine.conftest import GOLDENS, MakeEngine, cases, picture
from tests.engine.fake_engine import fake_engine, fake_limits
from tests.engine.loop_rounds import rounds_during
from tests.exhaustive import sweep
from tests.moondream.coarse import POSITIONS

QUESTION = "what is the cat?"


async def test_settings_and_keywords_mean_the_same(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    image = picture("small")
    by_settings = await engine.query(
        image=image, question=QUESTION, reasoning=False, settings={"temperature": 0.0, "max_tokens": 6}
    )
    by_keywords = await engine.query(question=QUESTION, image=image, reasoning=False, max_new_tokens=6, temperature=0.0)
    assert by_settings.text == by_keywords.text == by_settings.output["answer"]
    assert by_settings.finish_reason == "length"
    assert by_settings.metrics.output_tokens == 6
    assert by_settings.metrics.input_tokens == POSITIONS + 10


async def test_a_stream_adds_up_to_its_result(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    asked = {"question": QUESTION, "reasoning": True, "temperature": 0.0, "max_tokens": 14}
    stream = await engine.query(picture("small"), stream=True, **asked)
    chunks = [chunk async for chunk in stream]
    output = (await stream.result()).output
    assert output == (await engine.query(picture("small"), **asked)).output
    assert "".join(c.text for c in chunks if c.kind == "text") == output["answer"] != ""
    assert "".join(c.text for c in chunks if c.kind == "reasoning") == output["reasoning"]["text"] != ""
    assert [c.token_index for c in chunks] == sorted(c.token_index for c in chunks)


async def test_the_second_question_about_a_picture_computes_its_own_words_only(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md2")
    options = {"reasoning": False, "temperature": 0.0, "max_new_tokens": 2}
    first = await engine.query(picture("multi"), QUESTION, **options)
    second = await engine.query(picture("multi"), "is the dog here?", **options)
    assert first.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens >= POSITIONS
    assert second.metrics.input_tokens - second.metrics.cached_tokens < 20


@pytest.mark.parametrize("family", ["md2", "md3"])
async def test_one_crop_of_a_large_picture_is_the_picture_reduced_to_it(
    make_coarse_engine: MakeEngine, family: str
) -> None:
    """Whoever bounds the crops differently shares nothing; the model's own number is no bound."""
    engine = await make_coarse_engine(family)
    form = engine._ready.picture_form
    assert form is not None
    [whole] = await engine._pictures.decode("test", [picture("multi")])
    engine._pictures.release("test")
    assert isinstance(whole, ShrunkImage)
    assert whole.tiled is not None
    options = {"logprobs": 2, "reasoning": False, "temperature": 0.0, "max_new_tokens": 6}
    reduced = await engine.query(whole.whole, QUESTION, **options)
    asked = [await engine.query(picture("multi"), QUESTION, max_crops=n, **options) for n in (None, 1, 2, 1)]
    full = await engine.query(picture("multi"), QUESTION, max_crops=form.tiling.max_crops, **options)
    assert [one.metrics.cached_tokens >= POSITIONS for one in (*asked, full)] == [False, False, False, True, True]
    assert asked[1].output == reduced.output != asked[0].output
    assert (asked[3].text, full.text) == (asked[1].text, asked[0].text)


async def test_pictures_in_any_form_give_one_answer(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    path = GOLDENS / "image_small.png"
    with Image.open(path) as opened:
        rgb = opened.convert("RGB")
    forms = [path, str(path), path.read_bytes(), rgb, np.asarray(rgb)]
    results = [await engine.caption(form, "short", temperature=0.0, max_new_tokens=4) for form in forms]
    assert len({r.text for r in results}) == 1
    # A file is told by its bytes and an array by its pixels.
    assert [r.metrics.cached_tokens >= POSITIONS for r in results] == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"question": ""}, "question"),
        ({"question": "x", "settings": {"temperatur": 1}}, "temperatur"),
        ({"question": "x", "temperature": -1}, "temperature"),
        ({"question": "x", "top_p": -0.01}, "top_p"),
        ({"question": "x", "max_new_tokens": 0}, "max_new_tokens"),
        ({"question": "x", "colour": "red"}, "colour"),
        ({"question": "x", "image": b"not a picture"}, "image"),
        ({"question": "x", "image": "/no/such/file.png"}, "image"),
        ({"question": "x", "spatial_refs": [[0.5, 2.0]]}, "spatial_refs"),
        ({"question": "x", "allowed_ids": [10**6]}, "allowed_ids"),
        ({"question": "x", "priority": "high"}, "priority"),
        ({"question": "x", "request_id": ""}, "request_id"),
    ],
)
async def test_bad_fields_are_refused_by_name(make_engine: MakeEngine, fields: dict, named: str) -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match=named):
        await engine.query(**fields)
    good = await engine.query(question="hello", reasoning=False, temperature=0.0, max_new_tokens=2)
    assert good.finish_reason in ("stop", "length")
    assert engine.num_requests == 0
    await engine.shutdown()


async def test_unknown_skills_and_adapters_are_refused() -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="skill"):
        await engine.run("juggle")
    with pytest.raises(AdapterNotFound):
        await engine.query(question="x", settings={"adapter": "abc@1"})
    await engine.shutdown()


async def test_raw_tokens_can_be_submitted(make_engine: MakeEngine) -> None:
    engine = await make_engine("md2")
    case = cases("md2")["query_text_only"]
    prompt = case["steps"][0]["tokens"]
    result = await engine.submit(prompt, temperature=0.0, max_new_tokens=1)
    assert result.output["token_ids"] == case["generated_tokens"][:1]
    with pytest.raises(RequestError, match="prompt: token id 99999 does not exist"):
        await engine.submit([1, 99999])


async def test_a_prompt_beyond_the_context_is_refused_alone() -> None:
    engine = fake_engine()
    long = engine.query(question="word " * 3000, reasoning=False)
    short = engine.query(question="hi", reasoning=False, temperature=0.0, max_new_tokens=2)
    refused, answered = await asyncio.gather(long, short, return_exceptions=True)
    assert isinstance(refused, RequestError)
    assert "max_seq_length" in str(refused)
    assert answered.metrics.output_tokens <= 2
    await engine.shutdown()


async def test_a_full_queue_refuses_at_once() -> None:
    engine = fake_engine(max_queue_size=3)
    calls = [engine.query(question=f"q{i}", reasoning=False, temperature=0.0) for i in range(300)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(r, QueueFull) for r in results)
    assert any(not isinstance(r, BaseException) for r in results)
    await engine.shutdown()


@sweep("number", [200, 500], always=[200])
async def test_streams_cancelled_at_random_moments_leave_nothing_behind(number: int) -> None:
    rng = random.Random(7)
    engine = fake_engine(max_queue_size=1000)
    pixels = [np.full((8, 8, 3), i, dtype=np.uint8) for i in range(5)]

    async def one(index: int) -> str:
        image = pixels[index % 5] if index % 3 else None
        stream = await engine.query(image, f"question {index % 40}", stream=True, reasoning=index % 2 == 0)
        await asyncio.sleep(rng.random() * 0.2)
        try:
            match index % 3:
                case 0:
                    stream.cancel()
                case 1:
                    async for _ in stream:
                        stream.cancel()
                case _:
                    async with stream:
                        pass
            await stream.result()
        except RequestCancelled:
            return "cancelled"
        return "finished"

    outcomes = await asyncio.gather(*(one(i) for i in range(number)))
    assert outcomes.count("cancelled") > number // 5
    await settle(engine)
    engine._scheduler.check_integrity()
    assert engine._cache.num_leases == 0
    assert engine.num_requests == 0
    engine._cache.clear()
    assert engine._cache.num_free_pages == engine._cache.num_pages
    await engine.shutdown()
    assert len(asyncio.all_tasks()) == 1


async def settle(engine: InferenceEngine) -> None:
    """Wait until the worker has nothing to do."""
    for _ in range(500):
        if not engine._scheduler.has_work and not engine._worker._commands:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the worker never came to rest")


async def test_cancelling_the_waiting_task_cancels_the_request() -> None:
    engine = fake_engine()
    task = asyncio.create_task(engine.query(question="x", reasoning=False, max_new_tokens=900))
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle(engine)
    assert engine.num_requests == 0
    assert engine._cache.num_leases == 0
    await engine.shutdown()


class SlowRuntime(FakeRuntime):
    """Each step takes a while, like a real one."""

    def launch(self, plan):
        time.sleep(0.005)
        return super().launch(plan)


async def test_shutdown_under_load_answers_everyone_within_its_limit() -> None:
    engine = fake_engine(SlowRuntime(fake_limits(), vocab_size=320))
    calls = [
        asyncio.create_task(engine.query(question=f"q{i}", reasoning=False, max_new_tokens=400)) for i in range(64)
    ]
    await asyncio.sleep(0.1)
    await engine.shutdown(timeout_s=0.5)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(o, EngineStopped) or o.finish_reason in ("stop", "length") for o in outcomes)
    assert any(isinstance(o, EngineStopped) for o in outcomes)
    with pytest.raises(EngineStopped):
        await engine.query(question="too late")


async def test_shutdown_that_drains_lets_running_requests_finish() -> None:
    engine = fake_engine()
    calls = [asyncio.create_task(engine.query(question=f"q{i}", reasoning=False, temperature=0.0)) for i in range(50)]
    await asyncio.sleep(0.01)
    await engine.shutdown(timeout_s=20)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    # A call that had not reached the worker yet is refused; everything that had is answered.
    assert sum(not isinstance(o, BaseException) for o in outcomes) > 0
    assert all(isinstance(o, EngineStopped) for o in outcomes if isinstance(o, BaseException))


async def test_shutdown_twice_is_harmless_and_ends_the_thread() -> None:
    engine = fake_engine()
    await engine.shutdown()
    await engine.shutdown()
    assert not engine._worker.is_alive


class FaultyRuntime(FakeRuntime):
    """Dies on the tenth step."""

    def collect(self, step: FakeStep) -> StepOutput:
        if step.step_id == 10:
            raise RuntimeError("the device is gone")
        return super().collect(step)


async def test_a_fault_in_the_worker_fails_all_and_is_visible() -> None:
    engine = fake_engine(FaultyRuntime(fake_limits(), vocab_size=320))
    calls = [engine.query(question=f"q{i}", reasoning=False, max_new_tokens=300) for i in range(40)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    stopped = [o for o in outcomes if isinstance(o, EngineStopped)]
    assert stopped
    assert "the device is gone" in str(stopped[0])
    assert isinstance(engine.fault, RuntimeError)
    assert not engine.is_running
    with pytest.raises(EngineStopped, match="the device is gone"):
        await engine.query(question="after")
    await engine.shutdown()


async def test_a_failed_start_leaves_no_thread_behind(tmp_path) -> None:
    before = {t.name for t in threading.enumerate()}
    with pytest.raises(CheckpointError):
        await InferenceEngine.create(RuntimeConfig(model_path=tmp_path))
    started = {t.name for t in threading.enumerate()} - before
    assert not [name for name in started if name.startswith("kestrel")]


async def test_decoding_pictures_never_blocks_the_loop() -> None:
    engine = fake_engine()
    buffer = BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (4000, 3000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG")
    async with rounds_during(pools, "decode_opened") as rounds:
        await engine.caption(buffer.getvalue(), temperature=0.0, max_new_tokens=2)
    await engine.shutdown()
    assert len(rounds) == 1
    assert rounds[0] > 5


async def test_tenants_and_salts_do_not_share_pictures() -> None:
    engine = fake_engine()
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    a, b = {"tenant": "a"}, {"tenant": "b"}
    salted, other = {"tenant": "a", "cache_salt": "b"}, {"tenant": "b", "cache_salt": "b"}
    cached = []
    for who in (a, b, a, salted, other, salted, {"cache_salt": "b"}):
        result = await engine.caption(image, temperature=0.0, max_new_tokens=2, **who)
        cached.append(result.metrics.cached_tokens >= 730)
    assert cached == [False, False, True, False, False, True, False]
    await engine.shutdown()
