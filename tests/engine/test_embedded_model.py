"""Right answers: the embedded model on the demo's scene against its truth, alone and in a crowd, in both precisions.

These questions are ones it gets right, in the size of one crop too unless about crosses; its model card says what it
gets wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kestrel.cli import demo
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.evals.metrics import box_iou, match_points
from tests.exhaustive import sweep
from tests.scene import BEES, OBJECTS, SCENE

CROSSES = [thing for thing in OBJECTS if thing.name == "cross"]
ANSWERS = {
    "How many bees are there?": str(len(BEES)),
    "Is there a bee?": "yes",
    "Is there a dog?": "no",
    "What does the text say?": "Join",
}
OF_CROSSES = {
    "How many crosses are there?": str(len(CROSSES)),
    "How many yellow crosses are there?": str(sum(cross.colour == "yellow" for cross in CROSSES)),
}
GREEDY: dict[str, Any] = {"temperature": 0.0}


async def engine(**changes: Any) -> InferenceEngine:
    return await InferenceEngine.create(RuntimeConfig(device="cpu", kv_cache_pages=600, **changes))


@sweep(
    ("dtype", "scene"),
    [("bfloat16", SCENE), ("bfloat16", demo.SCENE), ("float32", demo.SCENE)],
    always=[("bfloat16", SCENE)],
)
async def test_answers_are_right_one_by_one_and_all_at_once(dtype: str, scene: Path) -> None:
    is_large = scene == demo.SCENE
    asked = ANSWERS | OF_CROSSES if is_large else ANSWERS
    name, places = ("cross", [cross.box for cross in CROSSES]) if is_large else ("bee", BEES)
    async with await engine(dtype=dtype, max_batch_size=16) as running:
        for question, answer in asked.items():
            assert (await running.query(scene, question, reasoning=False, **GREEDY)).text == answer, question
        calls = [running.query(scene, question, reasoning=False, **GREEDY) for question in asked]
        boxes, points, *answers = await asyncio.gather(running.detect(scene, "bee"), running.point(scene, name), *calls)
        assert [a.text for a in answers] == list(asked.values())
        found = [corners(box) for box in boxes.output["objects"]]
        assert len(found) == len(BEES)
        for truth in BEES:
            assert max(box_iou(box, truth) for box in found) > 0.7
        matches = match_points([(p["x"], p["y"]) for p in points.output["points"]], places)
        assert matches.num_matched == matches.num_predicted == matches.num_true


@pytest.mark.exhaustive
async def test_every_instance_is_outlined_in_its_own_box_piece_by_piece() -> None:
    async with await engine(dtype="bfloat16") as running:
        boxes = (await running.detect(SCENE, ["bee", "red cross"])).output["objects"]
        stream = await running.segment(SCENE, ["bee", "red cross"], instances="all", stream=True)
        pieces = [chunk async for chunk in stream]
        output = (await stream.result()).output
    segments = output["segments"]
    assert [one["label"] for one in segments] == [box["label"] for box in boxes]
    assert [one["label"] for one in segments].count("bee") == len(BEES) > 1
    for index, (box, segment) in enumerate(zip(boxes, segments, strict=True)):
        own = [piece for piece in pieces if piece.data is not None and piece.data["index"] == index]
        assert {piece.data["label"] for piece in own if piece.data is not None} == {box["label"]}
        assert box_iou(corners(box), corners(segment["bbox"])) > 0.7
        assert "".join(piece.text for piece in own if piece.kind == "path_delta") == segment["path"] != ""
        [first] = [piece.data for piece in own if piece.kind == "bbox"]
        assert first is not None
        assert (first["bbox"], first["pixels"]) == (segment["bbox"], segment["pixels"])
    assert output["image"] == {"width": 372, "height": 279}


def corners(box: Mapping[str, float]) -> tuple[float, float, float, float]:
    return box["x_min"], box["y_min"], box["x_max"], box["y_max"]


@pytest.mark.exhaustive
async def test_thinking_points_at_what_it_counts() -> None:
    async with await engine(dtype="bfloat16") as running:  # which has seen the picture above
        result = await running.query(SCENE, "How many bees are there?", reasoning=True, **GREEDY)
    assert result.output["answer"] == str(len(BEES))
    points = [p for ground in result.output["reasoning"]["grounding"] for p in ground["points"]]
    assert len(points) == len(BEES)
    for x_min, y_min, x_max, y_max in BEES:
        assert any(x_min <= x <= x_max and y_min <= y <= y_max for x, y in points)
