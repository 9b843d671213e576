from __future__ import annotations

from pathlib import Path

from kestrel.bench.second_question import measure
from kestrel.config import RuntimeConfig

GOLDENS = Path(__file__).parents[1] / "goldens"


async def test_a_second_question_finds_the_picture_and_is_faster() -> None:
    found = await measure(RuntimeConfig(model_path=GOLDENS / "md2", device="cpu"), GOLDENS / "image_multi.png", 2)
    assert found.cached_tokens >= 730
    assert found.ratio > 1
