"""Structured answers on a GPU, with a step in flight: whole, of the asked form, and of no effect on strangers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine

pytestmark = pytest.mark.gpu

GOLDENS = Path(__file__).parents[1] / "goldens"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "dog"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
WANTED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("family", ["md2", "md3"])
async def test_random_weights_write_what_the_schema_asks_for_beside_strangers(family: str) -> None:
    config = RuntimeConfig(model_path=GOLDENS / family, device="cuda", dtype="float32", max_batch_size=16)
    free = {"question": "what?", "reasoning": False, "temperature": 0.0, "max_tokens": 30}
    form = {"question": "what?", "reasoning": False, "temperature": 1.0, "top_p": 1.0, "response_format": WANTED}
    async with await InferenceEngine.create(config) as engine:
        alone = await engine.run("query", **free)
        calls = [engine.run("query", **form, seed=seed) for seed in range(8)]
        *answers, stranger = await asyncio.gather(*calls, engine.run("query", **free))
    assert stranger.text == alone.text
    for answer in answers:
        found = json.loads(answer.text)
        assert answer.finish_reason == "stop"
        assert set(found) == {"name", "count"}
        assert found["name"] in ("cat", "dog")
        assert 0 <= found["count"] <= 99
