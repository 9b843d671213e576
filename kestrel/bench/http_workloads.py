"""What both sides of a comparison are asked, a turn at a time."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 640, 480
SCENE = Path(__file__).parents[1] / "cli" / "demo_scene.png"
PART_WIDTH, PART_HEIGHT = 372, 279
SKILL = "query"


@dataclass(frozen=True)
class Workload:
    """The same question over and over; its picture, if it has one, is in the prefix cache after the first."""

    name: str
    num_tokens: int | None
    """Of each answer, exactly; None: answers as they come."""
    has_picture: bool
    concurrency: int
    num_requests: int
    """Per round."""

    def skill_of(self, number: int) -> str:
        """Of a request of a turn."""
        return SKILL

    def fields_of(self, skill: str) -> dict[str, Any]:
        tokens = {"max_tokens": self.num_tokens, "min_tokens": self.num_tokens, "ignore_eos": True}
        return {"question": "What is there?", "reasoning": False, "settings": {"temperature": 0.0, **tokens}}

    def pictures(self, turn: int) -> list[bytes | None]:
        """One for each request of a turn, made before its clock starts."""
        return [picture() if self.has_picture else None] * self.num_requests


class Labelling(Workload):
    """What people do to folders of pictures: each is new and asked about once, by one skill after the other."""

    def skill_of(self, number: int) -> str:
        return tuple(LABELS)[number % len(LABELS)]

    def fields_of(self, skill: str) -> dict[str, Any]:
        return LABELS[skill]

    def pictures(self, turn: int) -> list[bytes | None]:
        first = turn * self.num_requests
        return [cut_out(number) for number in range(first, first + self.num_requests)]


LABELS: dict[str, dict[str, Any]] = {
    "query": {"question": "How many bees are there?", "reasoning": False, "settings": {"temperature": 0.0}},
    "caption": {"length": "short", "settings": {"temperature": 0.0}},
    "point": {"object": "cross"},
    "detect": {"object": "bee"},
}
WORKLOADS = (
    Workload("1 token", 1, False, 1, 50),
    Workload("1 token, cached picture", 1, True, 1, 30),
    Workload("40 tokens, cached picture", 40, True, 16, 32),
    Workload("1 token, cached picture", 1, True, 16, 480),
    Labelling("four skills, new pictures", None, True, 16, 32),
)


def picture() -> bytes:
    """Coarse patches of chance colours as a JPEG: what it shows does not matter to the time."""
    coarse = np.random.default_rng(0).integers(0, 256, (HEIGHT // 40, WIDTH // 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((WIDTH, HEIGHT)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def cut_out(number: int) -> bytes:
    """A part of the demo's scene, one crop large, as a JPEG; hardly any two are the same."""
    with Image.open(SCENE) as opened:
        scene = opened.convert("RGB")
    dice = np.random.default_rng(number)
    left, top = int(dice.integers(scene.width - PART_WIDTH)), int(dice.integers(scene.height - PART_HEIGHT))
    buffer = io.BytesIO()
    scene.crop((left, top, left + PART_WIDTH, top + PART_HEIGHT)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
