"""COCO annotations: the right questions with the right truth, and mistakes by entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import ConfigError
from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.adapter.samples import DataError

from .data_folder import draw_picture, read

Content = dict[str, list[dict[str, Any]]]


def content() -> Content:
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "width": 120, "height": 80},
            {"id": 8, "file_name": "b.png"},
            {"id": 9, "file_name": "c.png"},
        ],
        "categories": [{"id": 1, "name": "bolt"}, {"id": 2, "name": "nut"}, {"id": 3, "name": "washer"}],
        "annotations": [
            {"image_id": 7, "category_id": 1, "bbox": [60, 40, 30, 40], "segmentation": [[60, 40, 90, 40, 75, 80]]},
            {"image_id": 7, "category_id": 2, "bbox": [90, 10, 30.5, 20]},
            {"image_id": 7, "category_id": 2, "bbox": [0, 10, 12, 20]},
            {"image_id": 8, "category_id": 2, "bbox": [0, 0, 100, 50], "iscrowd": 1},
        ],
    }


def folder_of(folder: Path, data: object, images: str = "") -> Path:
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        draw_picture(folder / images / name, number)
    (folder / "annotations.json").write_text(json.dumps(data))
    return folder


def asked(folder: Path, **choice: Any) -> dict[tuple[str, str, str], tuple[float, ...]]:
    found: dict[tuple[str, str, str], tuple[float, ...]] = {}
    for sample in read(folder, val_share=0.0, **choice).train:
        numbers: list[float] = []
        for piece in sample.example.target:
            if isinstance(piece, CoordToken):
                numbers.append(piece.value)
            elif isinstance(piece, SizeToken):
                numbers += [piece.width, piece.height]
        key = (sample.picture.path.name, sample.example.skill, sample.example.fields["object"])
        found[key] = tuple(numbers)
    return found


@pytest.mark.parametrize("images", ["", "images"])
def test_one_question_per_category_that_is_there_and_none_about_crowds(tmp_path: Path, images: str) -> None:
    found = asked(folder_of(tmp_path, content(), images), negatives=0.0)
    assert set(found) == {("a.png", "detect", "bolt"), ("a.png", "detect", "nut")}
    assert found["a.png", "detect", "bolt"] == pytest.approx((0.625, 0.75, 0.25, 0.5))
    left, right = (0.05, 0.25, 0.1, 0.25), (0.875, 0.25, 0.25, 0.25)
    assert found["a.png", "detect", "nut"] == pytest.approx((*left, *right))


def test_points_are_the_centres_of_the_boxes(tmp_path: Path) -> None:
    found = asked(folder_of(tmp_path, content()), negatives=0.0, skills=("point",))
    assert found["a.png", "point", "nut"] == pytest.approx((0.05, 0.25, 0.875, 0.25))


def test_outlines_are_asked_for_where_there_is_one_polygon(tmp_path: Path) -> None:
    found = asked(folder_of(tmp_path, content()), negatives=0.0, skills=("segment",))
    assert set(found) == {("a.png", "segment", "bolt")}


def test_the_share_of_questions_about_absent_things_is_kept_by_chance_of_the_seed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, content())
    absent = [{key for key, value in asked(folder, negatives=0.5, seed=seed).items() if not value} for seed in range(5)]
    # Three pairs of picture and category have annotations, so three of the six others are drawn.
    assert {len(each) for each in absent} == {3}
    assert len({frozenset(each) for each in absent}) > 1
    pairs = {(picture, name) for each in absent for picture, _, name in each}
    assert not pairs & {("a.png", "bolt"), ("a.png", "nut"), ("b.png", "nut")}


def _set(where: str, index: int, key: str, value: object) -> Callable[[Content], None]:
    def change(data: Content) -> None:
        data[where][index][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("annotations", 0, "bbox", [100, 40, 30, 40]), "annotations[0]: bbox: [100, 40, 30, 40] lies outside"),
        (_set("annotations", 0, "bbox", [10, 10, 0, 5]), "annotations[0]: bbox: [10, 10, 0, 5] has no area"),
        (_set("annotations", 1, "bbox", [1, 2, 3]), "annotations[1]: bbox: must be [x, y, width, height] in pixels"),
        (_set("annotations", 2, "category_id", 5), "annotations[2]: category_id: 5 is not among the categories"),
        (_set("annotations", 2, "category_id", []), "annotations[2]: category_id: [] is not among the categories"),
        (_set("annotations", 2, "image_id", 5), "annotations[2]: image_id: 5 is not among the images"),
        (_set("images", 0, "file_name", "../a.png"), "images[0]: file_name: '../a.png' leaves the data folder"),
        (_set("images", 0, "file_name", "/a.png"), "images[0]: file_name: '/a.png' is an absolute path"),
        (_set("images", 0, "file_name", "z.png"), "images[0]: file_name: 'z.png' is neither beside"),
        (
            _set("images", 0, "width", 121),
            "images[0]: width: the annotations say 121 x 80, but a.png has 120 x 80 pixels",
        ),
        (_set("images", 1, "id", 7), "images[1]: id: must be a number of its own (got 7)"),
        (_set("categories", 1, "name", ""), "categories[1]: name: must be text"),
        (lambda data: data.pop("images"), "images: must be a list (got None)"),
    ],
)
def test_mistakes_are_named_by_entry_and_field(
    tmp_path: Path, change: Callable[[Content], object], message: str
) -> None:
    data = content()
    change(data)
    with pytest.raises(DataError) as caught:
        read(folder_of(tmp_path, data))
    assert f"annotations.json {message}" in str(caught.value).replace("annotations.json: ", "annotations.json ")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_coco_is_refused(tmp_path: Path, text: str) -> None:
    folder_of(tmp_path, {})
    (tmp_path / "annotations.json").write_text(text)
    with pytest.raises(DataError, match=r"annotations.json: (cannot be read as JSON|must be an object)"):
        read(tmp_path)


def test_skills_that_boxes_do_not_teach_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="caption cannot be learnt from COCO"):
        read(folder_of(tmp_path, content()), skills=("caption",))
