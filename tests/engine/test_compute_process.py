"""An engine whose model runs in a process of its own answers as one whose model runs here, and ends with it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kestrel.adapters import shared_memory
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.compute_process import ComputeProcess, can_compute_apart
from kestrel.errors import AdapterNotFound, CheckpointError, ConfigError, EngineStopped
from kestrel.images.picture import RgbImage
from tests.engine.conftest import GOLDENS, MakeEngine, ask, assert_same_output, cases, config, picture
from tests.engine.random_adapters import write_adapters
from tests.moondream.coarse import coarse_folder
from tests.server.programs import FORKING, Forked
from tests.server.sockets import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the model shares the server's process")
HEAD = GOLDENS / "segment" / "refiner_head.safetensors"
GREEDY = {"temperature": 0.0, "max_tokens": 8}
BOX = {"x_min": 0.2, "y_min": 0.2, "x_max": 0.7, "y_max": 0.8}
PATH = "M 0 0 L 1 0 L 1 1 L 0 1 Z"

Apart = Callable[..., Any]


@pytest.fixture
async def apart() -> AsyncIterator[Apart]:
    """Engines over models elsewhere, with their processes; all are ended after the test."""
    engines: list[InferenceEngine] = []
    with ExitStack() as processes:

        async def make(family: str = "md3", **changes: Any) -> tuple[InferenceEngine, ComputeProcess]:
            wanted = config(family, **changes)
            process = processes.enter_context(ComputeProcess(wanted))
            engine = InferenceEngine.start(wanted, await asyncio.to_thread(process.ready))
            process.watch(engine.fail)
            engines.append(engine)
            return engine, process

        yield make
        for engine in engines:
            await engine.shutdown(drain=False, timeout_s=20)


async def test_answers_are_the_references_among_strangers(apart: Apart) -> None:
    engine, _ = await apart("md2")
    names = ["query_small", "caption_short_small", "point_small", "detect_small"]
    known = {name: cases("md2")[name] for name in names if name in cases("md2")}
    assert len(known) > 2
    answers = await asyncio.gather(*(ask(engine, case) for case in known.values()))
    for answer, case in zip(answers, known.values(), strict=True):
        assert_same_output(answer.output, case["output"])


async def test_what_is_asked_here_and_there_is_answered_alike(
    apart: Apart, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters, log-probabilities, seeds, formats, a picture in slices beside a stream, and a second question."""
    monkeypatch.setattr(shared_memory, "MIN_BLOCK_BYTES", 1)
    write_adapters(tmp_path, "md3", 1)
    options = {"model_path": coarse_folder("md3"), "adapter_dir": tmp_path, "streaming_prefill_tokens": 128}
    here = await make_engine("md3", **options)
    there, _ = await apart("md3", **options)
    for found, expected in zip(await answers_of(there), await answers_of(here), strict=True):
        assert_alike(found, expected)
    with pytest.raises(AdapterNotFound):
        await there.query(None, "what?", adapter="unknown")
    assert there.snapshot().num_cached_pages > 0


async def answers_of(engine: InferenceEngine) -> list[Any]:
    small, multi = picture("small"), picture("multi")
    stream = await engine.query(small, "what?", stream=True, settings={**GREEDY, "max_tokens": 24, "ignore_eos": True})
    asked = [
        engine.query(multi, "what is it?", settings=GREEDY),
        engine.query(small, "what is it?", settings={**GREEDY, "adapter": "a0"}),
        engine.query(small, "who?", settings={"temperature": 1.5, "seed": 4, "max_tokens": 8}),
        engine.detect(small, "cat", settings={"max_objects": 2}),
        engine.submit([5, 6, 7], settings={**GREEDY, "logprobs": 2}),
        engine.embed(small, "cat"),
    ]
    results = await asyncio.gather(*asked)
    again = await engine.query(small, "and now?", settings=GREEDY)
    assert again.metrics.cached_tokens > 100
    return [result.output for result in (*results, again, await stream.result())]


