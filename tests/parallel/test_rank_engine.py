"""An engine whose model is shared by two processes answers as one that has it alone, and ends when one of them does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.adapters import save_adapter
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.ranks import OtherRanks, prepared_model
from kestrel.errors import ConfigError, EngineStopped, RankLost
from kestrel.families import adapter_shape, resolve
from kestrel.parallel.group import RankGroup
from kestrel.runtime.contract import AdapterLoad, StepPlan
from kestrel.runtime.process.messages import RunStep
from tests.engine.conftest import picture
from tests.engine.test_compute_process import assert_alike, until_stopped
from tests.exhaustive import sweep
from tests.llama.tiny_folders import random_adapter, write_folder
from tests.moondream.coarse import coarse_folder
from tests.parallel.forked_ranks import forked_ranks
from tests.processes import eventually, has_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tests look at processes as Linux shows them")
GREEDY = {"temperature": 0.0, "ignore_eos": True}
MakeEngine = Callable[..., Awaitable[InferenceEngine]]


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.fixture
async def make() -> AsyncIterator[MakeEngine]:
    engines: list[InferenceEngine] = []

    async def make(folder: Path, size: int = 2, **changes: Any) -> InferenceEngine:
        options = {"device": "cpu", "kv_cache_pages": 52, "page_size": 4, "max_batch_size": 6}
        engine = await InferenceEngine.create(
            RuntimeConfig(model_path=folder, tensor_parallel_size=size, **(options | changes))
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        pids = others_of(engine)
        await engine.shutdown(drain=False, timeout_s=20)
        assert all(map(has_ended, pids)), "a rank is left behind"


def others_of(engine: InferenceEngine) -> list[int]:
    others = engine._ready.others
    return others.pids if isinstance(others, OtherRanks) else []


def folder_of(kind: str, place: Path) -> Path:
    return coarse_folder(kind) if kind.startswith("md") else write_folder(place / kind, kind)


@sweep("kind", ["md2", "md3", "llama", "qwen3_moe", "tied", "biased"], always=["llama"])
async def test_two_processes_say_what_one_says(kind: str, make: MakeEngine, tmp_path: Path) -> None:
    """A crowd that has to give pages back, adapters, seeds, scores within 1e-4, and a second question."""
    folder, adapters = folder_of(kind, tmp_path), tmp_path / "adapters"
    adapters.mkdir()
    shape = adapter_shape(resolve(RuntimeConfig(model_path=folder)))
    for number in range(2):
        save_adapter(random_adapter(shape, 6, number), adapters / f"a{number}.safetensors")
    alone = await make(folder, 1, adapter_dir=adapters)
    shared = await make(folder, 2, adapter_dir=adapters)
    expected, found = await answers_of(alone), await answers_of(shared)
    assert_alike(found, expected)
    assert len({tuple(answer["token_ids"]) for answer in expected[:4]}) == 4, "adapters and prompts tell answers apart"
    for engine in (alone, shared):
        assert engine.snapshot().preemptions_total > 0
        assert engine.snapshot().num_cached_pages > 0


async def answers_of(engine: InferenceEngine) -> list[Any]:
    prompts = [[7, *range(40 + number, 70 + number)] for number in range(3)]
    long = {**GREEDY, "max_tokens": 16}
    asked = [engine.submit(prompts[0], settings={**long, "adapter": name}) for name in (None, "a0", "a1")]
    asked += [engine.submit(prompt, settings={**long, "logprobs": 3}) for prompt in prompts[1:]]
    asked += [engine.submit(prompts[1], settings={"temperature": 1.2, "seed": 5, "max_tokens": 16})]
    results = list(await asyncio.gather(*asked))
    again = await engine.submit([*prompts[2], 9, 9], settings={**GREEDY, "max_tokens": 4, "logprobs": 2})
    assert again.metrics.cached_tokens > 16
    results.append(again)
    if engine.num_image_positions:
        small = picture("small")
        results.append(await engine.query(small, "what?", settings={**GREEDY, "max_tokens": 4, "adapter": "a0"}))
        results.append(await engine.detect(small, "cat", settings={"max_objects": 2}))
    return [result.output for result in results]


async def test_a_rank_that_is_killed_ends_everything_and_all_are_told(make: MakeEngine, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", "llama")
    for is_busy in (True, False):
        engine = await make(folder)
        endless = {"settings": {**GREEDY, "max_tokens": 200}}
        streams = [await engine.submit([number], stream=True, **endless) for number in range(4 * is_busy)]
        waiting = [asyncio.create_task(engine.submit([9, number], **endless)) for number in range(4 * is_busy)]
        if is_busy:
            await anext(streams[0])
        [other] = others_of(engine)
        os.kill(other, signal.SIGKILL)
        told = await asyncio.gather(*(stream.result() for stream in streams), *waiting, return_exceptions=True)
        for error in told:
            assert isinstance(error, EngineStopped)
            assert "RankLost: rank 1 of tensor_parallel_size was killed" in str(error)
        await asyncio.wait_for(until_stopped(engine), 30)
        assert isinstance(engine.fault, RankLost)
        with pytest.raises(EngineStopped, match="rank 1"):
            await engine.submit([1])


async def test_a_rank_that_ends_while_the_first_waits_for_it_is_missed(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, connect = starts_of(monkeypatch), RankGroup.connect

    def connect_too_late(self: RankGroup, device: torch.device) -> None:
        [other] = started[0].pids
        os.kill(other, signal.SIGKILL)
        assert eventually(lambda: not started[0].meeting.parent.exists())
        connect(self, device)

    monkeypatch.setattr(RankGroup, "connect", connect_too_late)
    with pytest.raises(RankLost, match="rank 1 of tensor_parallel_size was killed"):
        await asyncio.wait_for(make(write_folder(tmp_path / "llama", "llama")), 60)


def starts_of(monkeypatch: pytest.MonkeyPatch) -> list[OtherRanks]:
    """Those that are started from now on."""
    started: list[OtherRanks] = []
    begin = OtherRanks.__init__
    monkeypatch.setattr(OtherRanks, "__init__", lambda self, size: (started.append(self), begin(self, size))[1])
    return started


@pytest.mark.parametrize("moment", ["kestrel.engine.ranks.load", "kestrel.parallel.group.RankGroup.connect"])
async def test_an_engine_that_nobody_waits_for_any_more_leaves_no_rank_behind(
    moment: str, make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, reached, cancelled, is_over = starts_of(monkeypatch), *(threading.Event() for _ in range(3))

    def wait(*given: Any) -> None:
        reached.set()
        assert cancelled.wait(60)

    def prepare(*given: Any, **named: Any) -> None:
        try:
            prepared_model(*given, **named)
        finally:
            is_over.set()

    monkeypatch.setattr("kestrel.engine.api.prepared_model", prepare)
    creating = asyncio.create_task(make(write_folder(tmp_path / "llama", "llama")))
    monkeypatch.setattr(moment, wait)
    assert await asyncio.to_thread(reached.wait, 60)
    [others] = started
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert all(map(has_ended, others.pids))
    assert not others.meeting.parent.exists()
    if moment.endswith("load"):
        cancelled.set()  # nobody can end what this process reads
    assert await asyncio.to_thread(is_over.wait, 60)
    cancelled.set()


async def test_a_rank_that_fails_says_why(make: MakeEngine, tmp_path: Path) -> None:
    engine = await make(write_folder(tmp_path / "llama", "llama"))
    others = engine._ready.others
    assert isinstance(others, OtherRanks)
    others.send(RunStep(StepPlan(0, adapter_loads=[AdapterLoad(0, "nobody", None)]), (), (None,)))
    await asyncio.wait_for(until_stopped(engine), 30)
    with pytest.raises(
        EngineStopped, match=r"rank 1 .*exit code 1\): AssertionError: the runtime has no adapter slots"
    ):
        await engine.submit([1])


async def test_what_cannot_be_shared_is_refused_and_leaves_nobody_behind(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = starts_of(monkeypatch)
    with pytest.raises(ConfigError, match="3 does not divide num_attention_heads of the model, which is 4"):
        await make(write_folder(tmp_path / "llama", "llama"), 3)
    [others] = started
    assert eventually(lambda: all(map(has_ended, others.pids)))
    with pytest.raises(ConfigError, match="device: 'cuda:1' names one GPU"):
        RuntimeConfig(device="cuda:1", tensor_parallel_size=2)
