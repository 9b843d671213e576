"""Replies judged against the truth, one scorer per kind of truth.

A reply is what the skill gave back as `output`; a request that failed counts as an empty one. Replies come in the order
of their questions, because average precision ranks boxes by their place in each reply and then by that order.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

from kestrel.errors import RequestError
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
from kestrel.evals.questions import (
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
from kestrel.train.scenes.catalogue import COLOUR_NAMES, KINDS
from kestrel.train.tasks.view import UNKNOWN_THINGS

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
    by_score: list[ScoredHit] = []
    num_true: Counter[str] = Counter()
    for reply in replies:
        kind, true = reply.truth.kind, reply.truth.boxes
        each = match_boxes(_boxes(reply.output), true)
        matched = [overlap for overlap in each if overlap > 0]
        found.add(Matches(len(matched), len(each), len(true)))
        overlaps += matched
        hits[kind] += [RankedHit(rank, overlap > 0) for rank, overlap in enumerate(each)]
        by_score += _scored_hits(reply)
        num_true[kind] += len(true)
    every_hit = [hit for each in hits.values() for hit in each]
    return DetectResult(
        n=len(replies),
        map50=_share(average_precision(hits[kind], count) for kind, count in num_true.items() if count),
        ap50=average_precision(every_hit, num_true.total()) if num_true.total() else None,
        scored_ap50=_scored_precision(by_score, num_true.total()),
        reliability=_reliability(by_score),
        precision=found.precision,
        recall=found.recall,
        f1=found.f1,
        mean_iou=_share(overlaps),
        absent_accuracy=_share(not _boxes(reply.output) for reply in replies if not reply.truth.boxes),
    )


def _scored_hits(reply: Reply[BoxesTruth]) -> list[ScoredHit]:
    """The surest box chooses its truth first."""
    places = sorted(reply.output.get("objects", ()), key=lambda place: -place.get("score", 1.0))
    overlaps = match_boxes([_box(place) for place in places], reply.truth.boxes)
    return [ScoredHit(place.get("score", 1.0), overlap > 0) for place, overlap in zip(places, overlaps, strict=True)]


def _scored_precision(hits: Sequence[ScoredHit], num_true: int) -> float | None:
    return average_precision((RankedHit(-hit.score, hit.is_true) for hit in hits), num_true) if num_true else None


def _reliability(hits: Sequence[ScoredHit]) -> dict[str, ScoreBand]:
    bands: dict[int, list[ScoredHit]] = defaultdict(list)
    for hit in hits:
        bands[min(int(hit.score * NUM_BANDS), NUM_BANDS - 1)].append(hit)
    return {
        f"{number / NUM_BANDS:.1f}": ScoreBand(
            len(each), _mean(hit.score for hit in each), _mean(hit.is_true for hit in each)
        )
        for number, each in sorted(bands.items())
    }


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


# ---------------------------------------------------------------------- results of one family
# Shares are from 0 to 1; None where there was nothing to judge.


@dataclass(frozen=True, slots=True)
class AnswerResult:
    n: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class CountBand:
    """Questions of one true count, or of a range of them."""

    n: int
    accuracy: float | None
    within_one: float | None


@dataclass(frozen=True, slots=True)
class CountResult:
    n: int
    accuracy: float
    within_one: float
    up_to_six: CountBand
    by_count: Mapping[str, CountBand]
    """By the true count."""


@dataclass(frozen=True, slots=True)
class ReadingResult:
    n: int
    accuracy: float
    character_error_rate: float | None
    """Over what is really printed."""
    num_characters: int
    unanswerable_accuracy: float | None


@dataclass(frozen=True, slots=True)
class PointResult:
    n: int
    precision: float
    recall: float
    f1: float
    exact: float
    """Share of questions without a missing or a wrong point."""
    absent_accuracy: float | None
    """Share of nothing found, where nothing was to be found."""


@dataclass(frozen=True, slots=True)
class ScoredHit:
    """One predicted box."""

    score: float
    is_true: bool


NUM_BANDS = 10


@dataclass(frozen=True, slots=True)
class ScoreBand:
    """Boxes whose score is in a tenth."""

    n: int
    mean_score: float
    precision: float
    """Of calibrated scores about as large as their mean."""


@dataclass(frozen=True, slots=True)
class DetectResult:
    n: int
    map50: float | None
    """Mean over kinds of the average precision at an overlap of 0.5; kinds that are never there are left out."""
    ap50: float | None
    """Average precision of all kinds together. In both, boxes are ranked by their place in each answer."""
    scored_ap50: float | None
    """The same, ranked by score."""
    reliability: Mapping[str, ScoreBand]
    """By the score at which the band begins."""
    precision: float
    recall: float
    f1: float
    mean_iou: float | None
    """Of boxes that overlap a true one by 0.5."""
    absent_accuracy: float | None


@dataclass(frozen=True, slots=True)
class SegmentResult:
    n: int
    num_present: int
    mean_iou: float | None
    """Of filled outlines, where the object is there."""
    mean_box_iou: float | None
    absent_accuracy: float | None


@dataclass(frozen=True, slots=True)
class CaptionResult:
    n: int
    recall: float | None
    """Objects mentioned among those there."""
    precision: float | None
    """Objects there among those mentioned."""
    exact: float
    """Share of captions that are word for word as a scene's caption should be."""
    num_present: int
    num_mentioned: int
    num_matched: int


