"""COCO: `annotations.json`, as pycocotools and `kestrel train adapter --data` read it.

With a split, the part named train is `annotations.json` and another part NAME is `NAME_annotations.json`. Pictures
are in `images/` when they were asked for; `file_name` is relative to that folder, or to what was labelled.

- An image's `id` is made of its key, a category's `id` counts from 1 in the order of classes.txt: both stay in later
  runs. Annotations count from 1 in each file. Images without annotations are there, and categories without any.
- `bbox` is [x, y, width, height] in pixels, within the picture; a box without area is left out. `score` is there
  when the model gave one, `iscrowd` is 0.
- An outline is in `segmentation` as polygons, its curves flattened and holes filled; `area` is theirs. Of a box
  alone `segmentation` is [] and `area` the box's.
- A point is an annotation with `keypoints` [x, y, 2], `num_keypoints` 1, a `bbox` of no size and `area` 0; the
  categories then have `keypoints` ["point"].
- An answer or a caption is an annotation with `caption`, as in COCO's captions, and `question` where there was one;
  there are no categories then.
- Of a video's frame the image has `frame`, of a row's further fields `extra`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from kestrel.labelling.formats.files import whole_folder, write_list
from kestrel.labelling.formats.label_set import LabelSet
from kestrel.labelling.formats.shapes import DECIMALS, pixel_box, pixel_point, polygon_area, polygons
from kestrel.labelling.records import Found, Row

FOLDER = "coco"
OWN = ("*annotations.json",)
ID_BITS = 52
"""Whole numbers that every reader of JSON can hold, however it does so."""


def write_coco(labels: LabelSet, output: Path) -> list[Path]:
    names = {part: "annotations.json" if part == "train" else f"{part}_annotations.json" for part in labels.parts}
    with whole_folder(output / FOLDER, OWN) as folder:
        for part, name in names.items() or [(None, "annotations.json")]:
            with (folder / name).open("wb") as file:
                _write_part(labels, part, file)
        labels.place_pictures(folder)
    return [output / FOLDER / name for name in names.values() or ["annotations.json"]]


def _write_part(labels: LabelSet, part: str | None, file: BinaryIO) -> None:
    file.write(b'{"info": {"description": "labelled by Kestrel"},\n"licenses": [],\n"images": ')
    write_list(file, _images(labels, part))
    file.write(b',\n"annotations": ')
    write_list(file, _annotations(labels, part))
    if "answer" not in labels.kinds:
        form = {"keypoints": ["point"], "skeleton": []} if "point" in labels.kinds else {}
        file.write(b',\n"categories": ')
        write_list(file, ({"id": number, "name": name, **form} for number, name in enumerate(labels.classes, 1)))
    file.write(b"}\n")


def _images(labels: LabelSet, part: str | None) -> Iterator[dict[str, Any]]:
    for row in labels.rows(part):
        entry: dict[str, Any] = {"id": _image_id(row), "file_name": row.file, "width": row.width, "height": row.height}
        if row.frame is not None:
            entry["frame"] = asdict(row.frame)
        if row.extra:
            entry["extra"] = dict(row.extra)
        yield entry


def _image_id(row: Row) -> int:
    hashed = hashlib.sha256(row.key.encode()).digest()
    return int.from_bytes(hashed[:8], "big") >> (64 - ID_BITS)


def _annotations(labels: LabelSet, part: str | None) -> Iterator[dict[str, Any]]:
    number = 0
    for row in labels.rows(part):
        for entry in _entries(labels, row):
            number += 1
            yield {"id": number, "image_id": _image_id(row), **entry}


def _entries(labels: LabelSet, row: Row) -> Iterator[dict[str, Any]]:
    for one in row.found:
        shape = _shape(row, one)
        if shape is not None:
            score = {} if one.score is None else {"score": one.score}
            yield {"category_id": labels.class_numbers[one.label] + 1, **shape, "iscrowd": 0, **score}
    if row.answer is not None:
        asked = {} if row.question is None else {"question": row.question}
        yield {"caption": row.answer, **asked}


def _shape(row: Row, one: Found) -> dict[str, Any] | None:
    if one.point is not None:
        x, y = pixel_point(row, one.point)
        return {"bbox": [x, y, 0, 0], "area": 0, "segmentation": [], "keypoints": [x, y, 2], "num_keypoints": 1}
    box = None if one.box is None else pixel_box(row, one.box)
    if one.box is None or box is None:
        return None
    width, height = round(box[2] - box[0], DECIMALS), round(box[3] - box[1], DECIMALS)
    parts = polygons(row, one.box, one.path) if one.path else []
    area = sum(polygon_area(part) for part in parts) if parts else width * height
    flat = [[value for point in part for value in point] for part in parts]
    return {"bbox": [box[0], box[1], width, height], "area": round(area, DECIMALS), "segmentation": flat}
