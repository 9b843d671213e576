"""Label Studio's import file fits the interface beside it, and both fit what its documentation asks of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from kestrel.labelling.records import Found, Row
from tests.labelling.label_rows import SQUARE, row, scene_rows, write

PER_CENT = {"type": "number", "minimum": 0, "maximum": 100}
LABELS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
CORNERS = {"type": "array", "minItems": 3, "items": {"type": "array", "items": PER_CENT, "minItems": 2, "maxItems": 2}}
VALUES: dict[str, dict[str, Any]] = {
    "rectanglelabels": dict.fromkeys(("x", "y", "width", "height", "rotation"), PER_CENT),
    "keypointlabels": dict.fromkeys(("x", "y", "width"), PER_CENT),
    "polygonlabels": {"points": CORNERS, "closed": {"const": True}},
    "textarea": {"text": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
}


def _region(kind: str) -> dict[str, Any]:
    """A region, as the page of its tag describes it."""
    labels = {} if kind == "textarea" else {kind: LABELS}
    size = {"type": "integer", "minimum": 1}
    sizes = (
        {} if kind == "textarea" else {"original_width": size, "original_height": size, "image_rotation": {"const": 0}}
    )
    value = {**VALUES[kind], **labels}
    text = {"type": "string"}
    needed = {"id": text, "type": {"const": kind}, "from_name": text, "to_name": text, **sizes}
    needed["value"] = {"type": "object", "properties": value, "required": list(value), "additionalProperties": False}
    score = {"score": {"type": "number", "minimum": 0, "maximum": 1}}
    return {"properties": {**needed, **score}, "required": list(needed), "additionalProperties": False}


PREDICTION = {
    "properties": {
        "model_version": {"type": "string"},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "result": {"type": "array", "items": {"oneOf": [_region(kind) for kind in VALUES]}},
    },
    "required": ["result"],
    "additionalProperties": False,
}
DATA = {"properties": {"image": {"type": "string"}}, "required": ["image"]}
TASKS = {
    "type": "array",
    "items": {
        "properties": {"data": DATA, "predictions": {"type": "array", "items": PREDICTION}},
        "required": ["data", "predictions"],
        "additionalProperties": False,
    },
}

POINTS = [row("a.png", Found(label="eye", point=(0.5, 0.25), score=0.5)), row("b.png")]
OUTLINES = [row("a.png", Found(label="x", box=(0.1, 0.2, 1.2, 1), path=f"{SQUARE} M 0 0 L 0.5 0 L 0 0.5 Z"))]
ANSWERS = [row("a.png", question="What?", answer="An ä.\nIt is."), row("b.png", answer="A dog.")]


@pytest.mark.parametrize(
    ("rows", "control"),
    [
        (scene_rows(), "RectangleLabels"),
        (POINTS, "KeyPointLabels"),
        (OUTLINES, "PolygonLabels"),
        (ANSWERS, "TextArea"),
        ([row("a.png")], "RectangleLabels"),
    ],
)
def test_tasks_fit_the_documented_form_and_their_interface(rows: list[Row], control: str, tmp_path: Path) -> None:
    tasks_file, interface_file = write("labelstudio", rows, tmp_path, classes=("spare",))
    tasks, view = json.loads(tasks_file.read_text()), ElementTree.parse(interface_file).getroot()
    jsonschema.validate(tasks, TASKS)
    assert len(tasks) == len(rows)
    (found,) = [element for element in view if element.get("toName")]
    assert found.tag == control
    labels = {label.get("value") for label in found}
    for task in tasks:
        fields = {value[1:] for element in view if (value := element.get("value"))}
        assert fields <= set(task["data"])
        regions = task["predictions"][0]["result"]
        assert len({region["id"] for region in regions}) == len(regions)
        for region in regions:
            assert (region["from_name"], region["to_name"]) == (found.get("name"), found.get("toName"))
            assert region["type"] == control.lower()
            assert set(region["value"].get(region["type"], ())) <= labels


def test_places_are_per_cent_and_scores_are_kept(tmp_path: Path) -> None:
    found = [Found(label="x", box=(0.1, 0.2, 0.5, 1), score=0.4), Found(label="x", box=(0, 0, 1, 1), score=0.8)]
    tasks_file, _ = write("labelstudio", [row("d d/a.png", *found)], tmp_path, with_pictures=True)
    (task,) = json.loads(tasks_file.read_text())
    prediction = task["predictions"][0]
    first = prediction["result"][0]
    assert first["value"] == {"x": 10, "y": 20, "width": 40, "height": 80, "rotation": 0, "rectanglelabels": ["x"]}
    assert (first["score"], prediction["score"]) == (0.4, pytest.approx(0.6))
    assert task["data"]["image"] == "/data/local-files/?d=images/d%20d/a.png"
    assert (tasks_file.parent / "images" / "d d" / "a.png").is_file()


def test_an_object_whose_outline_cannot_be_drawn_keeps_its_box(tmp_path: Path) -> None:
    tasks_file, _ = write("labelstudio", [row("a.png", Found(label="x", box=(0, 0, 0.5, 1), path="L oops"))], tmp_path)
    (task,) = json.loads(tasks_file.read_text())
    assert task["predictions"][0]["result"][0]["value"]["points"] == [[0, 0], [50, 0], [50, 100], [0, 100]]
