from __future__ import annotations

from kestrel.bench.second_question import measure
from kestrel.config import RuntimeConfig
from tests.moondream.coarse import POSITIONS, coarse_folder
from tests.moondream.goldens import ROOT


async def test_a_second_question_finds_the_picture_and_is_faster() -> None:
    found = await measure(RuntimeConfig(model_path=coarse_folder("md2"), device="cpu"), ROOT / "image_multi.png", 2)
    assert found.cached_tokens >= POSITIONS
    assert found.ratio > 1
