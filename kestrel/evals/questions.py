"""What an evaluation asks: questions about held-out scenes with their exact truth.

A question depends on its family and its scene's seed alone, so that a run over some of the families, or a shorter run,
asks a part of the same questions. Points, boxes and counted thoughts are asked by the singular name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import numpy as np

from kestrel.evals.metrics import Box
from kestrel.evals.plans import EvalPlan
from kestrel.train.scenes.outlines import unit_path
from kestrel.train.scenes.sampling import FIRST_HELD_OUT_SEED, HELD_OUT, sample_batch, scene_at
from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks.example import Apart, Piece, SpecialToken, TaskExample, yes_or_no
from kestrel.train.tasks.locating import box_tokens, located_group
from kestrel.train.tasks.mix import SAMPLERS
from kestrel.train.tasks.questions import counted_group, how_many, is_there, sought_group
from kestrel.train.tasks.references import clear_box, share_inside
from kestrel.train.tasks.view import Group, SceneView, TaskWorld

HELD_OUT_SEED = FIRST_HELD_OUT_SEED
HELD_OUT_DIFFICULTY = HELD_OUT


# ---------------------------------------------------------------------- right replies, one type for each way of judging


@dataclass(frozen=True, slots=True)
class AnswerTruth:
    answer: str
    is_printed: bool = False
    """Whether the answer is text of the picture, to be given exactly as printed."""


@dataclass(frozen=True, slots=True)
class CountTruth:
    count: int


@dataclass(frozen=True, slots=True)
class ReadingTruth:
    answer: AnswerTruth
    """Not printed where there is nothing to read."""


@dataclass(frozen=True, slots=True)
class PointsTruth:
    boxes: tuple[Box, ...]
    """Of every object asked about; none when it is not there."""


@dataclass(frozen=True, slots=True)
class BoxesTruth:
    kind: str
    """The class that average precision counts it under: the name asked for, without a colour."""
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class OutlineTruth:
    height: int
    width: int
    box: Box | None
    """None when the object asked about is not there."""
    path: str
    """SVG, from 0 to 1 inside the box."""


@dataclass(frozen=True, slots=True)
class CaptionTruth:
    caption: str
    names: tuple[str, ...]
    """The kind of every object, repeated as often as it is there."""


@dataclass(frozen=True, slots=True)
class ThoughtTruth:
    answer: AnswerTruth
    boxes: tuple[Box, ...] | None
    """Where a thought may point; None where it has no reason to point at all."""


Truth: TypeAlias = (
    AnswerTruth | CountTruth | ReadingTruth | PointsTruth | BoxesTruth | OutlineTruth | CaptionTruth | ThoughtTruth
)


@dataclass(frozen=True, slots=True)
class Question:
    """`fields` go to the skill as a caller would give them, without the picture."""

    family: str
    skill: str
    fields: Mapping[str, Any]
    truth: Truth
    sees_image: bool = True

    @property
    def direct_fields(self) -> Mapping[str, Any] | None:
        """The same question to be answered without thinking; None for one that is not thought about."""
        return {**self.fields, "reasoning": False} if isinstance(self.truth, ThoughtTruth) else None


# ---------------------------------------------------------------------- questions about scenes

SCENES_PER_BATCH = 64
MAX_SCENES_PER_QUESTION = 64
"""How long to look for scenes that offer a question; every family finds one in three or so."""

Asker = Callable[[SceneView, Random], Question | None]
TruthMaker = Callable[[SceneView, TaskExample], Truth]


@dataclass(frozen=True, slots=True)
class AskedScene:
    seed: int
    questions: tuple[Question, ...]


def held_out_questions(plan: EvalPlan, world: TaskWorld) -> list[AskedScene]:
    """Scenes in the order of their seeds, until every family has its questions (or hardly any scene offers one)."""
    missing = dict.fromkeys(plan.families, plan.num_questions)
    asked: list[AskedScene] = []
    for first in range(0, MAX_SCENES_PER_QUESTION * plan.num_questions, SCENES_PER_BATCH):
        seeds = HELD_OUT_SEED + np.arange(first, first + SCENES_PER_BATCH)
        batch = sample_batch(seeds, *plan.size, HELD_OUT_DIFFICULTY)
        for row in range(len(seeds)):
            missing = {family: count for family, count in missing.items() if count}
            if not missing:
                return asked
            view = SceneView(scene_at(batch, row), world)
            questions = [question for family in missing if (question := question_about(view, family)) is not None]
            for question in questions:
                missing[question.family] -= 1
            if questions:
                asked.append(AskedScene(view.scene.seed, tuple(questions)))
    return asked


def question_about(view: SceneView, family: str) -> Question | None:
    """None when the scene offers no question of that family."""
    rng = Random(f"{view.scene.seed} {family}")
    if family in _BUILT:
        return _BUILT[family](view, rng)
    example = SAMPLERS[family](view, rng)
    if example is None:
        return None
    truth = _SAMPLED[family](view, example)
    return Question(family, example.skill, example.fields, truth, example.sees_image)


# ---------------------------------------------------------------------- truths of sampled questions


def said(target: tuple[Piece, ...]) -> AnswerTruth:
    """What the text of a target says; of a thought only what follows it."""
    text, is_printed = "", False
    for piece in target:
        if isinstance(piece, SpecialToken):
            text, is_printed = "", False
        elif isinstance(piece, Apart):
            text, is_printed = text + "".join(piece.pieces), True
        elif isinstance(piece, str):
            text += piece
    return AnswerTruth(text.strip(), is_printed)


def _answer(view: SceneView, example: TaskExample) -> AnswerTruth:
    return said(example.target)


def _count(view: SceneView, example: TaskExample) -> CountTruth:
    return CountTruth(int(said(example.target).answer))


def _reading(view: SceneView, example: TaskExample) -> ReadingTruth:
    return ReadingTruth(said(example.target))


def _plain_thought(view: SceneView, example: TaskExample) -> ThoughtTruth:
    return ThoughtTruth(said(example.target), boxes=None)


def _caption(view: SceneView, example: TaskExample) -> CaptionTruth:
    return CaptionTruth(said(example.target).answer, tuple(thing.name for thing in view.objects))


def _outline(view: SceneView, example: TaskExample) -> OutlineTruth:
    height, width = view.scene.height, view.scene.width
    if not example.target:
        return OutlineTruth(height, width, None, "")
    (thing,) = (each for each in view.objects if box_tokens(each) == example.target[:3])
    path = view.world.outlines.path(thing.kind, thing.is_flipped)
    return OutlineTruth(height, width, thing.box, unit_path(" ".join(map(str, path))))


_SAMPLED: Mapping[str, TruthMaker] = {
    "what": _answer,
    "contents": _answer,
    "colour": _answer,
    "background": _answer,
    "count": _count,
    "count_all": _count,
    "presence": _answer,
    "where": _answer,
    "beside": _answer,
    "bigger": _answer,
    "read": _reading,
    "think_other": _plain_thought,
    "caption_short": _caption,
    "caption_normal": _caption,
    "caption_long": _caption,
    "segment": _outline,
    "segment_here": _outline,
    "here": _answer,
    "count_in_box": _count,
    "refusal": _answer,
    "refusal_without_picture": _answer,
}


# ---------------------------------------------------------------------- questions about a known group


def _point(view: SceneView, rng: Random) -> Question:
    group = located_group(view, rng)
    return Question("point", "point", {"object": group.singular}, PointsTruth(_boxes(group.objects)))


def _detect(view: SceneView, rng: Random) -> Question:
    group = located_group(view, rng)
    truth = BoxesTruth(_kind_of(group, view.world), _boxes(group.objects))
    return Question("detect", "detect", {"object": group.singular}, truth)


def _point_in_box(view: SceneView, rng: Random) -> Question | None:
    box = clear_box(view, rng)
    if box is None:
        return None
    group = counted_group(view, rng) if rng.random() < 0.8 else view.everything
    inside = tuple(thing for thing in group.objects if share_inside(thing, box) > 0.5)
    fields = {"object": group.singular, "spatial_refs": (box,)}
    return Question("point_in_box", "point", fields, PointsTruth(_boxes(inside)))


def _think_count(view: SceneView, rng: Random) -> Question:
    group = counted_group(view, rng)
    return _thought_about("think_count", how_many(rng, group), str(len(group)), group)


def _think_presence(view: SceneView, rng: Random) -> Question:
    group = sought_group(view, rng)
    return _thought_about("think_presence", is_there(rng, group), yes_or_no(len(group) > 0), group)


_BUILT: Mapping[str, Asker] = {
    "point": _point,
    "detect": _detect,
    "point_in_box": _point_in_box,
    "think_count": _think_count,
    "think_presence": _think_presence,
}


def _thought_about(family: str, question: str, answer: str, group: Group) -> Question:
    truth = ThoughtTruth(AnswerTruth(answer), _boxes(group.objects))
    return Question(family, "query", {"question": question, "reasoning": True}, truth)


def _boxes(things: tuple[SceneObject, ...]) -> tuple[Box, ...]:
    return tuple(thing.box for thing in things)


def _kind_of(group: Group, world: TaskWorld) -> str:
    """ "star" for "red star"; what is no kind ("object", "text", "dragon") is a class of its own."""
    matching = (name for name in world.names if f" {group.singular}".endswith(f" {name}"))
    return next(matching, group.singular)
