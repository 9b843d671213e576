"""What a model reached in one family of questions. Shares are from 0 to 1; None where there was nothing to judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


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
class DetectResult:
    n: int
    map50: float | None
    """Mean over kinds of the average precision at an overlap of 0.5; kinds that are never there are left out."""
    ap50: float | None
    """Average precision of all kinds together."""
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
