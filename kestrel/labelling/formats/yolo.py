"""YOLO, as ultralytics lays it out: `yolo/data.yaml`, `images/PART/NAME.png`, `labels/PART/NAME.txt`.

- A line of a label file is `class x y width height`: the class from 0 in the order of classes.txt, the box's centre
  and size in shares of the picture. Where outlines were looked for, each line is `class x1 y1 x2 y2 ...` instead: the
  parts of an outline are joined by lines of no width, holes are filled, and a box without an outline is its corners.
- A picture without any object has an empty file. Boxes without area are left out. Scores have no place.
- Parts are those of the split. `train`, `val` and `test` of data.yaml name the parts of these names. Without a part
  train, `train` names the first one; without a part val, `val` names what `train` does. Without a split everything is
  in train.
- Pictures lie side by side, "cats/a.png" as "cats_a.png"; where a name would not be one picture's alone, part of a
  digest follows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from kestrel.labelling.formats.files import whole_folder
from kestrel.labelling.formats.flat_names import FlatNames
from kestrel.labelling.formats.label_set import LabelSet
from kestrel.labelling.formats.shapes import Polygon, corners, pixel_box, polygons
from kestrel.labelling.records import Found, Row

FOLDER = "yolo"
OWN = ("data.yaml", "images", "labels")


def write_yolo(labels: LabelSet, output: Path) -> list[Path]:
    parts = labels.parts or ("train",)
    names = FlatNames(labels)
    with whole_folder(output / FOLDER, OWN) as folder:
        for part in parts:
            (folder / "images" / part).mkdir(parents=True)
            (folder / "labels" / part).mkdir(parents=True)
        for row in labels.rows():
            part = labels.part_of(row) or parts[0]
            lines = [line for one in row.found if (line := _line(labels, row, one)) is not None]
            (folder / "labels" / part / f"{names.name(row)}.txt").write_text("".join(lines))
            labels.options.place(row, folder / "images" / part / names.picture(row))
        train = "train" if "train" in parts else parts[0]
        data: dict[str, Any] = {"train": f"images/{train}", "val": f"images/{'val' if 'val' in parts else train}"}
        if "test" in parts:
            data["test"] = "images/test"
        data["names"] = dict(enumerate(labels.classes))
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        (folder / "data.yaml").write_text(text, encoding="utf-8")
    return [output / FOLDER / "data.yaml"]


def _line(labels: LabelSet, row: Row, one: Found) -> str | None:
    box = None if one.box is None else pixel_box(row, one.box)
    if one.box is None or box is None:
        return None
    if "outline" in labels.kinds:
        parts = polygons(row, one.box, one.path) if one.path else []
        values = [value for x, y in _joined(parts or [corners(box)]) for value in (x / row.width, y / row.height)]
    else:
        left, top, right, bottom = box
        values = [
            *((left + right) / 2 / row.width, (top + bottom) / 2 / row.height),
            *((right - left) / row.width, (bottom - top) / row.height),
        ]
    return f"{labels.class_numbers[one.label]} {' '.join(f'{value:.6f}' for value in values)}\n"


def _joined(parts: Iterable[Polygon]) -> Polygon:
    """One polygon that covers all parts: it goes to each from its own first corner, and back the same way."""
    first, *others = parts
    joined = list(first)
    for part in others:
        joined += [first[0], *part, part[0]]
    return joined
