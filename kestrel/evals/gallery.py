"""The scenes of docs/gallery.md with their questions, drawn by lot, and whether an answer to one is right.

The scenes are the first ones from a seed on that have at least three objects; nobody looked at answers to choose them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel.evals.questions import Question, question_about
from kestrel.evals.scoring import CaptionResult, DetectResult, PointResult, Reply, SegmentResult, score
from kestrel.train.scenes.atlas import SpriteAtlas
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch, scene_at
from kestrel.train.scenes.textures import upload_atlas
from kestrel.train.tasks.view import SceneView, path_book, task_world

FIRST_SEED = 2 * 10**12 + 7000
SIZES = ((378, 378), (420, 560), (560, 420), (480, 640), (378, 756), (600, 600))
NUM_SCENES = 12
LEAST_OBJECTS = 3
FAMILIES = (
    "caption_short", "caption_normal", "count", "think_count", "presence", "what", "colour", "where", "beside",
    "bigger", "read", "point", "detect", "segment", "here",
)  # fmt: skip
ANSWERS_PER_SCENE = 6
DRAWN = ("segment", "detect", "point")


@dataclass(frozen=True, eq=False)
class GalleryScene:
    number: int
    view: SceneView
    pixels: NDArray[np.uint8]
    questions: tuple[Question, ...]


def gallery_scenes(atlas: SpriteAtlas) -> Iterator[GalleryScene]:
    textures, world = upload_atlas(atlas), task_world(path_book(atlas))
    seed = FIRST_SEED
    for number in range(1, NUM_SCENES + 1):
        size = SIZES[(number - 1) % len(SIZES)]
        while True:
            batch = sample_batch(np.array([seed]), *size, HELD_OUT)
            view = SceneView(scene_at(batch, 0), world)
            seed += 1
            if len(view.objects) >= LEAST_OBJECTS:
                break
        yield GalleryScene(number, view, draw_batch(batch, textures)[0].numpy(), chosen_questions(view))


def chosen_questions(view: SceneView) -> tuple[Question, ...]:
    """One of each family that the scene offers, as many as there is room for, by the scene's own dice."""
    offered = [question for family in FAMILIES if (question := question_about(view, family)) is not None]
    Random(view.scene.seed).shuffle(offered)
    first = [question for question in offered if question.skill in DRAWN][:2]
    rest = [question for question in offered if question.skill not in DRAWN]
    return (*first, *rest[: ANSWERS_PER_SCENE - len(first)])


def is_right(question: Question, output: Mapping[str, Any]) -> bool:
    """Whether the evaluation's own scoring finds nothing to object to; of an outline, an overlap of three quarters."""
    match score([Reply(question.truth, output, output)]):
        case PointResult(exact=exact):
            return exact == 1.0
        case DetectResult(f1=f1):
            return f1 == 1.0
        case SegmentResult(mean_iou=mean_iou, absent_accuracy=absent):
            return absent == 1.0 if mean_iou is None else mean_iou >= 0.75
        case CaptionResult(recall=recall, precision=precision):
            return recall == precision == 1.0
        case other:
            return other.accuracy == 1.0
