"""Label Studio: `labelstudio/tasks.json` to import, `labelstudio/config.xml` to paste as the labelling interface.

- Each picture is a task with one prediction: rectanglelabels, keypointlabels or polygonlabels in per cent of the
  picture, a textarea for an answer. Each part of an outline is a region, holes are filled. Regions have their `score`,
  the prediction the mean of these.
- `data.image` is an address of Label Studio's own file server (`/data/local-files/?d=...`). Start Label Studio with
  LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true and LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT naming this folder where
  pictures are in its `images/`, otherwise the folder that was labelled, and add it to the project as local storage.
- `data` also has `key`, `split`, `question`, `frame` and `extra`, where a row has them.
- All tasks of a project have one interface: it has the kinds of region that were found, or boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from kestrel.labelling.formats.files import whole_folder, write_list
from kestrel.labelling.formats.label_set import LabelSet
from kestrel.labelling.formats.shapes import corners, pixel_box, pixel_point, polygons
from kestrel.labelling.records import Found, Row

FOLDER = "labelstudio"
OWN = ("tasks.json", "config.xml")
POINT_SIZE = 0.5
"""Per cent of the picture's width, as Label Studio draws one."""
CONTROLS = {"box": "RectangleLabels", "point": "KeyPointLabels", "outline": "PolygonLabels"}


def write_label_studio(labels: LabelSet, output: Path) -> list[Path]:
    with whole_folder(output / FOLDER, OWN) as folder:
        with (folder / "tasks.json").open("wb") as file:
            write_list(file, (_task(labels, row) for row in labels.rows()))
        (folder / "config.xml").write_bytes(_interface(labels))
        labels.place_pictures(folder)
    return [output / FOLDER / name for name in OWN]


def _interface(labels: LabelSet) -> bytes:
    view = ElementTree.Element("View")
    if "question" in labels.kinds:
        ElementTree.SubElement(view, "Header", value="$question")
    ElementTree.SubElement(view, "Image", name="image", value="$image")
    if "answer" in labels.kinds:
        ElementTree.SubElement(view, "TextArea", name="answer", toName="image", editable="true", maxSubmissions="1")
    for kind in [] if "answer" in labels.kinds else [kind for kind in CONTROLS if kind in labels.kinds] or ["box"]:
        control = ElementTree.SubElement(view, CONTROLS[kind], name=kind, toName="image")
        for name in labels.classes:
            ElementTree.SubElement(control, "Label", value=name)
    ElementTree.indent(view)
    return ElementTree.tostring(view, encoding="utf-8") + b"\n"


def _task(labels: LabelSet, row: Row) -> dict[str, Any]:
    place = f"images/{row.file}" if labels.options.with_pictures else row.file
    data: dict[str, Any] = {"image": f"/data/local-files/?d={quote(place)}", "key": row.key}
    data |= {"split": labels.part_of(row), "frame": row.frame and asdict(row.frame), "extra": dict(row.extra) or None}
    data = {name: value for name, value in data.items() if value is not None}
    if "question" in labels.kinds:
        data["question"] = row.question or ""
    result = list(_regions(row))
    scores = [region["score"] for region in result if "score" in region]
    mean = {"score": round(sum(scores) / len(scores), 6)} if scores else {}
    return {"data": data, "predictions": [{"model_version": "kestrel", **mean, "result": result}]}


def _regions(row: Row) -> Iterator[dict[str, Any]]:
    number = 0
    for one in row.found:
        for kind, value in _values(row, one):
            name = CONTROLS[kind].lower()
            region = {"id": f"region{number}", "type": name, "from_name": kind, "to_name": "image"}
            size = {"original_width": row.width, "original_height": row.height, "image_rotation": 0}
            score = {} if one.score is None else {"score": one.score}
            yield {**region, **size, "value": {**value, name: [one.label]}, **score}
            number += 1
    if row.answer is not None:
        region = {"id": "answer", "type": "textarea", "from_name": "answer", "to_name": "image"}
        yield {**region, "value": {"text": [row.answer]}}


def _values(row: Row, one: Found) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, place in per cent) of each region that shows an object."""

    def per_cent(x: float, y: float) -> tuple[float, float]:
        return round(100 * x / row.width, 4), round(100 * y / row.height, 4)

    if one.point is not None:
        x, y = per_cent(*pixel_point(row, one.point))
        yield "point", {"x": x, "y": y, "width": POINT_SIZE}
    box = None if one.box is None else pixel_box(row, one.box)
    if one.box is None or box is None:
        return
    if one.path:
        for part in polygons(row, one.box, one.path) or [corners(box)]:
            yield "outline", {"points": [per_cent(*corner) for corner in part], "closed": True}
    else:
        x, y = per_cent(box[0], box[1])
        width, height = per_cent(box[2] - box[0], box[3] - box[1])
        yield "box", {"x": x, "y": y, "width": width, "height": height, "rotation": 0}