@dataclass(frozen=True, slots=True)
class ThinkingResult:
    n: int
    accuracy: float
    direct_accuracy: float
    """Of the same questions, answered without thinking."""
    num_points: int
    """Points in thoughts about groups of objects."""
    num_points_right: int
    """Those of them that lie on an object of the group."""
    grounded_share: float | None


FamilyResult: TypeAlias = (
    AnswerResult
    | CountResult
    | ReadingResult
    | PointResult
    | DetectResult
    | SegmentResult
    | CaptionResult
    | ThinkingResult
)


# ---------------------------------------------------------------------- when two answers are the same
# Case, a leading article, a full stop and quotation marks do not matter. Text read off a picture is the exception: it
# must be as printed.

_NUMBER_WORDS = "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
_VALUES = {word: value for value, word in enumerate(_NUMBER_WORDS.split("|"))}
_NUMBER = re.compile(rf"\b(?:[0-9]{{1,6}}|{_NUMBER_WORDS})\b")
_ARTICLE = re.compile(r"(?:an?|the)\s+")
_AROUND = " \t\n\"'.!"


def is_right(reply: str, truth: AnswerTruth) -> bool:
    if truth.is_printed:
        return reply.strip() == truth.answer
    return normal_form(reply) == normal_form(truth.answer)


def normal_form(answer: str) -> str:
    text = answer.casefold().strip(_AROUND)
    text = _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text
    text = " ".join(text.split())
    return str(_VALUES[text]) if text in _VALUES else text


def only_number_in(answer: str) -> int | None:
    """The number an answer gives, in digits or as a word; None when it gives none or several."""
    numbers = _NUMBER.findall(answer.casefold())
    return _number_value(numbers[0]) if len(numbers) == 1 else None


def _number_value(text: str) -> int:
    """Of digits or a number word."""
    return _VALUES[text] if text in _VALUES else int(text)


# ---------------------------------------------------------------------- what a caption mentions
# Names of things with how many of them, as in "A cat, 2 red stars and the word "tea"." Text in quotation marks is what
# is printed and names nothing. A plural without a number counts as one mention.

_QUOTED = re.compile(r'"[^"]*"|“[^”]*”')


def mentioned_names(caption: str) -> Counter[str]:
    """How often each name is mentioned, by its singular; things that are never drawn are names too."""
    pattern, singulars = _vocabulary()
    mentioned: Counter[str] = Counter()
    for number, name in pattern.findall(_QUOTED.sub(" ", caption.casefold())):
        mentioned[singulars[name]] += _number_value(number) if number else 1
    return +mentioned


@lru_cache
def _vocabulary() -> tuple[re.Pattern[str], dict[str, str]]:
    singulars = {form: name for name, plural in UNKNOWN_THINGS.items() for form in (name, plural)}
    singulars |= {form: kind.name for kind in KINDS for form in (kind.name, kind.plural)}
    longest_first = sorted(singulars, key=len, reverse=True)
    number = rf"(?:([0-9]{{1,3}}|{_NUMBER_WORDS})\s+)?"
    colour = rf"(?:(?:{'|'.join(COLOUR_NAMES)})\s+)?"
    return re.compile(rf"\b{number}{colour}({'|'.join(longest_first)})\b"), singulars
