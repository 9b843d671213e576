"""How well things are located, over scores: average precision as COCO computes it, and F1 at the best threshold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel.evals.metrics import Box, Matches, Point, PrecisionRecall, box_iou
from kestrel.evals.plans import MOST_PREDICTIONS

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
LEAST_OVERLAP = 0.5
"""Of a prediction that counts as right, outside of the average precision."""


@dataclass(frozen=True, eq=False)
class Finding:
    """What was found of one label in one picture."""

    label: str
    scores: NDArray[np.float64]
    overlaps: NDArray[np.float64]
    """[predicted, true], 0 to 1."""

    @classmethod
    def of(cls, label: str, predicted: Sequence[Box | Point], scores: Iterable[float], true: Sequence[Box]) -> Finding:
        overlaps = [overlap(place, box) for place in predicted for box in true]
        return cls(label, np.array([*scores], float), np.array(overlaps, float).reshape(len(predicted), len(true)))

    @property
    def num_true(self) -> int:
        return self.overlaps.shape[1]

    @property
    def order(self) -> NDArray[np.int64]:
        """Of the predictions: the best score first, equal ones as they came."""
        return np.argsort(-self.scores, kind="stable")

    def owners(self, least: float = LEAST_OVERLAP) -> NDArray[np.int64]:
        """The truth that each prediction takes, -1 for none: better scores choose first, the truth they overlap most.

        Leaving out those below a score does not change what the others take.
        """
        owners = np.full(len(self.scores), -1)
        left = self.overlaps.copy()
        for index in self.order if self.num_true else ():
            best = self.num_true - 1 - int(np.argmax(left[index][::-1]))
            if left[index, best] >= least:
                owners[index] = best
                left[:, best] = -1.0
        return owners


def overlap(place: Box | Point, box: Box) -> float:
    """The IoU of a box; of a point 1 at the centre of the true box, 0.5 at its edge, and 0 outside."""
    if len(place) == 4:
        return box_iou(place, box)
    sides = max(box[2] - box[0], 1e-12), max(box[3] - box[1], 1e-12)
    away = max(abs(2 * place[i] - box[i] - box[i + 2]) / sides[i] for i in range(2))
    return 1.0 - away / 2 if away <= 1.0 else 0.0


# ---------------------------------------------------------------------- average precision


def average_precisions(findings: Sequence[Finding]) -> dict[str, NDArray[np.float64]]:
    """At each of OVERLAPS, by label; labels without any truth are left out."""
    by_label: dict[str, list[Finding]] = {}
    for finding in findings:
        by_label.setdefault(finding.label, []).append(finding)
    return {label: _of_label(each) for label, each in by_label.items() if any(one.num_true for one in each)}


def _of_label(findings: Sequence[Finding]) -> NDArray[np.float64]:
    kept = [finding.order[:MOST_PREDICTIONS] for finding in findings]
    scores = np.concatenate([finding.scores[order] for finding, order in zip(findings, kept, strict=True)])
    rank = np.argsort(-scores, kind="stable")
    num_true = sum(finding.num_true for finding in findings)
    return np.array([_area(_hits(findings, kept, least)[rank], num_true) for least in OVERLAPS])


def _hits(findings: Sequence[Finding], kept: Sequence[NDArray[np.int64]], least: float) -> NDArray[np.bool_]:
    return np.concatenate([finding.owners(least)[order] >= 0 for finding, order in zip(findings, kept, strict=True)])


def _area(hits: NDArray[np.bool_], num_true: int) -> float:
    """Precision at 101 recalls, made monotone from the right; 0 at recalls that are not reached."""
    found = hits.cumsum()
    precision = np.maximum.accumulate((found / np.arange(1, len(hits) + 1))[::-1])[::-1]
    at = np.searchsorted(found / num_true, RECALLS, side="left")
    return float(np.append(precision, 0.0)[at].mean())


# ---------------------------------------------------------------------- all figures


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one label, or of all; shares are from 0 to 1, None where there was nothing to judge."""

    num_true: int
    num_predicted: int
    """At the threshold, as what follows up to `f1`."""
    num_matched: int
    precision: float | None
    recall: float | None
    f1: float | None
    ap: float | None
    """Mean over overlaps from 0.5 to 0.95; of all labels, the mean of theirs."""
    ap50: float | None


@dataclass(frozen=True, slots=True)
class LocatedFigures:
    threshold: float | None
    """The score from which on F1 over all labels is best; None where no score makes a difference."""
    overall: Figures
    labels: Mapping[str, Figures]


def located_figures(findings: Sequence[Finding], with_ap: bool = True) -> LocatedFigures:
    owners = [finding.owners() for finding in findings]
    threshold = best_threshold(findings, owners)
    counts: dict[str, PrecisionRecall] = {}
    for finding, owner in zip(findings, owners, strict=True):
        kept = owner if threshold is None else owner[finding.scores >= threshold]
        found = Matches(int((kept >= 0).sum()), len(kept), finding.num_true)
        counts.setdefault(finding.label, PrecisionRecall()).add(found)
    precisions = average_precisions(findings) if with_ap else {}
    labels = {
        label: _figures(counts[label], [precisions[label]] if label in precisions else []) for label in sorted(counts)
    }
    every = PrecisionRecall(
        sum(each.matched for each in counts.values()),
        sum(each.predicted for each in counts.values()),
        sum(each.true for each in counts.values()),
    )
    return LocatedFigures(threshold, _figures(every, list(precisions.values())), labels)


def best_threshold(findings: Sequence[Finding], owners: Sequence[NDArray[np.int64]]) -> float | None:
    """Of equally good ones the lowest."""
    if not findings:
        return None
    scores, hits = np.concatenate([each.scores for each in findings]), np.concatenate(owners) >= 0
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], hits[order]
    ends = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)) if len(scores) else np.array([], int)
    if len(ends) < 2:
        return None
    f1 = 2 * hits.cumsum()[ends] / (ends + 1 + sum(each.num_true for each in findings))
    best = len(ends) - 1 - int(np.argmax(f1[::-1]))
    return None if best == len(ends) - 1 else float(scores[ends[best]])


def _figures(counts: PrecisionRecall, precisions: Sequence[NDArray[np.float64]]) -> Figures:
    ap = float(np.mean(precisions)) if precisions else None
    ap50 = float(np.mean([each[0] for each in precisions])) if precisions else None
    precision = counts.precision if counts.predicted else None
    recall = counts.recall if counts.true else None
    f1 = counts.f1 if counts.predicted or counts.true else None
    return Figures(counts.true, counts.predicted, counts.matched, precision, recall, f1, ap, ap50)
