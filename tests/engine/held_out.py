"""Drawn scenes that no training and no evaluation has seen, and questions about them with exact truth.

They are the first scenes from a seed on; nobody looked at answers to choose them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel.engine import EngineResult, InferenceEngine
from kestrel.evals.questions import Question, question_about
from kestrel.evals.scoring import FamilyResult, Reply, score
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch, scene_at
from kestrel.train.tasks.view import SceneView, path_book, task_world
from tests.sprites import sprite_atlas, sprite_textures

FIRST_SEED = 2 * 10**12 + 1000
NUM_SCENES = 8
SIZE = (378, 378)


@dataclass(frozen=True, eq=False)
class DrawnScene:
    view: SceneView
    pixels: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Asked:
    """A question about a picture."""

    question: Question
    pixels: NDArray[np.uint8]

    async def ask(self, engine: InferenceEngine, **options: Any) -> Any:
        fields = {"image": self.pixels, "temperature": 0.0, **self.question.fields, **options}
        return await engine.run(self.question.skill, **fields)


@lru_cache
def drawn_scenes() -> tuple[DrawnScene, ...]:
    atlas = sprite_atlas()
    batch = sample_batch(FIRST_SEED + np.arange(NUM_SCENES), *SIZE, HELD_OUT)
    pictures, world = draw_batch(batch, sprite_textures("cpu")).numpy(), task_world(path_book(atlas))
    return tuple(DrawnScene(SceneView(scene_at(batch, row), world), pictures[row]) for row in range(NUM_SCENES))


def asked_about(families: Sequence[str], num_scenes: int = NUM_SCENES) -> list[Asked]:
    """Every question of these families that the first scenes offer, scene by scene."""
    return [
        Asked(question, scene.pixels)
        for scene in drawn_scenes()[:num_scenes]
        for family in families
        if (question := question_about(scene.view, family)) is not None
    ]


def scored(asked: Sequence[Asked], results: Sequence[EngineResult], family: str | None = None) -> FamilyResult:
    """Against the truth; without a family all questions must be of one."""
    replies = [
        Reply(each.question.truth, result.output)
        for each, result in zip(asked, results, strict=True)
        if family in (None, each.question.family)
    ]
    return score(replies)
