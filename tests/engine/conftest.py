"""Engines over the golden models; requests in the shape of the golden cases."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from tests.moondream.coarse import coarse_folder
from tests.moondream.seen_crops import engines_encode_once
from tests.places import bare

GOLDENS = Path(__file__).parents[1] / "goldens"
MakeEngine = Callable[..., Awaitable[InferenceEngine]]


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def _crops_encoded_once() -> Iterator[None]:
    with engines_encode_once():
        yield


def cases(family: str) -> dict[str, dict[str, Any]]:
    return json.loads((GOLDENS / family / "cases.json").read_text())["cases"]


def picture(name: str | None) -> Path | None:
    return None if name is None else GOLDENS / f"image_{name}.png"


def config(family: str = "md3", **changes: Any) -> RuntimeConfig:
    options: dict[str, Any] = {"model_path": GOLDENS / family, "device": "cpu", "kv_cache_pages": 600}
    return RuntimeConfig(**(options | changes))


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    """Engines that are shut down after the test."""
    engines: list[InferenceEngine] = []

    async def make(family: str = "md3", skills: Any = None, **changes: Any) -> InferenceEngine:
        engine = await InferenceEngine.create(config(family, **changes), skills=skills)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.shutdown(drain=False, timeout_s=20)


@pytest.fixture
def make_coarse_engine(make_engine: MakeEngine) -> MakeEngine:
    """The same over their coarse copies, for what is not about a model's answers."""

    async def make(family: str = "md3", **changes: Any) -> InferenceEngine:
        return await make_engine(family, model_path=coarse_folder(family), **changes)

    return make


async def ask(engine: InferenceEngine, case: dict[str, Any], **more: Any) -> Any:
    """Run a golden case through the public skill methods."""
    image, settings = picture(case["image"]), case.get("settings")
    if "length" in case:
        return await engine.caption(image, case["length"], settings=settings, **more)
    if "object" in case:
        method = engine.detect if "objects" in case["output"] else engine.point
        return await method(image, case["object"], settings=settings, **more)
    return await engine.query(
        image,
        case["question"],
        reasoning=case.get("reasoning", False),
        spatial_refs=case.get("spatial_refs"),
        settings=settings,
        **more,
    )


def assert_same_output(ours: dict[str, Any], golden: dict[str, Any]) -> None:
    """Texts and points exactly, boxes within 2e-6."""
    ours = bare(ours)
    assert ours.keys() == golden.keys()
    if "objects" in golden:
        assert len(ours["objects"]) == len(golden["objects"])
        for box, expected in zip(ours["objects"], golden["objects"], strict=True):
            assert box == pytest.approx(expected, abs=2e-6)
    else:
        assert ours == golden
