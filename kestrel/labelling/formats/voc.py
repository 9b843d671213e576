"""Pascal VOC: `voc/Annotations/NAME.xml`, `JPEGImages/NAME.png`, `ImageSets/Main/PART.txt`.

- `bndbox` has whole pixels that count from 1, the last included, as in VOC's own files. Of an outline it is the box.
  Boxes without area are left out. Scores have no place.
- `JPEGImages` holds pictures as they are, with their own endings: `filename` tells it. They lie side by side,
  "cats/a.png" as "cats_a.png"; where a name would not be one picture's alone, part of a digest follows it.
- `ImageSets/Main/PART.txt` lists the names of a part of the split, `trainval.txt` those of all parts but test. Without
  a split `train.txt`, `val.txt` and `trainval.txt` list all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kestrel.labelling.formats.files import whole_folder
from kestrel.labelling.formats.flat_names import FlatNames
from kestrel.labelling.formats.label_set import LabelSet
from kestrel.labelling.formats.shapes import pixel_box
from kestrel.labelling.records import Box, Row

FOLDER = "voc"
OWN = ("Annotations", "ImageSets", "JPEGImages")
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_voc(labels: LabelSet, output: Path) -> list[Path]:
    names = FlatNames(labels)
    with whole_folder(output / FOLDER, OWN) as folder, ExitStack() as files:
        for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (folder / name).mkdir(parents=True)
        lists = {
            part: files.enter_context((folder / "ImageSets" / "Main" / f"{part}.txt").open("w", encoding="utf-8"))
            for part in dict.fromkeys(("trainval", *(labels.parts or ("train", "val"))))
        }
        for row in labels.rows():
            name, picture = names.name(row), names.picture(row)
            (folder / "Annotations" / f"{name}.xml").write_bytes(_annotation(row, picture))
            labels.options.place(row, folder / "JPEGImages" / picture)
            part = labels.part_of(row)
            for listed in lists if part is None else {"trainval" if part != "test" else part, part}:
                lists[listed].write(f"{name}\n")
    return [output / FOLDER]


def _annotation(row: Row, picture: str) -> bytes:
    root = ElementTree.Element("annotation")
    source = {"database": "labelled by Kestrel", "annotation": "PASCAL VOC", "image": row.file}
    size = {"width": row.width, "height": row.height, "depth": 3}
    _add(root, {"folder": "JPEGImages", "filename": picture, "source": source, "size": size, "segmented": 0})
    for one in row.found:
        box = None if one.box is None else pixel_box(row, one.box)
        if box is not None:
            told = {"name": one.label, "pose": "Unspecified", "truncated": 0, "difficult": 0}
            _add(root, {"object": {**told, "bndbox": _whole_pixels(row, box)}})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8") + b"\n"


def _add(parent: ElementTree.Element, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        element = ElementTree.SubElement(parent, name)
        if isinstance(value, Mapping):
            _add(element, value)
        else:
            element.text = _NOT_IN_XML.sub("\ufffd", str(value))


def _whole_pixels(row: Row, box: Box) -> dict[str, int]:
    left, top = min(round(box[0]), row.width - 1), min(round(box[1]), row.height - 1)
    right, bottom = max(round(box[2]), left + 1), max(round(box[3]), top + 1)
    return {"xmin": left + 1, "ymin": top + 1, "xmax": right, "ymax": bottom}
