"""Held-out questions and what a model that is always right replies to them."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any

from kestrel.evals.metrics import Box
from kestrel.evals.plans import EvalPlan
from kestrel.evals.questions import (
    AnswerTruth,
    BoxesTruth,
    CaptionTruth,
    CountTruth,
    OutlineTruth,
    PointsTruth,
    Question,
    ReadingTruth,
    ThoughtTruth,
    held_out_questions,
)
from kestrel.evals.scoring import Reply
from kestrel.images.masks import BOX_FIELDS
from tests.train.tasks.made_scenes import world

NUM_QUESTIONS = 40


@lru_cache
def questions_by_family() -> dict[str, list[Question]]:
    questions: dict[str, list[Question]] = defaultdict(list)
    for scene in held_out_questions(EvalPlan(num_questions=NUM_QUESTIONS), world()):
        for question in scene.questions:
            questions[question.family].append(question)
    return questions


def perfect_replies(family: str) -> list[Reply[Any]]:
    return [
        Reply(question.truth, perfect_output(question.truth), direct_output(question.truth))
        for question in questions_by_family()[family]
    ]


def perfect_output(truth: object) -> dict[str, Any]:
    match truth:
        case AnswerTruth(answer=answer) | ReadingTruth(answer=AnswerTruth(answer=answer)):
            return {"answer": f" {answer}"}
        case CountTruth(count=count):
            return {"answer": str(count)}
        case PointsTruth(boxes=boxes):
            return {"points": [{"x": x, "y": y} for x, y in map(centre, boxes)]}
        case BoxesTruth(boxes=boxes):
            return {"objects": [as_fields(box) for box in boxes]}
        case OutlineTruth(box=None):
            return {"path": "", "bbox": None}
        case OutlineTruth(box=box, path=path) if box is not None:
            return {"path": path, "bbox": {name: min(max(v, 0.0), 1.0) for name, v in as_fields(box).items()}}
        case CaptionTruth(caption=caption):
            return {"caption": caption}
        case ThoughtTruth(answer=answer, boxes=boxes):
            grounding = [{"start_idx": 0, "end_idx": 1, "points": [list(centre(box))]} for box in boxes or ()]
            return {"answer": answer.answer, "reasoning": {"text": "I see.", "grounding": grounding}}
    raise AssertionError(truth)


def direct_output(truth: object) -> dict[str, Any]:
    return {"answer": truth.answer.answer} if isinstance(truth, ThoughtTruth) else {}


def centre(box: Box) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def as_fields(box: Box) -> dict[str, float]:
    return dict(zip(BOX_FIELDS, box, strict=True))
