"""Adapters through the public engine: the reference's answers, crowds over few slots, files that come and go."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kestrel.adapters import save_adapter
from kestrel.engine import InferenceEngine
from kestrel.errors import AdapterNotFound, AdapterSourceError, AdapterUnusable, RequestError
from tests.adapters.adapter_hosts import host, slow
from tests.engine.conftest import GOLDENS, MakeEngine, ask, assert_same_output, cases, picture
from tests.engine.random_adapters import random_adapter, write_adapters
from tests.exhaustive import sweep
from tests.moondream.coarse import POSITIONS

QUESTION = "what is the cat?"


async def said(engine: InferenceEngine, adapter: str | None, question: str = QUESTION, **more: Any) -> Any:
    settings = {"temperature": 0.0, "max_tokens": 6, "adapter": adapter}
    return await engine.query(picture("small"), question, reasoning=False, settings=settings, **more)


async def text_of(engine: InferenceEngine, adapter: str | None, question: str = QUESTION) -> str:
    return (await said(engine, adapter, question)).output["answer"]


async def words_of(engine: InferenceEngine, adapter: str | None) -> str:
    """Without a picture, which is most of the work."""
    settings = {"temperature": 0.0, "max_tokens": 6, "adapter": adapter}
    return (await engine.query(None, QUESTION, reasoning=False, settings=settings)).output["answer"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapters").mkdir()
    return tmp_path / "adapters"


@pytest.mark.parametrize("name", [n for n, c in cases("md2").items() if "lora" in c])
async def test_a_variant_answers_as_the_reference_alone_and_beside_the_base(
    name: str, make_engine: MakeEngine, folder: Path
) -> None:
    shutil.copy(GOLDENS / "md2" / "lora_variant.safetensors", folder / "variant.safetensors")
    engine = await make_engine("md2", adapter_dir=folder)
    case, base_case = cases("md2")[name], cases("md2")["query_small"]
    with_adapter = {**case, "settings": {**case["settings"], "adapter": "variant"}}
    assert_same_output((await ask(engine, with_adapter)).output, case["output"])
    adapted, base, again = await asyncio.gather(
        ask(engine, with_adapter), ask(engine, base_case), ask(engine, with_adapter)
    )
    assert_same_output(adapted.output, case["output"])
    assert_same_output(again.output, case["output"])
    assert_same_output(base.output, base_case["output"])
    assert adapted.adapter == "variant"
    assert base.adapter is None


@sweep("family", ["md2", "md3"], always=["md3"])
async def test_sixteen_adapters_over_four_slots_answer_64_at_once_as_each_alone(
    family: str, make_coarse_engine: MakeEngine, folder: Path
) -> None:
    names = write_adapters(folder, family, 16)
    alone: dict[str | None, str] = {}
    single = await make_coarse_engine(family, adapter_dir=folder, max_adapters=1, max_batch_size=1)
    for name in [None, *names]:
        alone[name] = await words_of(single, name)
    assert len(set(alone.values())) > 8, "the adapters must make a difference"
    crowd = await make_coarse_engine(family, adapter_dir=folder, max_adapters=4, max_batch_size=16, kv_cache_pages=900)
    handles = len(os.listdir("/proc/self/fd"))
    asked = [([None, *names])[number % 17] for number in range(64)]
    answers = await asyncio.gather(*(words_of(crowd, name) for name in asked))
    assert answers == [alone[name] for name in asked]
    snapshot = crowd.snapshot()
    assert snapshot.running_adapters == snapshot.waiting_adapters == ()
    assert snapshot.num_used_pages == 0
    assert snapshot.num_adapter_slots == 4
    assert snapshot.adapter_loads_total == 16
    assert len(os.listdir("/proc/self/fd")) <= handles


async def test_a_picture_prefilled_under_an_adapter_is_not_shared_with_the_base(
    make_coarse_engine: MakeEngine, folder: Path
) -> None:
    write_adapters(folder, "md3", 1)
    engine = await make_coarse_engine("md3", adapter_dir=folder)
    first, base, second = [await said(engine, name) for name in ("a0", None, "a0")]
    assert first.metrics.cached_tokens == base.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens >= POSITIONS
    assert second.output == first.output


async def test_a_changed_file_is_used_by_the_next_request_and_a_removed_one_is_gone(
    make_coarse_engine: MakeEngine, folder: Path
) -> None:
    engine = await make_coarse_engine("md3", adapter_dir=folder)
    with pytest.raises(AdapterNotFound, match="mine"):
        await said(engine, "mine")
    save_adapter(random_adapter("md3", 6, seed=1), folder / "mine.safetensors")
    first = await text_of(engine, "mine")
    assert [listing.name for listing in await engine.list_adapters()] == ["mine"]
    save_adapter(random_adapter("md3", 12, seed=2), folder / "mine.safetensors")
    second = await said(engine, "mine")
    assert second.output["answer"] != first
    assert second.metrics.cached_tokens == 0, "another content shares nothing"
    (folder / "mine.safetensors").unlink()
    with pytest.raises(AdapterNotFound):
        await said(engine, "mine")


async def test_a_damaged_file_fails_its_own_requests_only(make_coarse_engine: MakeEngine, folder: Path) -> None:
    write_adapters(folder, "md3", 1)
    whole = (folder / "a0.safetensors").read_bytes()
    (folder / "torn.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "foreign.safetensors").write_bytes((GOLDENS / "md2" / "lora_variant.safetensors").read_bytes())
    save_adapter(random_adapter("md3", 96, seed=1), folder / "wide.safetensors")
    engine = await make_coarse_engine("md3", adapter_dir=folder, max_adapter_rank=48)
    expected = await text_of(engine, "a0")
    outcomes = await asyncio.gather(
        said(engine, "torn"),
        text_of(engine, "a0"),
        said(engine, "foreign"),
        said(engine, "wide"),
        said(engine, "../a0"),
        text_of(engine, "a0"),
        return_exceptions=True,
    )
    torn, good, foreign, wide, hostile, again = outcomes
    assert good == again == expected
    for error, word in ((torn, "torn"), (foreign, "foreign"), (wide, "max_adapter_rank")):
        assert isinstance(error, AdapterUnusable)
        assert word in str(error)
        assert str(folder) not in str(error)
    assert isinstance(hostile, RequestError)
    assert hostile.field == "adapter"
    assert engine.num_requests == 0


async def test_without_a_source_the_remedy_is_named(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    with pytest.raises(AdapterNotFound, match="adapter_dir"):
        await said(engine, "mine")
    assert engine.snapshot().num_adapter_slots == 0


async def test_cancelled_and_streamed_requests_leave_no_slot_behind(
    make_coarse_engine: MakeEngine, folder: Path
) -> None:
    names = write_adapters(folder, "md3", 3)
    engine = await make_coarse_engine("md3", adapter_dir=folder, max_adapters=2)
    expected = {name: await text_of(engine, name) for name in names}
    tasks = [asyncio.create_task(said(engine, names[number % 3])) for number in range(24)]
    await asyncio.sleep(0.05)
    for task in tasks[::2]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for number, outcome in enumerate(outcomes):
        if number % 2:
            assert outcome.output["answer"] == expected[names[number % 3]]
    stream = await engine.query(
        picture("small"),
        QUESTION,
        reasoning=False,
        stream=True,
        settings={"temperature": 0.0, "max_tokens": 6, "adapter": names[0]},
    )
    assert "".join([chunk.text async for chunk in stream]) == expected[names[0]]
    while engine.snapshot().num_running:
        await asyncio.sleep(0.01)
    assert engine.snapshot().running_adapters == ()


async def test_a_source_that_dies_in_the_middle_of_a_download_fails_those_requests_only(
    make_coarse_engine: MakeEngine, folder: Path, tmp_path: Path
) -> None:
    write_adapters(folder, "md3", 1)
    file = (folder / "a0.safetensors").read_bytes()
    async with host() as far:
        engine = await make_coarse_engine(
            "md3",
            adapter_dir=folder,
            adapter_url_template=f"{far.url}/{{id}}.safetensors",
            adapter_cache_dir=tmp_path / "cache",
        )
        expected = await text_of(engine, "a0"), await text_of(engine, None)
        far.answers["/far.safetensors"] = slow(file, before=asyncio.Event())
        downloading = [asyncio.create_task(said(engine, "far")) for _ in range(3)]
        async with asyncio.timeout(30):
            while not far.count("/far.safetensors"):
                await asyncio.sleep(0.005)
        meanwhile = await text_of(engine, "a0"), await text_of(engine, None)
        assert meanwhile == expected
        assert not any(task.done() for task in downloading)
    outcomes = await asyncio.gather(*downloading, return_exceptions=True)
    assert far.count("/far.safetensors") == 1, "downloaded once for all who wait"
    assert all(isinstance(outcome, AdapterSourceError) for outcome in outcomes)
    assert (await text_of(engine, "a0"), await text_of(engine, None)) == expected
    assert engine.num_requests == 0
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
