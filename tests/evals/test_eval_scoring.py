"""Scorers on replies made by hand: perfect ones, empty ones, and some in between that can be worked out."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kestrel.evals.metrics import Box
from kestrel.evals.plans import FAMILY_NAMES
from kestrel.evals.questions import (
    AnswerTruth,
    BoxesTruth,
    CaptionTruth,
    CountTruth,
    OutlineTruth,
    PointsTruth,
    ReadingTruth,
    ThoughtTruth,
    question_about,
)
from kestrel.evals.scoring import (
    AnswerResult,
    CaptionResult,
    CountBand,
    CountResult,
    DetectResult,
    PointResult,
    ReadingResult,
    Reply,
    SegmentResult,
    ThinkingResult,
    is_right,
    mentioned_names,
    normal_form,
    only_number_in,
    score,
    score_boxes,
    score_captions,
    score_counts,
    score_outlines,
    score_points,
    score_reading,
    score_thoughts,
)
from kestrel.train.scenes.truth import Scene
from kestrel.train.tasks.mix import SAMPLERS
from kestrel.train.tasks.view import SceneView
from tests.train.tasks.driving import result_of
from tests.train.tasks.made_scenes import placed_scenes, world

from .perfect_replies import as_fields, perfect_replies, questions_by_family

LEFT: Box = (0.0, 0.0, 0.4, 0.4)
RIGHT: Box = (0.6, 0.0, 1.0, 0.4)
SQUARE = "M 0 0 L 1 0 L 1 1 L 0 1 Z"


def points(*places: tuple[float, float]) -> dict[str, Any]:
    return {"points": [{"x": x, "y": y} for x, y in places]}


def objects(*boxes: Box) -> dict[str, Any]:
    return {"objects": [as_fields(box) for box in boxes]}


# ---------------------------------------------------------------------- every family


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_truth_as_a_reply_gets_a_perfect_score(family: str) -> None:
    match score(perfect_replies(family)):
        case AnswerResult(accuracy=accuracy):
            assert accuracy == 1.0
        case CountResult(accuracy=accuracy, within_one=within_one, up_to_six=band):
            assert accuracy == within_one == band.accuracy == band.within_one == 1.0
        case ReadingResult(accuracy=accuracy, character_error_rate=errors, num_characters=characters):
            assert (accuracy, errors) == (1.0, 0.0)
            assert characters > 100
        case PointResult() as result:
            assert result.precision == result.recall == result.f1 == result.exact == result.absent_accuracy == 1.0
        case DetectResult() as result:
            assert result.precision == result.recall == result.f1 == result.absent_accuracy == 1.0
            assert [result.map50, result.ap50, result.scored_ap50, result.mean_iou] == pytest.approx([1.0] * 4)
        case SegmentResult() as result:
            assert result.mean_iou == 1.0
            assert result.mean_box_iou == pytest.approx(1.0, abs=1e-3)
            assert result.absent_accuracy in (1.0, None)
        case CaptionResult() as result:
            assert result.recall == result.precision == result.exact == 1.0
            assert result.num_present > 40
        case ThinkingResult() as result:
            assert result.accuracy == result.direct_accuracy == 1.0
            assert result.grounded_share == (None if family == "think_other" else 1.0)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_saying_nothing_scores_nothing_but_what_is_absent(family: str) -> None:
    match score([Reply(question.truth, {}) for question in questions_by_family()[family]]):
        case AnswerResult(accuracy=accuracy) | CountResult(accuracy=accuracy) | ReadingResult(accuracy=accuracy):
            assert accuracy == 0.0
        case PointResult() | DetectResult() as result:
            assert result.recall == result.f1 == 0.0
            assert result.absent_accuracy == 1.0
        case SegmentResult() as result:
            assert result.mean_iou == result.mean_box_iou == 0.0
            assert result.absent_accuracy in (1.0, None)
        case CaptionResult() as result:
            assert (result.recall, result.precision, result.exact) == (0.0, None, 0.0)
        case ThinkingResult() as result:
            assert (result.accuracy, result.direct_accuracy, result.grounded_share) == (0.0, 0.0, None)


SAMPLED = ("what", "contents", "read", "here", "think_other", "caption_long", "segment", "segment_here", "refusal")


@pytest.mark.parametrize("family", SAMPLED)
def test_what_training_teaches_is_scored_as_right(family: str) -> None:
    """The target of a question, decoded by the engine's own skill as if a model had generated it."""
    replies: list[Reply[Any]] = []
    for scene in placed_scenes()[:40]:
        view = SceneView(scene, world())
        question, example = question_about(view, family), SAMPLERS[family](view, Random(f"{scene.seed} {family}"))
        assert (question is None) == (example is None)
        if question is not None and example is not None:
            assert question.fields == example.fields
            replies.append(Reply(question.truth, result_of(example)))
    match score(replies):
        case AnswerResult(accuracy=accuracy) | ReadingResult(accuracy=accuracy) | ThinkingResult(accuracy=accuracy):
            assert accuracy == 1.0
        case CaptionResult(exact=exact):
            assert exact == 1.0
        case SegmentResult(mean_iou=mean_iou):
            assert mean_iou is not None
            assert mean_iou > 0.97
        case other:
            raise AssertionError(other)


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("reply", "truth", "right"),
    [
        ("cat", AnswerTruth("cat"), True),
        ("A cat.", AnswerTruth("cat"), True),
        ("Top  Left", AnswerTruth("top left"), True),
        ("four", AnswerTruth("4"), True),
        ("cats", AnswerTruth("cat"), False),
        ("", AnswerTruth("cat"), False),
        ("Tea", AnswerTruth("Tea", is_printed=True), True),
        ("tea", AnswerTruth("Tea", is_printed=True), False),
    ],
)
def test_form_does_not_matter_except_for_printed_text(reply: str, truth: AnswerTruth, right: bool) -> None:
    assert is_right(reply, truth) is right


