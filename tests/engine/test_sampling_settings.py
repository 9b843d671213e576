"""The sampling settings through the public calls, on the embedded model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import RequestError
from tests.engine.fake_engine import fake_engine
from tests.scene import SCENE

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "What color is the background?"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[InferenceEngine]:
    """One for all, which encodes the scene once."""
    config = RuntimeConfig(device="cpu", dtype="float32", kv_cache_pages=600, max_batch_size=16)
    async with await InferenceEngine.create(config) as running:
        yield running


@pytest.mark.exhaustive
async def test_stop_strings_cut_captions_where_str_find_does(engine: InferenceEngine) -> None:
    whole = (await engine.caption(SCENE, "normal", settings=GREEDY)).text
    assert len(whole) > 20

    async def cut_at(stop: str) -> None:
        stream = await engine.caption(SCENE, "normal", settings=GREEDY, stop=stop, stream=True)
        chunks = [chunk.text async for chunk in stream]
        result = await stream.result()
        expected = whole[: whole.find(stop)] if stop in whole else whole
        assert "".join(chunks) == result.text == result.output["caption"] == expected
        assert stop not in whole or result.finish_reason == "stop"

    stops = [whole[4:7], whole[len(whole) // 2 :][:5], whole[-2:], whole[9], "never said"]
    await asyncio.gather(*map(cut_at, stops))
    assert engine.snapshot().num_running == 0


async def test_streamed_logprobs_are_those_of_the_result(engine: InferenceEngine) -> None:
    stream = await engine.caption(SCENE, "normal", settings=GREEDY, logprobs=2, stream=True)
    chunks = [chunk async for chunk in stream]
    result = await stream.result()
    entries = result.output["logprobs"]
    assert [entry for chunk in chunks for entry in chunk.logprobs] == entries
    assert bytes(octet for entry in entries for octet in entry["bytes"]).decode() == result.text
    for entry in entries:
        assert entry["top"][0] == {key: entry[key] for key in ("id", "token", "bytes", "logprob")}  # greedy
        assert len(entry["top"]) == 2


async def test_the_same_seed_gives_the_same_text_in_any_company(engine: InferenceEngine) -> None:
    everything: dict[str, Any] = {
        "temperature": 1.3,
        "seed": 5,
        "max_tokens": 24,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {"300": 4, "301": -100},
        "min_tokens": 12,
        "stop_token_ids": [310],
        "stop": ["zq", "\n\n"],
    }
    alone = await engine.query(SCENE, QUESTION, reasoning=False, settings=everything)
    others = [engine.query(SCENE, QUESTION, reasoning=False, settings=everything | {"seed": i}) for i in range(6, 12)]
    crowd = [engine.caption(SCENE, "short", settings=GREEDY), engine.detect(SCENE, "cow"), *others]
    _, _, *_, again = await asyncio.gather(*crowd, engine.query(SCENE, QUESTION, reasoning=False, settings=everything))
    assert again.text == alone.text
    assert alone.metrics.output_tokens >= 12
    other = await engine.query(SCENE, QUESTION, reasoning=False, settings=everything | {"seed": 99})
    assert other.text != alone.text


async def test_settings_at_their_lowest_values_run(engine: InferenceEngine) -> None:
    async def caption(**settings: Any) -> str:
        return (await engine.caption(SCENE, "normal", max_tokens=12, **settings)).text

    warm, lowest, highest = {"temperature": 2.0, "top_p": 1.0}, -(2**63), 2**63 - 1
    likeliest, greedy, all_kept, none_cut, *seeded = await asyncio.gather(
        caption(temperature=2.0, top_p=0),
        caption(temperature=0),
        caption(**warm, seed=3, top_k=-1),
        caption(**warm, seed=3, top_k=0),
        *(caption(**warm, seed=seed) for seed in (lowest, -1, highest, 0, lowest)),
    )
    assert likeliest == greedy
    assert all_kept == none_cut
    assert seeded[0] == seeded[-1]
    assert len(set(seeded)) == 4


async def test_ends_can_be_put_off_and_ignored(engine: InferenceEngine) -> None:
    short = await engine.query(SCENE, QUESTION, reasoning=False, settings=GREEDY)
    assert short.metrics.output_tokens < 10
    longer = await engine.query(SCENE, QUESTION, reasoning=False, settings=GREEDY | {"min_tokens": 10})
    assert longer.metrics.output_tokens >= 10
    longest = await engine.query(SCENE, QUESTION, reasoning=False, settings=GREEDY | {"ignore_eos": True})
    assert (longest.metrics.output_tokens, longest.finish_reason) == (40, "length")


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {"320": 1.0}), ("stop_token_ids", [320]), ("suppressed_ids", [320])]
)
async def test_ids_outside_the_vocabulary_are_refused_by_name(field: str, value: Any) -> None:
    engine = fake_engine()
    try:
        with pytest.raises(RequestError, match="token id 320 does not exist; ids run from 0 to 319") as caught:
            await engine.submit("hi", **{field: value})
        assert caught.value.field == field
    finally:
        await engine.shutdown()


async def test_id_lists_that_allow_only_the_end_contradict_a_put_off_end() -> None:
    engine = fake_engine()
    try:
        with pytest.raises(RequestError, match="allowed_ids: leaves no token"):
            await engine.submit("hi", allowed_ids=[0], ignore_eos=True)
        with pytest.raises(RequestError, match="allowed_ids: leaves no token"):
            await engine.submit("hi", allowed_ids=[0, 40], stop_token_ids=[40], min_tokens=3)
        assert (await engine.submit("hi", allowed_ids=[40], stop_token_ids=[40])).output["token_ids"] == []
        with pytest.raises(RequestError, match="stop_token_ids: name the end id, which ignore_eos forbids"):
            await engine.submit("hi", stop_token_ids=[7, 0], ignore_eos=True)
    finally:
        await engine.shutdown()
