"""YOLO and VOC folders have the layout that their readers document, with a label file for every picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from PIL import Image

from kestrel.labelling.records import Found, Row
from tests.labelling.label_rows import SQUARE, contents, row, scene_rows, write

GEAR, BOLT = Found(label="gear", score=0.9, box=(0.1, 0.2, 0.5, 0.6)), Found(label="bolt", box=(0.5, 0, 1, 1))


def lines(folder: Path, name: str) -> list[list[float]]:
    return [[float(value) for value in line.split()] for line in (folder / name).read_text().splitlines()]


# ---------------------------------------------------------------------- YOLO


def test_yolo_has_a_label_file_beside_each_picture_of_each_part(tmp_path: Path) -> None:
    rows = [*scene_rows(), row("empty.png")]
    (data_file,) = write("yolo", rows, tmp_path, split={"train": 0.6, "val": 0.4})
    data = yaml.safe_load(data_file.read_text())
    assert list(data) == ["train", "val", "names"]
    assert data["names"] == dict(enumerate((tmp_path / "classes.txt").read_text().split()))
    pictures = [path for part in ("train", "val") for path in sorted((data_file.parent / data[part]).iterdir())]
    assert len(pictures) == len(rows)
    by_name = {one.file.replace("/", "_"): one for one in rows}
    for path in pictures:
        one = by_name[path.name]
        # Readers find a label file by these two changes of the picture's path.
        label_file = Path(str(path).replace("/images/", "/labels/")).with_suffix(".txt")
        for line, found in zip(lines(label_file.parent, label_file.name), one.found, strict=True):
            number, x, y, width, height = line
            assert data["names"][number] == found.label
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            assert found.box == pytest.approx(box, abs=0.01 / 128)
        with Image.open(path) as picture:
            assert picture.size == (one.width, one.height)


def test_yolo_without_a_split_trains_and_validates_on_everything(tmp_path: Path) -> None:
    (data_file,) = write("yolo", [row("a.png", GEAR)], tmp_path, classes=("bolt", "gear"))
    data = yaml.safe_load(data_file.read_text())
    assert data == {"train": "images/train", "val": "images/train", "names": {0: "bolt", 1: "gear"}}
    assert lines(data_file.parent, "labels/train/a.txt") == [[1, 0.3, 0.4, 0.4, 0.4]]


def test_yolo_outlines_are_polygons_in_every_line(tmp_path: Path) -> None:
    halves = "M 0 0 L 0.2 0 L 0.2 1 L 0 1 Z M 0.6 0 L 1 0 L 1 1 L 0.6 1 Z"
    rows = [row("a.png", Found(label="x", box=(0, 0, 1, 1), path=halves), BOLT), row("b.png", GEAR)]
    (data_file,) = write("yolo", rows, tmp_path)
    (joined, corners), (other,) = (lines(data_file.parent, f"labels/train/{name}.txt") for name in "ab")
    assert corners[1:] == [0.5, 0, 1, 0, 1, 1, 0.5, 1]
    assert len(other) == 9
    points = list(zip(joined[1::2], joined[2::2], strict=True))
    area = sum(x * w - u * y for (x, y), (u, w) in zip(points, [*points[1:], points[0]], strict=True)) / 2
    assert area == pytest.approx(0.2 + 0.4)


@pytest.mark.parametrize("format_name", ["yolo", "voc"])
def test_pictures_that_would_share_a_name_get_their_own(format_name: str, tmp_path: Path) -> None:
    long = "x" * 120
    files = ["a.png", "a.bmp", "A.bmp", "d/images/b.png", "d_images b.png", f"{long}/{long}.png", "alone.png"]
    write(format_name, [row(name, GEAR) for name in files], tmp_path)
    found = contents(tmp_path / format_name)
    folders = {"yolo": ("images/train", "labels/train"), "voc": ("JPEGImages", "Annotations")}[format_name]
    pictures, labels = ([Path(name).stem for name in found if name.startswith(f"{folder}/")] for folder in folders)
    assert sorted(pictures) == sorted(labels)
    assert len({name.casefold() for name in labels}) == len(files)
    assert "alone" in labels
    assert not any(" " in name or len(name) > 200 for name in labels)


# ---------------------------------------------------------------------- VOC

ORDER = {
    "annotation": ["folder", "filename", "source", "size", "segmented", "object", "object"],
    "source": ["database", "annotation", "image"],
    "size": ["width", "height", "depth"],
    "object": ["name", "pose", "truncated", "difficult", "bndbox"],
    "bndbox": ["xmin", "ymin", "xmax", "ymax"],
}


def test_voc_elements_stand_in_the_order_of_the_development_kit(tmp_path: Path) -> None:
    odd = Found(label="a <b> & \x07ä", box=(0, 0, 0.001, 1.5), path=SQUARE)
    (folder,) = write("voc", [row("cats/a.png", GEAR, odd), row("b.png")], tmp_path)
    root = ElementTree.parse(folder / "Annotations" / "cats_a.xml").getroot()
    for element in (root, *root.findall("*"), *root.findall("object/bndbox")):
        if len(element):
            assert [child.tag for child in element] == ORDER[element.tag]
    assert root.findtext("filename") == "cats_a.png"
    assert (folder / "JPEGImages" / "cats_a.png").is_file()
    assert [root.findtext(f"size/{name}") for name in ORDER["size"]] == ["200", "100", "3"]
    boxes = [[int(child.text or "") for child in box] for box in root.findall("object/bndbox")]
    assert boxes == [[21, 21, 100, 60], [1, 1, 1, 100]]
    assert root.findall("object")[1].findtext("name") == "a <b> & \ufffdä"
    assert ElementTree.parse(folder / "Annotations" / "b.xml").findall("object") == []


def test_voc_lists_name_every_picture_once(tmp_path: Path) -> None:
    rows: list[Row] = list(scene_rows())
    (folder,) = write("voc", rows, tmp_path, split={"train": 0.5, "val": 0.3, "test": 0.2})
    listed = {path.stem: path.read_text().split() for path in (folder / "ImageSets" / "Main").iterdir()}
    assert set(listed) == {"train", "val", "test", "trainval"}
    assert sorted(listed["train"] + listed["val"]) == sorted(listed["trainval"])
    everything = sorted(path.stem for path in (folder / "Annotations").iterdir())
    assert sorted(listed["trainval"] + listed["test"]) == everything
    assert all(listed.values())
    write("voc", rows, tmp_path)
    listed = {path.stem: path.read_text() for path in (folder / "ImageSets" / "Main").iterdir()}
    assert len(set(listed.values())) == 1
    assert set(listed) == {"train", "val", "trainval"}