def test_an_article_alone_stays() -> None:
    assert normal_form("The") == "the"
    assert normal_form("another") == "another"


@pytest.mark.parametrize(
    ("answer", "number"),
    [("3", 3), ("There are 3 cats.", 3), ("Two", 2), ("12", 12), ("1 or 2", None), ("many", None), ("9" * 5000, None)],
)
def test_an_answer_counts_when_it_gives_one_number(answer: str, number: int | None) -> None:
    assert only_number_in(answer) == number


def test_counts_are_judged_by_the_true_count_and_up_to_six() -> None:
    given = [(0, "0"), (0, "1"), (6, "6"), (6, "8"), (9, "none"), (9, "9")]
    result = score_counts([Reply(CountTruth(true), {"answer": answer}) for true, answer in given])
    assert result.by_count == {"0": CountBand(2, 0.5, 1.0), "6": CountBand(2, 0.5, 0.5), "9": CountBand(2, 0.5, 0.5)}
    assert result.up_to_six == CountBand(4, 0.5, 0.75)
    assert (result.n, result.accuracy, result.within_one) == (6, 0.5, pytest.approx(4 / 6))


def test_a_headline_without_questions_is_none() -> None:
    assert score_counts([Reply(CountTruth(9), {"answer": "9"})]).up_to_six == CountBand(0, None, None)


def test_character_errors_are_over_printed_text_only() -> None:
    printed, missing = ReadingTruth(AnswerTruth("Stone", is_printed=True)), ReadingTruth(AnswerTruth("no"))
    result = score_reading([Reply(printed, {"answer": "Store"}), Reply(missing, {"answer": "a long story"})])
    assert result == ReadingResult(2, 0.0, pytest.approx(1 / 5), 5, 0.0)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------- places


def test_a_missed_and_a_wrong_point_count_once_each() -> None:
    replies = [
        Reply(PointsTruth((LEFT, RIGHT)), points((0.2, 0.2))),
        Reply(PointsTruth((LEFT,)), points((0.2, 0.2), (0.9, 0.9))),
        Reply(PointsTruth(()), points()),
        Reply(PointsTruth(()), points((0.5, 0.5))),
    ]
    result = score_points(replies)
    assert (result.precision, result.recall) == (2 / 4, 2 / 3)
    assert result.f1 == pytest.approx(4 / 7)
    assert (result.exact, result.absent_accuracy) == (0.25, 0.5)


def test_mean_average_precision_is_over_the_kinds_that_are_there() -> None:
    replies = [
        Reply(BoxesTruth("cat", (LEFT,)), objects(LEFT)),
        Reply(BoxesTruth("star", (LEFT, RIGHT)), objects(LEFT)),
        Reply(BoxesTruth("dragon", ()), objects(RIGHT)),
    ]
    result = score_boxes(replies)
    assert result.map50 == pytest.approx((1.0 + 0.5) / 2)
    assert result.ap50 == pytest.approx(2 / 3)
    assert (result.precision, result.recall) == (2 / 3, 2 / 3)
    assert (result.mean_iou, result.absent_accuracy) == (pytest.approx(1.0), 0.0)


def test_scores_rank_the_boxes_and_tell_how_often_they_are_right() -> None:
    said = {"objects": [{**as_fields(RIGHT), "score": 0.25}, {**as_fields(LEFT), "score": 0.95}]}
    result = score_boxes([Reply(BoxesTruth("cat", (LEFT,)), said)])
    assert (result.ap50, result.scored_ap50) == (0.5, 1.0)
    assert {start: (band.n, band.precision) for start, band in result.reliability.items()} == {
        "0.2": (1, 0.0),
        "0.9": (1, 1.0),
    }


