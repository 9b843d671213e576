"""Rows become detections of the supervision library, or a message says what to install."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kestrel.errors import ConfigError
from kestrel.labelling.detections import as_detections
from kestrel.labelling.records import REJECTED, Found
from tests.labelling.label_rows import SQUARE, row

GEAR = Found(label="gear", score=0.9, box=(0.1, 0.2, 0.5, 0.6))


def test_boxes_are_in_pixels_with_scores_and_names() -> None:
    pytest.importorskip("supervision")
    bolt = Found(label="bolt", score=0.5, box=(0.5, 0.5, 1.5, 1))
    one = row("a.png", GEAR, bolt, Found(label="nut", box=(0, 0, 1, 1), decision=REJECTED))
    found = as_detections(one, ("bolt", "gear"))
    assert found.xyxy.tolist() == [[20, 20, 100, 60], [100, 50, 200, 100]]
    assert found.class_id.tolist() == [1, 0]
    assert found.confidence.tolist() == [0.9, 0.5]
    assert found.data["class_name"].tolist() == ["gear", "bolt"]
    assert found[found.confidence > 0.7].class_id.tolist() == [1]
    assert found.mask is None
    assert as_detections(row("b.png")).is_empty()


def test_outlines_are_masks() -> None:
    pytest.importorskip("supervision")
    half = Found(label="gear", box=(0.1, 0.2, 0.5, 0.6), path="M 0 0 L 0.5 0 L 0.5 1 L 0 1 Z")
    found = as_detections(row("a.png", half, GEAR))
    assert found.confidence is None
    assert found.mask.shape == (2, 100, 200)
    assert found.area.tolist() == [40 * 40, 80 * 40]
    assert np.array_equal(
        found.mask[1], as_detections(row("a.png", Found(label="x", box=GEAR.box, path=SQUARE))).mask[0]
    )


def test_what_is_no_detection_is_refused() -> None:
    pytest.importorskip("supervision")
    with pytest.raises(ConfigError, match="points"):
        as_detections(row("a.png", Found(label="x", point=(0.5, 0.5))))
    with pytest.raises(ConfigError, match=r"'gear' of a\.png is not among them"):
        as_detections(row("a.png", GEAR), ("bolt",))


def test_without_the_library_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(ConfigError, match="pip install supervision"):
        as_detections(row("a.png", GEAR))
