"""Replies judged against the truth, one scorer per kind of truth.

A reply is what the skill gave back as `output`; a request that failed counts as an empty one. Replies come in the order
of their questions, because average precision ranks boxes by their place in each reply and then by that order.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kestrel.errors import RequestError
from kestrel.evals.mentions import mentioned_names
from kestrel.evals.metrics import (
    Box,
    CharacterErrors,
    Matches,
    Point,
    PrecisionRecall,
    RankedHit,
    average_precision,
    box_iou,
    match_boxes,
    match_points,
)
from kestrel.evals.normal_form import is_right, only_number_in
from kestrel.evals.results import (
    AnswerResult,
    CaptionResult,
    CountBand,
    CountResult,
    DetectResult,
    FamilyResult,
    PointResult,
    ReadingResult,
    SegmentResult,
    ThinkingResult,
)
from kestrel.evals.truths import (
    AnswerTruth,
    BoxesTruth,
    CaptionTruth,
    CountTruth,
    OutlineTruth,
    PointsTruth,
    ReadingTruth,
    ThoughtTruth,
)
from kestrel.images.masks import BOX_FIELDS, Mask, rasterise_path

MOST_COUNTED = 6
"""The counts that the headline figure is about go from 0 to this."""

TruthT = TypeVar("TruthT")


@dataclass(frozen=True, slots=True)
class Reply(Generic[TruthT]):
    """A question's truth, and what the model said."""

    truth: TruthT
    output: Mapping[str, Any]
    direct_output: Mapping[str, Any] = field(default_factory=dict)
    """Without thinking, for questions that are thought about."""


def score(replies: Sequence[Reply[Any]]) -> FamilyResult:
    """The result of one family; its replies all have the same kind of truth."""
    return _SCORERS[type(replies[0].truth)](replies)


def score_answers(replies: Sequence[Reply[AnswerTruth]]) -> AnswerResult:
    return AnswerResult(len(replies), _mean(is_right(_text(reply.output), reply.truth) for reply in replies))


def score_counts(replies: Sequence[Reply[CountTruth]]) -> CountResult:
    errors: dict[int, list[float]] = defaultdict(list)
    for reply in replies:
        given = only_number_in(_text(reply.output))
        errors[reply.truth.count].append(math.inf if given is None else abs(given - reply.truth.count))
    every = _band(error for each in errors.values() for error in each)
    return CountResult(
        n=len(replies),
        accuracy=every.accuracy or 0.0,
        within_one=every.within_one or 0.0,
        up_to_six=_band(error for count, each in errors.items() if count <= MOST_COUNTED for error in each),
        by_count={str(count): _band(errors[count]) for count in sorted(errors)},
    )


def _band(errors: Iterable[float]) -> CountBand:
    given = list(errors)
    return CountBand(len(given), _share(error == 0 for error in given), _share(error <= 1 for error in given))


def score_reading(replies: Sequence[Reply[ReadingTruth]]) -> ReadingResult:
    spelling = CharacterErrors()
    right: list[bool] = []
    unanswerable_right: list[bool] = []
    for reply in replies:
        text, truth = _text(reply.output), reply.truth.answer
        right.append(is_right(text, truth))
        if truth.is_printed:
            spelling.add(text, truth.answer)
        else:
            unanswerable_right.append(right[-1])
    return ReadingResult(
        n=len(replies),
        accuracy=_mean(right),
        character_error_rate=spelling.rate if spelling.characters else None,
        num_characters=spelling.characters,
        unanswerable_accuracy=_share(unanswerable_right),
    )


def score_points(replies: Sequence[Reply[PointsTruth]]) -> PointResult:
    found = PrecisionRecall()
    exact: list[bool] = []
    for reply in replies:
        matches = match_points(_points(reply.output), reply.truth.boxes)
        found.add(matches)
        exact.append(_is_exact(matches))
    return PointResult(
        n=len(replies),
        precision=found.precision,
        recall=found.recall,
        f1=found.f1,
        exact=_mean(exact),
        absent_accuracy=_share(not _points(reply.output) for reply in replies if not reply.truth.boxes),
    )


def score_boxes(replies: Sequence[Reply[BoxesTruth]]) -> DetectResult:
    found = PrecisionRecall()
    overlaps: list[float] = []
    hits: dict[str, list[RankedHit]] = defaultdict(list)
    num_true: Counter[str] = Counter()
    for reply in replies:
        kind, true = reply.truth.kind, reply.truth.boxes
        each = match_boxes(_boxes(reply.output), true)
        matched = [overlap for overlap in each if overlap > 0]
        found.add(Matches(len(matched), len(each), len(true)))
        overlaps += matched
        hits[kind] += [RankedHit(rank, overlap > 0) for rank, overlap in enumerate(each)]
        num_true[kind] += len(true)
    every_hit = [hit for each in hits.values() for hit in each]
    return DetectResult(
        n=len(replies),
        map50=_share(average_precision(hits[kind], count) for kind, count in num_true.items() if count),
        ap50=average_precision(every_hit, num_true.total()) if num_true.total() else None,
        precision=found.precision,
        recall=found.recall,
        f1=found.f1,
        mean_iou=_share(overlaps),
        absent_accuracy=_share(not _boxes(reply.output) for reply in replies if not reply.truth.boxes),
    )


