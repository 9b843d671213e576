"""A question to a model and what a right reply to it is, one type for each way of judging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kestrel.evals.metrics import Box


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
