"""What the engine says when it is asked directly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine
from tests.scene import turned_scenes

GREEDY = {"temperature": 0.0}
KEYS = {"query": "answer", "caption": "caption", "point": "points", "detect": "objects", "segment": "path"}
NUM_SCENES = 4


@dataclass(frozen=True)
class Asked:
    skill: str
    fields: dict[str, Any]
    output: dict[str, Any]
    """The engine's own."""
    finish_reason: str


def questions(thing: str) -> list[tuple[str, dict[str, Any]]]:
    """Four about each of the scenes; points and boxes of the thing tell one scene from another."""
    found: list[tuple[str, dict[str, Any]]] = []
    for picture in turned_scenes()[:NUM_SCENES]:
        found += [
            ("point", {"image": picture, "object": thing, "settings": {"max_objects": 2}}),
            ("detect", {"image": picture, "object": thing, "settings": {"max_objects": 2}}),
            ("caption", {"image": picture, "settings": {**GREEDY, "max_tokens": 5}}),
            ("query", {"image": picture, "question": "How many bees are there?", "settings": GREEDY}),
        ]
    return found


def direct_answers(calls: list[tuple[str, dict[str, Any]]], adapters: Path, model: Path) -> list[Asked]:
    async def run() -> list[EngineResult]:
        config = RuntimeConfig(
            model_path=model, device="cpu", kv_cache_pages=600, max_batch_size=8, adapter_dir=adapters
        )
        async with await InferenceEngine.create(config) as engine:
            return await asyncio.gather(*(engine.run(skill, **fields) for skill, fields in calls))

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = asyncio.run(run())
    finally:
        torch.set_num_threads(before)
    pairs = zip(calls, results, strict=True)
    return [Asked(skill, fields, result.output, result.finish_reason) for (skill, fields), result in pairs]