def score_outlines(replies: Sequence[Reply[OutlineTruth]]) -> SegmentResult:
    overlaps: list[float] = []
    box_overlaps: list[float] = []
    absent_right: list[bool] = []
    for reply in replies:
        given = reply.output.get("bbox")
        if reply.truth.box is None:
            absent_right.append(given is None and not reply.output.get("path"))
        else:
            overlaps.append(outline_iou(reply.output, reply.truth, reply.truth.box))
            box_overlaps.append(0.0 if given is None else box_iou(_box(given), reply.truth.box))
    return SegmentResult(len(replies), len(overlaps), _share(overlaps), _share(box_overlaps), _share(absent_right))


def outline_iou(output: Mapping[str, Any], truth: OutlineTruth, box: Box) -> float:
    """Overlap of the filled outlines, in pixels of the picture."""
    if output.get("bbox") is None:
        return 0.0
    inside = {name: min(max(value, 0.0), 1.0) for name, value in zip(BOX_FIELDS, box, strict=True)}
    true = rasterise_path(truth.path, inside, truth.height, truth.width)
    drawn = _drawn(output, truth.height, truth.width)
    return 0.0 if drawn is None else float((drawn & true).sum() / max(1, (drawn | true).sum()))


def _drawn(output: Mapping[str, Any], height: int, width: int) -> Mask | None:
    """None for a box that lies outside the picture or is none."""
    try:
        return rasterise_path(str(output.get("path") or ""), output["bbox"], height, width)
    except RequestError:
        return None


def score_captions(replies: Sequence[Reply[CaptionTruth]]) -> CaptionResult:
    objects = PrecisionRecall()
    exact: list[bool] = []
    for reply in replies:
        caption, present = _text(reply.output, "caption"), Counter(reply.truth.names)
        mentioned = mentioned_names(caption)
        objects.add(Matches((mentioned & present).total(), mentioned.total(), present.total()))
        exact.append(caption == reply.truth.caption)
    return CaptionResult(
        n=len(replies),
        recall=objects.matched / objects.true if objects.true else None,
        precision=objects.matched / objects.predicted if objects.predicted else None,
        exact=_mean(exact),
        num_present=objects.true,
        num_mentioned=objects.predicted,
        num_matched=objects.matched,
    )


def score_thoughts(replies: Sequence[Reply[ThoughtTruth]]) -> ThinkingResult:
    on_object: list[bool] = []
    for reply in replies:
        boxes = reply.truth.boxes
        if boxes is not None:
            on_object += [match_points([point], boxes).num_matched == 1 for point in _grounded_points(reply.output)]
    return ThinkingResult(
        n=len(replies),
        accuracy=_mean(is_right(_text(reply.output), reply.truth.answer) for reply in replies),
        direct_accuracy=_mean(is_right(_text(reply.direct_output), reply.truth.answer) for reply in replies),
        num_points=len(on_object),
        num_points_right=sum(on_object),
        grounded_share=_share(on_object),
    )


_SCORERS: Mapping[type, Callable[[Sequence[Reply[Any]]], FamilyResult]] = {
    AnswerTruth: score_answers,
    CountTruth: score_counts,
    ReadingTruth: score_reading,
    PointsTruth: score_points,
    BoxesTruth: score_boxes,
    OutlineTruth: score_outlines,
    CaptionTruth: score_captions,
    ThoughtTruth: score_thoughts,
}


# ---------------------------------------------------------------------- what replies hold


def _text(output: Mapping[str, Any], name: str = "answer") -> str:
    return str(output.get(name, "")).strip()


def _points(output: Mapping[str, Any]) -> list[Point]:
    return [(point["x"], point["y"]) for point in output.get("points", ())]


def _boxes(output: Mapping[str, Any]) -> list[Box]:
    return [_box(each) for each in output.get("objects", ())]


def _box(values: Mapping[str, float]) -> Box:
    return (values["x_min"], values["y_min"], values["x_max"], values["y_max"])


def _grounded_points(output: Mapping[str, Any]) -> list[Point]:
    grounding = output.get("reasoning", {}).get("grounding", ())
    return [(x, y) for chunk in grounding for x, y in chunk["points"]]


def _is_exact(matches: Matches) -> bool:
    return matches.num_matched == matches.num_predicted == matches.num_true


def _mean(values: Iterable[float]) -> float:
    """Of at least one value."""
    given = list(values)
    return sum(given) / len(given)


def _share(values: Iterable[float]) -> float | None:
    """The mean; None of nothing."""
    given = list(values)
    return sum(given) / len(given) if given else None
