"""A whole evaluation through the engine, on a model whose answers are noise."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import EngineStopped, RequestError
from kestrel.evals.plans import EvalPlan
from kestrel.evals.questions import (
    HELD_OUT_SEED,
)
from kestrel.evals.run import Evaluation, ScenePictures, Tally, pictures_per_batch, run_eval
from kestrel.request import RequestMetrics
from kestrel.train.scenes.atlas import SpriteAtlas
from tests.moondream.coarse import coarse_folder

SMALL: dict[str, Any] = {"num_questions": 2, "max_new_tokens": 3, "concurrency": 4}
FAMILIES = ("presence", "think_count", "caption_short", "segment", "refusal_without_picture")


def config(folder: Path, **given: Any) -> RuntimeConfig:
    return RuntimeConfig(model_path=folder, device="cpu", max_batch_size=4, **{"kv_cache_pages": 400, **given})


async def evaluated(settings: RuntimeConfig, atlas: SpriteAtlas, families: tuple[str, ...]) -> Evaluation:
    async with await InferenceEngine.create(settings) as engine:
        return await run_eval(engine, EvalPlan(families=families, **SMALL), atlas)


async def test_every_question_is_answered_and_judged(random_model: Path, atlas: SpriteAtlas) -> None:
    progress: list[tuple[int, int]] = []
    plan = EvalPlan(families=FAMILIES, **SMALL)
    async with await InferenceEngine.create(config(random_model)) as engine:
        evaluation = await run_eval(engine, plan, atlas, lambda *done: progress.append(done))
    assert {family: result.n for family, result in evaluation.families.items()} == dict.fromkeys(FAMILIES, 2)
    assert progress == [(number, 10) for number in range(1, 11)]
    assert (evaluation.left_out, evaluation.failures) == ({}, [])
    speed = evaluation.throughput
    assert speed.num_requests == 12  # thoughts are asked twice
    assert speed.output_tokens >= 12
    assert speed.seconds > 0
    assert 0 < speed.p50_latency_ms <= speed.p95_latency_ms <= 1000 * speed.seconds


async def test_what_a_model_cannot_do_is_left_out_and_said(atlas: SpriteAtlas) -> None:
    without_outlines = config(coarse_folder("md3"), kv_cache_pages=200)
    evaluation = await evaluated(without_outlines, atlas, ("presence", "segment"))
    assert set(evaluation.families) == {"presence"}
    assert "segment is not supported by md3" in evaluation.left_out["segment"]
    with pytest.raises(RequestError, match="none can be asked: skill: segment is not supported"):
        await evaluated(without_outlines, atlas, ("segment",))


async def test_a_request_that_fails_counts_as_wrong(random_model: Path, atlas: SpriteAtlas) -> None:
    evaluation = await evaluated(config(random_model, max_image_pixels=100), atlas, ("presence",))
    assert len(evaluation.failures) == 2
    assert evaluation.failures[0].startswith("presence: image: ")
    assert evaluation.families["presence"].n == 2
    assert (evaluation.throughput.num_requests, evaluation.throughput.p50_latency_ms) == (0, 0.0)


async def test_an_engine_that_stops_ends_the_evaluation(random_model: Path, atlas: SpriteAtlas) -> None:
    engine = await InferenceEngine.create(config(random_model))
    await engine.shutdown()
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(run_eval(engine, EvalPlan(families=("presence",), **SMALL), atlas), 30)


def test_a_scene_looks_the_same_alone_and_among_others(atlas: SpriteAtlas) -> None:
    pictures = ScenePictures(atlas, (48, 64))
    together = pictures.draw([HELD_OUT_SEED, HELD_OUT_SEED + 1, HELD_OUT_SEED + 2])
    assert [picture.digest for picture in together[1:2]] == [pictures.draw([HELD_OUT_SEED + 1])[0].digest]
    assert together[0].pixels.shape == (48, 64, 3)
    assert len({picture.digest for picture in together}) == 3


def test_fewer_large_pictures_are_held_at_once() -> None:
    sizes = ((378, 378), (1024, 2048), (2048, 2048), (4096, 4096), (4096, 8192))
    assert [pictures_per_batch(size) for size in sizes] == [64, 8, 4, 1, 1]


def test_throughput_is_over_busy_time() -> None:
    tally = Tally()
    tally.busy_s = 2.0
    for latency_ms in (30, 10, 20, 40):
        tally.add(latency_ms / 1000, RequestMetrics(output_tokens=5))
    speed = tally.throughput()
    assert (speed.num_requests, speed.requests_per_s, speed.output_tokens, speed.tokens_per_s) == (4, 2.0, 20, 10.0)
    assert (speed.p50_latency_ms, speed.p95_latency_ms) == (pytest.approx(20), pytest.approx(40))
