"""Calls of tools by a real small model: required and named ones fit their schemas, whatever these ask for."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine
from tests.constraints.json_walks import assert_valid

WORDS = ("city", "unit", "count", "query", "is_open", "tags", "price", "naïve", "a b", "日付")


def random_schema(choose: random.Random, size: int) -> dict[str, Any]:
    """Of values that end by themselves."""
    kinds = ["text", "enum", "integer", "number", "boolean", "pattern", "either"]
    kind = choose.choice(kinds + ["list", "object"] * (size > 1))
    match kind:
        case "text":
            return {"type": "string", "maxLength": choose.randint(0, 8)}
        case "enum":
            return {"enum": choose.sample(["red", "green", 5, None, True, "é"], choose.randint(1, 4))}
        case "integer":
            low = choose.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 500)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 2, "multipleOf": 0.25}
        case "boolean":
            return {"type": "boolean"}
        case "pattern":
            return {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"}
        case "either":
            return {"anyOf": [{"type": "boolean"}, {"const": choose.choice(WORDS)}]}
        case "list":
            return {"type": "array", "items": random_schema(choose, size - 1), "maxItems": choose.randint(0, 3)}
    return random_parameters(choose, size - 1) | {"additionalProperties": False}


def random_parameters(choose: random.Random, size: int) -> dict[str, Any]:
    names = choose.sample(WORDS, choose.randint(0, size))
    properties = {name: random_schema(choose, size) for name in names}
    return {"type": "object", "properties": properties, "required": [name for name in names if choose.random() < 0.7]}


async def called(
    engine: InferenceEngine, seed: int, size: int, turns: asyncio.Semaphore
) -> tuple[EngineResult, dict[str, dict[str, Any]]]:
    """One of several tools, or one by its name. `turns`: an engine takes so many new formats at once."""
    choose = random.Random(seed)
    schemas = {f"tool_{at}": random_parameters(choose, size) for at in range(choose.randint(1, max(1, size - 1)))}
    tools = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in schemas.items()]
    choice: Any = "required"
    if seed % 2:
        choice = {"type": "function", "function": {"name": "tool_0"}}
        schemas = {"tool_0": schemas["tool_0"]}
    how = {"temperature": choose.choice([0.0, 1.5]), "seed": seed, "max_tokens": 250, "parallel_tool_calls": False}
    asked = [{"role": "user", "content": "Paris?"}]
    async with turns:
        return await engine.run("chat", messages=asked, tools=tools, tool_choice=choice, **how), schemas


@pytest.mark.exhaustive
async def test_every_call_that_is_asked_for_fits_its_schema(smollm2: Path) -> None:
    seeds, size = range(200), 2
    config = RuntimeConfig(
        model_path=smollm2, device="cpu", max_seq_length=768, kv_cache_pages=1600, tool_parser="hermes"
    )
    async with await InferenceEngine.create(config) as engine:
        turns = asyncio.Semaphore(32)
        first = await called(engine, seeds[0], size, turns)  # what all prompts begin with is computed once
        others = await asyncio.gather(*(called(engine, seed, size, turns) for seed in seeds[1:]))
        for result, schemas in (first, *others):
            assert (result.finish_reason, result.text) == ("stop", "")
            (call,) = result.output["tool_calls"]
            assert_valid(call["function"]["arguments"], schemas[call["function"]["name"]])
