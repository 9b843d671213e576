"""Held-out questions: never trained on, the same every time, with the truth of their scene."""

from __future__ import annotations

import numpy as np
import pytest

from kestrel.errors import ConfigError
from kestrel.evals.plans import FAMILY_NAMES, EvalPlan
from kestrel.evals.questions import (
    HELD_OUT_DIFFICULTY,
    HELD_OUT_SEED,
    AnswerTruth,
    BoxesTruth,
    CaptionTruth,
    OutlineTruth,
    PointsTruth,
    Question,
    ReadingTruth,
    ThoughtTruth,
    held_out_questions,
    said,
)
from kestrel.train.scenes.sampling import EASY, NORMAL, sample_batch, scene_at
from kestrel.train.scenes.truth import Scene
from kestrel.train.tasks.example import SpecialToken, spelt
from kestrel.train.tasks.mix import SAMPLERS
from tests.train.tasks.driving import meant_by, phrase_in
from tests.train.tasks.made_scenes import world

from .perfect_replies import NUM_QUESTIONS, questions_by_family


def asked(plan: EvalPlan) -> list[tuple[Scene, Question]]:
    scenes = held_out_questions(plan, world())
    batch = sample_batch(np.array([scene.seed for scene in scenes]), *plan.size, HELD_OUT_DIFFICULTY)
    truths = [scene_at(batch, row) for row in range(len(scenes))]
    return [(truth, question) for truth, scene in zip(truths, scenes, strict=True) for question in scene.questions]


def test_scenes_come_from_seeds_and_a_salt_that_training_never_uses() -> None:
    scenes = held_out_questions(EvalPlan(num_questions=30), world())
    assert HELD_OUT_SEED == 10**12
    assert min(scene.seed for scene in scenes) >= HELD_OUT_SEED
    assert HELD_OUT_DIFFICULTY.salt not in (NORMAL.salt, EASY.salt)


def test_every_family_of_training_is_asked_equally_often() -> None:
    assert set(FAMILY_NAMES) == set(SAMPLERS) == set(questions_by_family())
    assert {len(questions) for questions in questions_by_family().values()} == {NUM_QUESTIONS}


def test_fewer_families_or_questions_are_a_part_of_the_same_benchmark() -> None:
    everything = questions_by_family()
    for plan in (EvalPlan(num_questions=7, families=("read", "point")), EvalPlan(num_questions=3, families=("what",))):
        for family in plan.families:
            some = [question for _, question in asked(plan) if question.family == family]
            assert some == everything[family][: plan.num_questions]


def test_points_and_boxes_are_asked_by_the_singular_and_are_those_of_the_named_objects() -> None:
    num_absent = 0
    for scene, question in asked(EvalPlan(num_questions=60, families=("point", "detect"))):
        assert isinstance(question.truth, PointsTruth | BoxesTruth)
        named = meant_by(scene, question.fields["object"])
        assert sorted(question.truth.boxes) == sorted(thing.box for thing in named)
        num_absent += not named
    assert 10 < num_absent < 60


def test_a_class_of_boxes_has_no_colour() -> None:
    truths = [question.truth for question in questions_by_family()["detect"]]
    kinds = {truth.kind for truth in truths if isinstance(truth, BoxesTruth)}
    assert not any(kind.split()[0] in world().colours for kind in kinds)


def test_thoughts_may_point_at_all_objects_they_are_about() -> None:
    for scene, question in asked(EvalPlan(num_questions=60, families=("think_count", "think_presence"))):
        assert isinstance(question.truth, ThoughtTruth)
        assert question.truth.boxes is not None
        named = meant_by(scene, phrase_in(question.fields["question"]))
        assert sorted(question.truth.boxes) == sorted(thing.box for thing in named)
        expected = str(len(named)) if question.family == "think_count" else ("yes" if named else "no")
        assert question.truth.answer.answer == expected
        assert question.fields["reasoning"] is True
        assert question.direct_fields == {**question.fields, "reasoning": False}


def test_only_thoughts_are_asked_without_thinking_too() -> None:
    for family, questions in questions_by_family().items():
        assert all((question.direct_fields is not None) == family.startswith("think") for question in questions)
        assert all(not question.fields.get("reasoning", False) or family.startswith("think") for question in questions)


def test_outlines_are_those_of_a_named_object() -> None:
    num_absent = 0
    for scene, question in asked(EvalPlan(num_questions=60, families=("segment", "segment_here"))):
        assert isinstance(question.truth, OutlineTruth)
        named = meant_by(scene, question.fields["object"])
        if question.truth.box is None:
            assert not named
            num_absent += 1
        else:
            assert question.truth.box in [thing.box for thing in named]
            assert question.truth.path.startswith("M 0.5000 0.0000 L")
    assert num_absent


def test_captions_and_reading_know_what_is_there() -> None:
    for scene, question in asked(EvalPlan(num_questions=40, families=("caption_short", "read"))):
        if isinstance(question.truth, CaptionTruth):
            assert sorted(question.truth.names) == sorted(thing.name for thing in scene.objects)
        else:
            assert isinstance(question.truth, ReadingTruth)
            printed = [thing.text for thing in scene.objects if thing.text is not None]
            assert question.truth.answer.is_printed == bool(printed)
            assert question.truth.answer.answer in (printed or ["no"])


def test_of_a_thought_only_the_answer_is_said() -> None:
    thought = ("I look.", SpecialToken("answer"), spelt("Tea"))
    assert said(thought) == AnswerTruth("Tea", is_printed=True)
    assert said(("top", " left")) == AnswerTruth("top left")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_questions": 0}, "n: must be from 1"),
        ({"concurrency": 0}, "concurrency: must be from 1"),
        ({"size": (8, 378)}, "size: must be from 16"),
        ({"size": (378, 10**5)}, "size: must be from 16"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be from 1"),
        ({"families": ()}, "families: names none"),
        ({"families": ("count", "knitting")}, "there is no 'knitting'; known are: what"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EvalPlan(**given)  # pyright: ignore[reportArgumentType]
    assert message in str(caught.value)
