"""An answer that one engine has begun goes on in another as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel.errors import RequestError
from tests.engine.conftest import MakeEngine, picture
from tests.engine.fake_engine import fake_engine

SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 5}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sampled": ("query", {"question": "what is the cat?", "reasoning": False, "max_tokens": 10, **SAMPLED}),
    "thinking": ("query", {"question": "what is the cat?", "reasoning": True, "max_tokens": 6, **SAMPLED}),
    "penalties and log-probabilities": (
        "query",
        {"question": "cat?", "reasoning": False, "max_tokens": 8, "frequency_penalty": 1.5, "logprobs": 2, **SAMPLED},
    ),
    "places": ("detect", {"object": "cat", "max_objects": 4, **SAMPLED}),
    "format": (
        "query",
        {"question": "cat?", "reasoning": False, "max_tokens": 30, "response_format": FORMAT, **SAMPLED},
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_an_answer_goes_on_from_any_chunk(make_coarse_engine: MakeEngine, case: str) -> None:
    skill, fields = CASES[case]
    first, second = await make_coarse_engine("md3"), await make_coarse_engine("md3")
    asked = {"image": picture("small"), "tells_tokens": True, **fields}
    stream = await first.run(skill, stream=True, **asked)
    chunks, num_cuts = [], 1
    while some := await stream.chunks():
        chunks += some
        num_cuts += 0 if stream.is_done else len(some)  # what comes with the result is told with it
    whole = await stream.result()
    assert chunks
    for cut in range(num_cuts):
        tokens = [token for chunk in chunks[:cut] for token in chunk.tokens]
        again = await second.run(skill, stream=True, **asked, resumed=tokens)
        assert [chunk async for chunk in again] == chunks[cut:], f"cut at {cut}"
        result = await again.result()
        assert (result.output, result.finish_reason) == (whole.output, whole.finish_reason)
        assert result.metrics.output_tokens == whole.metrics.output_tokens


async def test_tokens_are_told_only_to_those_who_ask_and_made_up_ones_are_refused() -> None:
    engine = fake_engine()
    stream = await engine.run("complete", prompt="ab", max_tokens=4, stream=True)
    assert not any([chunk.tokens async for chunk in stream])
    with pytest.raises(RequestError, match="resumed"):
        await engine.run("complete", prompt="ab", max_tokens=4, resumed=[{"token": 5}])
    told = await engine.run("complete", prompt="ab", max_tokens=4, stream=True, tells_tokens=True)
    tokens = [token async for chunk in told for token in chunk.tokens]
    with pytest.raises(RequestError, match="resumed"):
        await engine.run("complete", prompt="ab", max_tokens=len(tokens), resumed=tokens)
    await engine.shutdown()
