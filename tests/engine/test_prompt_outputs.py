"""Through the public engine: scored prompts as evaluation tools ask for them, and embeddings against a dense pass."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, EngineStream, InferenceEngine
from kestrel.errors import RequestError
from kestrel.request import TokenLogprobs
from kestrel.skills.logprobs import ShownTokens
from kestrel.tokens import ContextItem, ImageSpan, Text, TextToken
from tests.engine.conftest import GOLDENS, MakeEngine
from tests.engine.fake_engine import fake_engine
from tests.moondream.coarse import EMBEDDED, coarse, coarse_folder
from tests.moondream.goldens import FAMILIES
from tests.moondream.naive import NaiveMoondream
from tests.runtime.dense_prompt import dense_hidden, dense_logprobs
from tests.scene import SCENE

IDS = [0, *range(40, 75)]
PICTURE = GOLDENS / "image_small.png"


def scored_alone(fields: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in fields["prompt_logprobs"][1:]]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_scored_prompt_as_evaluation_tools_ask_for_it(family: str, make_coarse_engine: MakeEngine) -> None:
    """Token ids, echo, logprobs 1, and one token or none: both give the same prompt, as a dense pass does."""
    engine = await make_coarse_engine(family)
    logprobs_NV, ids = dense_logprobs(coarse(family).naive, Text(IDS), {})
    expected = logprobs_NV[torch.arange(len(ids)), ids].tolist()
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0.0}
    for max_tokens in (1, 0):
        result = await engine.submit(IDS, max_tokens=max_tokens, **asked)
        output = result.output
        assert (output["prompt_token_ids"], output["prompt_logprobs"][0]) == (IDS, None)
        assert scored_alone(output) == pytest.approx(expected, abs=1e-4)
        assert (len(output["token_ids"]), len(output["logprobs"])) == (max_tokens, max_tokens)
        assert (result.metrics.output_tokens, result.finish_reason) == (max_tokens, "length")


async def test_the_greedy_continuation_is_known_by_equality(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    told = await engine.submit(IDS, max_tokens=12, temperature=0.0, logprobs=1)
    continuation = told.output["token_ids"]
    assert len(continuation) == 12

    def ask(ids: list[int]) -> Any:
        return engine.submit([*IDS, *ids], echo=True, logprobs=1, max_tokens=0)

    other = [*continuation[:-1], continuation[-1] + 1]
    greedy, changed = await asyncio.gather(ask(continuation), ask(other))
    entries = greedy.output["prompt_logprobs"][len(IDS) :]
    chosen = [entry["logprob"] for entry in entries]
    assert chosen == pytest.approx([entry["logprob"] for entry in told.output["logprobs"]], abs=1e-4)
    assert all(entry["logprob"] == entry["top"][0]["logprob"] and entry["rank"] == 1 for entry in entries)
    last = changed.output["prompt_logprobs"][-1]
    assert last["logprob"] < last["top"][0]["logprob"]
    assert last["top"][0]["id"] == continuation[-1]


async def test_max_tokens_zero_needs_a_purpose(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    with pytest.raises(RequestError, match="max_tokens: must be at least 1"):
        await engine.submit(IDS, max_tokens=0)


async def test_a_stream_of_a_scored_prompt_ends_without_chunks(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    stream = await engine.submit(IDS, prompt_logprobs=0, max_tokens=0, stream=True)
    assert [chunk async for chunk in stream] == []
    assert len((await stream.result()).output["prompt_logprobs"]) == len(IDS)


async def test_scored_prompts_are_written_out_neither_by_the_worker_nor_on_the_event_loop(
    make_coarse_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of entries take long, and both threads are everybody's."""
    engine = await make_coarse_engine("md3")
    threads: set[str] = set()
    write = ShownTokens.entry

    def noting(self: ShownTokens, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        return write(self, token_id, logprobs)

    monkeypatch.setattr(ShownTokens, "entry", noting)
    stream = await engine.submit(IDS, prompt_logprobs=3, max_tokens=0, stream=True)
    first, second = await asyncio.gather(stream.result(), stream.result())
    assert len(first.output["prompt_logprobs"]) == len(second.output["prompt_logprobs"]) == len(IDS)
    assert isinstance(first.output["prompt_logprobs"], list)
    assert threads
    assert not threads & {"kestrel", threading.current_thread().name}


def dense_embedding(naive: NaiveMoondream, pixels: np.ndarray | None, ids: list[int]) -> list[float]:
    bos, images = naive.config.tokenizer.bos_id, {}
    items: list[ContextItem] = [TextToken(bos)]
    if pixels is not None:
        digest = hashlib.sha256(pixels.tobytes()).hexdigest()
        items, images = [ImageSpan(digest, 1 + naive.config.vision.num_patches, bos)], {digest: pixels}
    mean_D = dense_hidden(naive, [*items, *Text(ids)], images)[1:].double().mean(0)
    return (mean_D / mean_D.norm()).tolist()


def naive_of(engine: InferenceEngine) -> NaiveMoondream:
    model = engine._ready.runtime.decoder._model  # type: ignore[attr-defined]
    return NaiveMoondream(model, model.config, engine.profile.tokenizer)


async def assert_embeddings(engine: InferenceEngine, picture: Any, words: str, *, picture_alone: bool) -> None:
    naive, ids = naive_of(engine), engine.profile.tokenizer.encode(words)
    with Image.open(picture) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    calls: list[tuple[dict[str, Any], np.ndarray | None, list[int]]] = [
        ({"text": words}, None, ids),
        ({"token_ids": ids}, None, ids),
        ({"image": picture, "text": words}, pixels, ids),
    ]
    if picture_alone:
        calls.append(({"image": picture}, pixels, []))
    alone = [(await engine.embed(**fields)).output for fields, _, _ in calls]
    company = [engine.query(picture, "what is it?", max_tokens=5, reasoning=False) for _ in range(3)]
    crowd = await asyncio.gather(*company, *(engine.embed(**fields) for fields, _, _ in calls))
    crowded = [result.output for result in crowd[len(company) :]]
    for (_, image, own_ids), one, among_others in zip(calls, alone, crowded, strict=True):
        expected = dense_embedding(naive, image, own_ids)
        assert one["embedding"] == pytest.approx(expected, abs=1e-4)
        assert among_others["embedding"] == pytest.approx(one["embedding"], abs=1e-5)
        assert math.hypot(*one["embedding"]) == pytest.approx(1.0)
        num_patches = 0 if image is None else naive.config.vision.num_patches
        assert one["num_tokens"] == among_others["num_tokens"] == num_patches + len(own_ids)


@pytest.mark.parametrize("family", FAMILIES)
async def test_embeddings_are_those_of_a_dense_pass_alone_and_in_a_crowd(
    family: str, make_coarse_engine: MakeEngine
) -> None:
    engine = await make_coarse_engine(family, max_prefill_tokens=20)
    await assert_embeddings(engine, PICTURE, "the cat and the dog", picture_alone=True)


async def test_the_embedded_model_embeds_as_a_dense_pass_does_and_tells_texts_apart() -> None:
    """Its look is coarse; it reads as it does."""
    config = RuntimeConfig(model_path=coarse_folder(EMBEDDED), device="cpu", dtype="float32", kv_cache_pages=600)
    async with await InferenceEngine.create(config) as engine:
        await assert_embeddings(engine, SCENE, "How many cows are there?", picture_alone=False)
        texts = ("How many cows are there?", "How many dogs are there?", "green")
        cows, dogs, green = [(await engine.embed(text=words)).output["embedding"] for words in texts]
        assert np.dot(cows, dogs) > np.dot(cows, green)


async def test_the_fake_runtime_embeds_and_scores_too() -> None:
    engine = fake_engine()
    try:
        embedded = await engine.embed(token_ids=[3, 4])
        # Running sums 0, 3, 7 at positions 0, 1, 2; the first does not count: mean (5, 1.5).
        assert embedded.output["embedding"] == pytest.approx([5 / math.hypot(5, 1.5), 1.5 / math.hypot(5, 1.5)])
        scored = await engine.submit([3, 3, 4], prompt_logprobs=1, max_tokens=0)
        assert [e and (e["logprob"], e["top"][0]["id"]) for e in scored.output["prompt_logprobs"]] == [
            None,
            (-1.0, 3),
            (-2.0, 7),
        ]
    finally:
        await engine.shutdown(drain=False)


async def test_what_is_made_of_a_large_result_comes_without_its_lists(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine(FAMILIES[0])
    asked: dict[str, Any] = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0.0}
    whole = (await engine.submit(IDS, **asked)).output
    stream = await engine.run("complete", stream=True, prompt=IDS, **asked)
    assert isinstance(stream, EngineStream)

    def make(result: EngineResult) -> tuple[str, list[Any], list[Any]]:
        name = threading.current_thread().name
        return name, list(result.output["prompt_logprobs"]), result.output["logprobs"]

    result, (thread, scores, generated) = await stream.result_as(make)
    assert thread.startswith("kestrel-lists")
    assert (scores, generated) == (whole["prompt_logprobs"], whole["logprobs"])
    assert result.output == {}
    assert result.metrics.input_tokens == len(IDS)
    assert "prompt_logprobs" not in (await stream.result()).output
