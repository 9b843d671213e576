"""Average precision against pycocotools, and figures that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kestrel.evals.coco_metrics import Finding, located_figures, overlap
from kestrel.evals.metrics import Box

LABELS = ("bolt", "gear", "nut")
SIDE = 100


def random_boxes(chance: np.random.Generator, near: list[Box], count: int) -> list[Box]:
    """Some of them beside those given, so that all overlaps occur."""
    boxes: list[Box] = []
    for _ in range(count):
        if near and chance.random() < 0.7:
            base = np.array(near[chance.integers(len(near))])
            x0, y0, x1, y1 = base + chance.normal(0, chance.choice([0.5, 2, 6]), 4)
        else:
            x0, y0 = chance.random(2) * 70
            x1, y1 = np.array([x0, y0]) + 3 + chance.random(2) * 27
        boxes.append((min(x0, x1 - 1), min(y0, y1 - 1), x1, y1))
    return boxes


def as_coco(box: Box) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def coco_precisions(findings: list[tuple[str, list[Box], list[float], list[Box]]]) -> tuple[float, float]:
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    images = len(findings) // len(LABELS)
    truth: dict[str, Any] = {
        "images": [{"id": i, "width": SIDE, "height": SIDE} for i in range(images)],
        "categories": [{"id": i, "name": name} for i, name in enumerate(LABELS)],
        "annotations": [],
    }
    predictions: list[dict[str, Any]] = []
    for index, (label, predicted, scores, true) in enumerate(findings):
        where = {"image_id": index // len(LABELS), "category_id": LABELS.index(label)}
        for box in true:
            area = (box[2] - box[0]) * (box[3] - box[1])
            number = len(truth["annotations"]) + 1
            truth["annotations"].append({**where, "id": number, "bbox": as_coco(box), "area": area, "iscrowd": 0})
        predictions += [
            {**where, "bbox": as_coco(box), "score": score} for box, score in zip(predicted, scores, strict=True)
        ]
    known = coco.COCO()
    known.dataset = truth
    known.createIndex()
    judge = cocoeval.COCOeval(known, known.loadRes(predictions), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return judge.stats[0], judge.stats[1]


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_that_of_pycocotools(seed: int) -> None:
    chance = np.random.default_rng(seed)
    findings: list[tuple[str, list[Box], list[float], list[Box]]] = []
    for image in range(30):
        for label in LABELS[: 3 if seed else 2]:
            many = image == 0 and label == "bolt"
            true = random_boxes(chance, [], int(chance.integers(0, 5)) + 30 * many)
            predicted = random_boxes(chance, true, int(chance.integers(0, 7)) + 130 * many)
            scores = chance.random(len(predicted))
            findings.append((label, predicted, list(np.round(scores, 1 if seed % 2 else 9)), true))
        if not seed:
            findings.append(("nut", random_boxes(chance, [], 1), [0.5], []))  # a label that is never there
    ap, ap50 = coco_precisions(findings)
    found = located_figures([Finding.of(*each) for each in findings]).overall
    assert 0.05 < ap < ap50 < 0.9
    assert found.ap == pytest.approx(ap, abs=1e-6)
    assert found.ap50 == pytest.approx(ap50, abs=1e-6)


WHOLE, HALF, FAR = (0.0, 0.0, 0.4, 0.4), (0.0, 0.0, 0.4, 0.2), (0.6, 0.6, 0.9, 0.9)


def test_the_threshold_cuts_off_what_lowers_f1_and_nothing_else() -> None:
    findings = [
        Finding.of("bolt", [WHOLE, FAR], [0.9, 0.2], [WHOLE]),
        Finding.of("gear", [FAR, WHOLE], [0.6, 0.2], [FAR, WHOLE]),
        Finding.of("nut", [FAR], [0.2], []),
    ]
    figures = located_figures(findings)
    assert figures.threshold == pytest.approx(0.6)
    assert (figures.overall.num_predicted, figures.overall.num_matched, figures.overall.num_true) == (2, 2, 3)
    assert (figures.overall.precision, figures.overall.f1) == (1.0, pytest.approx(0.8))
    assert figures.labels["gear"].recall == 0.5
    assert figures.labels["nut"].ap is None
    assert figures.labels["gear"].ap50 == 1.0
    equal = located_figures([Finding.of("bolt", [WHOLE, FAR], [1.0, 1.0], [WHOLE])])
    assert equal.threshold is None
    assert equal.overall.precision == 0.5


def test_a_better_score_chooses_first_and_each_truth_is_taken_once() -> None:
    finding = Finding.of("bolt", [WHOLE, HALF], [0.3, 0.8], [HALF])
    assert list(finding.owners()) == [-1, 0]
    assert list(Finding.of("bolt", [WHOLE, HALF], [0.8, 0.3], [HALF]).owners()) == [0, -1]


def test_a_point_is_right_inside_the_true_box_and_best_at_its_centre() -> None:
    assert overlap((0.2, 0.2), WHOLE) == 1.0
    assert overlap((0.4, 0.2), WHOLE) == pytest.approx(0.5)
    assert overlap((0.41, 0.2), WHOLE) == 0.0
    nested = Finding.of("bolt", [(0.75, 0.75)], [1.0], [(0.0, 0.0, 1.0, 1.0), FAR])
    assert list(nested.owners()) == [1]
    assert located_figures([nested], with_ap=False).overall.ap is None


def test_nothing_asked_and_nothing_found_have_figures_too() -> None:
    assert located_figures([]).overall.num_true == 0
    missed = located_figures([Finding.of("bolt", [], [], [WHOLE])]).overall
    assert (missed.ap, missed.ap50, missed.recall, missed.f1) == (0.0, 0.0, 0.0, 0.0)


def test_shares_of_nothing_are_none() -> None:
    findings = [
        Finding.of("absent", [], [], []),
        Finding.of("missed", [], [], [WHOLE]),
        Finding.of("wrong", [WHOLE], [0.9], []),
    ]
    labels = located_figures(findings).labels
    assert {name: (each.precision, each.recall, each.f1) for name, each in labels.items()} == {
        "absent": (None, None, None),
        "missed": (None, 0.0, 0.0),
        "wrong": (0.0, None, 0.0),
    }
