"""The second stage of segmentation: loaded with the model, applied to the coarse outline, never in the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kestrel.engine import InferenceEngine
from kestrel.engine.intake import RefinedSegment
from kestrel.errors import CheckpointError
from kestrel.images.picture import RgbImage
from kestrel.request import FinishReason, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.tokens import Token
from tests.engine.conftest import GOLDENS, config

HEAD = GOLDENS / "segment" / "refiner_head.safetensors"
BOX = {"x_min": 0.2, "y_min": 0.2, "x_max": 0.7, "y_max": 0.8}


class CoarseSquare:
    """A finished segment: the whole box."""

    def __init__(self, path: str = "M 0 0 L 1 0 L 1 1 L 0 1 Z") -> None:
        self.path = path

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        return StreamDelta("x")

    def flush(self) -> StreamDelta | None:
        return None

    def finish(self, reason: FinishReason) -> SkillOutput:
        segment = {"svg_path": self.path, "bbox": dict(BOX), "coarse_path": self.path, "coarse_bbox": dict(BOX)}
        return SkillOutput({"segments": [segment], "path": self.path, "bbox": dict(BOX)}, "")


@pytest.fixture
async def refining_engine(tmp_path: Path):
    folder = tmp_path / "with-segment"
    shutil.copytree(GOLDENS / "md3", folder)
    described = json.loads((folder / "config.json").read_text())
    described["tokenizer"]["templates"]["segment"] = {"prefix": [1, 313, 2], "suffix": [3]}
    (folder / "config.json").write_text(json.dumps(described))
    engine = await InferenceEngine.create(config("md3", model_path=folder, refiner_path=HEAD))
    yield engine
    await engine.shutdown(drain=False)


async def test_the_refined_outline_takes_the_place_of_the_coarse_one(refining_engine: InferenceEngine) -> None:
    refiner = refining_engine._ready.refiner
    assert refiner is not None
    pixels = np.random.default_rng(1).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    image = RgbImage.from_pixels(pixels)
    state = RefinedSegment(CoarseSquare(), refiner, image)
    output = state.finish(FinishReason.STOP).fields
    expected = refiner.refine_outline(image, CoarseSquare().path, BOX)
    segment = output["segments"][0]
    assert expected is not None
    assert (segment["svg_path"], segment["bbox"]) == expected == (output["path"], output["bbox"])
    assert segment["svg_path"] != segment["coarse_path"] == CoarseSquare().path


async def test_an_answer_without_an_outline_is_left_alone(refining_engine: InferenceEngine) -> None:
    refiner = refining_engine._ready.refiner
    assert refiner is not None
    state = RefinedSegment(CoarseSquare(path=""), refiner, RgbImage.from_pixels(np.zeros((8, 8, 3), np.uint8)))
    assert state.finish(FinishReason.STOP).fields["path"] == ""


async def test_segment_runs_through_the_second_stage(refining_engine: InferenceEngine) -> None:
    result = await refining_engine.segment(GOLDENS / "image_small.png", "dog", max_new_tokens=12)
    assert {"path", "bbox", "segments"} <= result.output.keys()
    assert "coarse_path" in result.output["segments"][0]


async def test_a_damaged_refiner_stops_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "refiner.safetensors"
    broken.write_bytes(HEAD.read_bytes()[:1000])
    with pytest.raises(CheckpointError):
        await InferenceEngine.create(config("md3", refiner_path=broken))