def assert_alike(found: Any, expected: Any) -> None:
    """Steps are not cut alike on both sides: last bits may differ."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


@pytest.mark.exhaustive
async def test_outlines_are_refined_there(apart: Apart, make_engine: MakeEngine) -> None:
    options = {"refiner_path": HEAD}
    here, (there, _) = await make_engine("md3", **options), await apart("md3", **options)
    image = RgbImage.from_pixels(np.random.default_rng(1).integers(0, 255, (90, 120, 3), dtype=np.uint8))
    ours, theirs = here._ready.refiner, there._ready.refiner
    assert ours is not None
    assert theirs is not None
    assert theirs.refine_outline(image, PATH, BOX) == ours.refine_outline(image, PATH, BOX) is not None


async def test_a_program_that_has_computed_with_several_threads_can_start_it(apart: Apart) -> None:
    """OpenMP remembers threads that a forked process does not have, and would wait for them."""
    torch.set_num_threads(2)
    try:
        torch.nn.functional.linear(torch.ones(512, 512), torch.ones(512, 512))
        engine, _ = await asyncio.wait_for(apart("md2", model_path=coarse_folder("md2")), 60)
        asked = engine.query(picture("small"), "what is it?", settings=GREEDY)
        assert (await asyncio.wait_for(asked, 60)).output["answer"]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"model_path": "/nowhere"}, CheckpointError), ({"model_path": None, "model": "nobody"}, ConfigError)],
)
async def test_what_loading_raises_is_raised_here(changes: dict[str, Any], error: type[Exception]) -> None:
    with ComputeProcess(config("md2", **changes)) as process, pytest.raises(error):
        process.ready()


async def test_a_process_that_dies_stops_the_engine_whether_it_works_or_not(apart: Apart) -> None:
    for is_busy in (True, False):
        engine, process = await apart("md2", model_path=coarse_folder("md2"))
        endless = {"max_tokens": 1500, "ignore_eos": True}
        stream = await engine.query(None, "what?", stream=True, settings=endless) if is_busy else None
        if stream is not None:
            await anext(stream)
        os.kill(process.pid, signal.SIGKILL)
        if stream is not None:
            with pytest.raises(EngineStopped, match="process that computes has ended"):
                await stream.result()
        await asyncio.wait_for(until_stopped(engine), 10)
        assert isinstance(engine.fault, EngineStopped)
        with pytest.raises(EngineStopped, match="process that computes has ended"):
            await engine.query(None, "what?")


async def until_stopped(engine: InferenceEngine) -> None:
    while engine.is_running:
        await asyncio.sleep(0.01)


async def test_an_end_while_it_loads_is_told_with_its_cause() -> None:
    with ComputeProcess(config("md2"), prepare=signal.pause) as process:
        waiting = asyncio.create_task(asyncio.to_thread(process.ready))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineStopped, match=r"\(signal 9: perhaps .*\) while it loaded the model"):
            await waiting
        assert process.has_died
    with ComputeProcess(config("md2"), prepare=signal.pause) as process:
        waiting = asyncio.create_task(asyncio.to_thread(process.ready))
        process.kill()
        with pytest.raises(EngineStopped):
            await waiting
        assert not process.has_died, "it was ended on purpose"


def test_where_a_surprise_happened_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in the other process")

    monkeypatch.setattr("kestrel.engine.compute_process.prepared_model", stumble)
    with ComputeProcess(config("md2")) as process, pytest.raises(ZeroDivisionError) as caught:
        process.ready()
    assert "in stumble" in str(caught.value.__cause__)


def forget_it() -> None:
    sys.kept = ComputeProcess(RuntimeConfig(device="cpu"))  # type: ignore[attr-defined] - or its connection would end it
    ctypes.pythonapi.Py_Exit(0)


def test_a_program_that_forgets_it_ends_all_the_same() -> None:
    assert Forked(FORKING.Process(target=forget_it)).wait(60) == 0


def is_alive(process: ComputeProcess) -> bool:
    return process._process.is_alive()


def test_signals_for_everybody_leave_it_to_its_parent() -> None:
    with ComputeProcess(config("md2", model_path=coarse_folder("md2"))) as process:
        process.ready()
        assert process.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        assert not eventually(lambda: not is_alive(process), 0.3)


def test_only_a_cpu_under_linux_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_compute_apart(RuntimeConfig(device="cpu"))
    monkeypatch.setattr("sys.platform", "darwin")
    assert not can_compute_apart(RuntimeConfig(device="cpu"))