def test_a_box_that_overlaps_by_less_than_half_is_wrong() -> None:
    shifted = (0.2, 0.0, 0.6, 0.4)
    result = score_boxes([Reply(BoxesTruth("cat", (LEFT,)), objects(shifted))])
    assert (result.map50, result.mean_iou, result.f1) == (0.0, None, 0.0)


def test_outlines_are_compared_as_filled_areas() -> None:
    truth = OutlineTruth(100, 100, LEFT, SQUARE)
    half = {"path": "M 0 0 L 1 0 L 1 0.5 L 0 0.5 Z", "bbox": as_fields(LEFT)}
    result = score_outlines([Reply(truth, half), Reply(truth, {"path": SQUARE, "bbox": as_fields(LEFT)})])
    assert result.mean_iou == pytest.approx(0.75)
    assert result.mean_box_iou == pytest.approx(1.0)


@pytest.mark.parametrize(
    "output",
    [
        {"path": "", "bbox": as_fields(LEFT)},
        {"path": SQUARE, "bbox": None},
        {"path": SQUARE, "bbox": as_fields((0.5, 0.5, 1.5, 1.5))},
    ],
)
def test_an_outline_that_cannot_be_drawn_overlaps_nothing(output: dict[str, Any]) -> None:
    assert score_outlines([Reply(OutlineTruth(100, 100, LEFT, SQUARE), output)]).mean_iou == 0.0


def test_a_true_box_that_rounding_put_outside_the_picture_can_be_drawn() -> None:
    truth = OutlineTruth(100, 100, (-1e-5, 0.0, 0.4, 0.4), SQUARE)
    assert score_outlines([Reply(truth, {"path": SQUARE, "bbox": as_fields(LEFT)})]).mean_iou == 1.0


# ---------------------------------------------------------------------- captions and thoughts


@pytest.mark.parametrize(
    ("caption", "mentioned"),
    [
        ("A cat and 2 stars.", {"cat": 1, "star": 2}),
        (
            'An airplane, 2 red stars and the blue word "cat" on a green background.',
            {"airplane": 1, "star": 2, "word": 1},
        ),
        ("A picture of 2 objects on a red background: a fish in the center and a fish at the top.", {"fish": 2}),
        ("3 fish, two happy faces and a soccer ball.", {"fish": 3, "happy face": 2, "soccer ball": 1}),
        ("Some pandas and a castle.", {"panda": 1, "castle": 1}),
        ("0 cats.", {}),
        ("An empty picture with a blue background.", {}),
    ],
)
def test_a_caption_mentions_names_and_numbers(caption: str, mentioned: dict[str, int]) -> None:
    assert mentioned_names(caption) == mentioned


def test_objects_of_captions_are_matched_by_number() -> None:
    truth = CaptionTruth("A cat and 3 stars.", ("cat", "star", "star", "star"))
    result = score_captions([Reply(truth, {"caption": "2 cats and 2 stars."})])
    assert (result.num_present, result.num_mentioned, result.num_matched) == (4, 4, 3)
    assert (result.recall, result.precision, result.exact) == (0.75, 0.75, 0.0)


def test_a_thought_is_judged_by_its_answer_its_points_and_the_direct_answer() -> None:
    def output(answer: str, *places: tuple[float, float]) -> dict[str, Any]:
        return {"answer": answer, "reasoning": {"text": "", "grounding": [{"points": [list(p)]} for p in places]}}

    two = ThoughtTruth(AnswerTruth("2"), (LEFT, RIGHT))
    replies = [
        Reply(two, output("2", (0.2, 0.2), (0.8, 0.2)), {"answer": "2"}),
        Reply(two, output("3", (0.2, 0.2), (0.5, 0.9)), {"answer": "2"}),
        Reply(ThoughtTruth(AnswerTruth("top"), None), output("top", (0.5, 0.5)), {"answer": "left"}),
    ]
    assert score_thoughts(replies) == ThinkingResult(3, pytest.approx(2 / 3), pytest.approx(2 / 3), 4, 3, 0.75)  # pyright: ignore[reportArgumentType]


def test_scenes_of_captions_may_be_empty() -> None:
    view = SceneView(Scene(0, 378, 378, "green", ()), world())
    question = question_about(view, "caption_normal")
    assert question is not None
    result = score([Reply(question.truth, {"caption": "An empty picture with a green background."})])
    assert result == CaptionResult(1, None, None, 1.0, 0, 0, 0)
