"""Scores of answers against exact truth. Boxes are (x_min, y_min, x_max, y_max)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Box: TypeAlias = tuple[float, float, float, float]
Point: TypeAlias = tuple[float, float]


def box_iou(a: Box, b: Box) -> float:
    """Area shared over area covered; 0 for boxes without area."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (_area(a) + _area(b) - shared)


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


@dataclass(frozen=True, slots=True)
class Matches:
    """Predictions and truths of one picture, paired one to one."""

    num_matched: int
    num_predicted: int
    num_true: int


@dataclass
class PrecisionRecall:
    """Counts over many pictures."""

    matched: int = 0
    predicted: int = 0
    true: int = 0

    def add(self, matches: Matches) -> None:
        self.matched += matches.num_matched
        self.predicted += matches.num_predicted
        self.true += matches.num_true

    @property
    def precision(self) -> float:
        """1 when nothing was predicted: nothing predicted was wrong."""
        return self.matched / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.matched / self.true if self.true else 1.0

    @property
    def f1(self) -> float:
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def match_points(points: Sequence[Point], boxes: Sequence[Box]) -> Matches:
    """A point counts when it lies inside a true box not yet matched; the pairing is as large as possible."""
    inside = [[_contains(box, point) for box in boxes] for point in points]
    owner: dict[int, int] = {}

    def place(point: int, tried: set[int]) -> bool:
        for index, fits in enumerate(inside[point]):
            if fits and index not in tried:
                tried.add(index)
                if index not in owner or place(owner[index], tried):
                    owner[index] = point
                    return True
        return False

    matched = sum(place(point, set()) for point in range(len(points)))
    return Matches(matched, len(points), len(boxes))


def _contains(box: Box, point: Point) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


@dataclass(frozen=True, slots=True)
class RankedHit:
    """One predicted box: its place in an answer, or anything else that is lower for the better ones."""

    rank: float
    is_true: bool


def match_boxes(predicted: Sequence[Box], true: Sequence[Box], threshold: float = 0.5) -> list[float]:
    """For each predicted box in order: its IoU with the best free true box when that reaches the threshold, else 0."""
    free = list(range(len(true)))
    overlaps: list[float] = []
    for box in predicted:
        best = max(free, key=lambda index: box_iou(box, true[index]), default=None)
        overlap = 0.0 if best is None else box_iou(box, true[best])
        if best is not None and overlap >= threshold:
            free.remove(best)
            overlaps.append(overlap)
        else:
            overlaps.append(0.0)
    return overlaps


def average_precision(hits: Iterable[RankedHit], num_true: int) -> float:
    """Area under precision over recall.

    Precision is made monotone from the right, as usual for detection.
    """
    if num_true == 0:
        return float("nan")
    ordered = sorted(hits, key=lambda hit: hit.rank)
    precisions, recalls, found = [], [], 0
    for count, hit in enumerate(ordered, start=1):
        found += hit.is_true
        precisions.append(found / count)
        recalls.append(found / num_true)
    area, best, right = 0.0, 0.0, recalls[-1] if recalls else 0.0
    for precision, recall in zip(reversed(precisions), reversed(recalls), strict=True):
        area += (right - recall) * best
        best, right = max(best, precision), recall
    return area + right * best


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, char in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char != other))
    return row[-1]


@dataclass
class CharacterErrors:
    errors: int = 0
    characters: int = 0

    def add(self, answer: str, truth: str) -> None:
        self.errors += edit_distance(answer, truth)
        self.characters += len(truth)

    @property
    def rate(self) -> float:
        return self.errors / self.characters if self.characters else 0.0
