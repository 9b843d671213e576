"""COCO files say what rows say, in the form that pycocotools evaluates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from kestrel.images.masks import rasterise_path
from kestrel.labelling.records import Found, Frame, Row
from kestrel.train.adapter.dataset import DataChoice, read_dataset
from kestrel.train.adapter.samples import PictureFolder
from tests.labelling.label_rows import SQUARE, contents, row, scene_rows, write
from tests.train.adapter.data_folder import LIMITS

CURVED = "M 0 0.5 C 0 0.2 0.2 0 0.5 0 S 1 0.2 1 0.5 Q 1 1 0.5 1 A 0.5 0.5 0 0 1 0 0.5 Z"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def average_precision(truth: Path, found: Path, kind: str = "bbox") -> float:
    reference = COCO(str(truth))
    evaluation = COCOeval(reference, reference.loadRes(read(found)["annotations"]), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return float(evaluation.stats[0])


def test_rows_equal_to_the_truth_have_an_ap_of_one(tmp_path: Path) -> None:
    rows = scene_rows()
    (found,) = write("coco", rows, tmp_path / "found")
    content = read(found)
    for entry in content["annotations"]:
        del entry["score"]
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps(content))
    assert average_precision(truth, found) == 1.0
    (fewer,) = write(
        "coco", [Row.from_json({**one.as_json(), "found": []}) for one in rows[:6]] + list(rows[6:]), tmp_path
    )
    assert 0 < average_precision(truth, fewer) < 0.95


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_an_outline_covers_what_its_path_covers(tmp_path: Path) -> None:
    box = (0.1, 0.2, 0.8, 0.9)
    (path,) = write("coco", [row("a.png", Found(label="leaf", box=box, path=CURVED))], tmp_path)
    coco = COCO(str(path))
    (entry,) = coco.loadAnns(coco.getAnnIds())
    names = ("x_min", "y_min", "x_max", "y_max")
    mask = rasterise_path(CURVED, dict(zip(names, box, strict=True)), 100, 200)
    drawn = coco.annToMask(entry).astype(bool)
    assert (mask & drawn).sum() / (mask | drawn).sum() > 0.98
    assert entry["area"] == pytest.approx(mask.sum(), rel=0.01)
    assert len(entry["segmentation"]) == 1


def test_parts_of_an_outline_stay_and_holes_are_filled(tmp_path: Path) -> None:
    hole = "M 0 0 L 0.5 0 L 0.5 1 L 0 1 Z M 0.1 0.1 L 0.1 0.9 L 0.4 0.9 L 0.4 0.1 Z"
    apart = "M 0.6 0 L 0.6 1 L 1 1 L 1 0 Z"
    (path,) = write("coco", [row("a.png", Found(label="x", box=(0, 0, 1, 1), path=f"{hole} {apart}"))], tmp_path)
    (entry,) = read(path)["annotations"]
    assert len(entry["segmentation"]) == 2
    assert entry["area"] == 200 * 100 * 0.9


def test_boxes_are_clipped_and_those_without_area_left_out(tmp_path: Path) -> None:
    over = Found(label="a", box=(-0.1, 0.5, 0.25, 1.2), path=SQUARE)
    (path,) = write("coco", [row("a.png", over, Found(label="a", box=(0.5, 0.5, 0.5, 0.7)))], tmp_path)
    (entry,) = read(path)["annotations"]
    assert entry["bbox"] == [0, 50, 50, 50]
    corners = np.array(entry["segmentation"][0]).reshape(-1, 2)
    assert corners.min() >= 0
    assert (corners.max(axis=0) == (50, 100)).all()


def test_negatives_and_unused_classes_are_there_and_errors_are_not(tmp_path: Path) -> None:
    rows = [
        row("a.png"),
        Row(key="b", file="b.png", error="no picture, but text"),
        row("c.png", Found(label="cat", box=(0, 0, 1, 1))),
    ]
    (path,) = write("coco", rows, tmp_path, classes=("dog", "cat"))
    content = read(path)
    assert [image["file_name"] for image in content["images"]] == ["a.png", "c.png"]
    assert [(entry["id"], entry["name"]) for entry in content["categories"]] == [(1, "dog"), (2, "cat")]
    assert [entry["category_id"] for entry in content["annotations"]] == [2]
    assert (tmp_path / "errors.csv").read_text() == 'file,key,error\nb.png,b,"no picture, but text"\n'


def test_ids_stay_when_pictures_and_classes_come_before_others(tmp_path: Path) -> None:
    old = row("m.png", Found(label="m", box=(0, 0, 1, 1)))
    new = row("a.png", Found(label="a", box=(0, 0, 1, 1)))
    before = read(write("coco", [old], tmp_path)[0])
    after = read(write("coco", [new, old], tmp_path)[0])
    assert after["images"][1] == before["images"][0]
    assert before["categories"] == [{"id": 1, "name": "m"}]
    assert after["categories"] == [{"id": 1, "name": "m"}, {"id": 2, "name": "a"}]
    assert 0 < after["images"][0]["id"] < 2**52


def test_points_and_frames_have_a_place(tmp_path: Path) -> None:
    eye = Found(label="eye", point=(0.5, 0.25), score=0.5)
    (path,) = write("coco", [row("a.png", eye, frame=Frame("a.mp4", 3, 0.12), extra={"id": 7})], tmp_path)
    content = read(path)
    (point,) = content["annotations"]
    assert (point["keypoints"], point["num_keypoints"], point["bbox"]) == ([100, 25, 2], 1, [100, 25, 0, 0])
    assert content["categories"] == [{"id": 1, "name": "eye", "keypoints": ["point"], "skeleton": []}]
    assert content["images"][0]["frame"] == {"video": "a.mp4", "index": 3, "time_s": 0.12}
    assert content["images"][0]["extra"] == {"id": 7}


def test_pycocotools_reads_answers_as_captions(tmp_path: Path) -> None:
    (path,) = write("coco", [row("a.png"), row("b.png", question="What?", answer="An ä.")], tmp_path)
    coco = COCO(str(path))
    (entry,) = coco.loadAnns(coco.getAnnIds(imgIds=read(path)["images"][1]["id"]))
    assert (entry["caption"], entry["question"]) == ("An ä.", "What?")


def test_parts_of_a_split_make_up_the_whole_and_training_reads_them(tmp_path: Path) -> None:
    rows = scene_rows()
    files = write("coco", rows, tmp_path, split={"train": 0.6, "val": 0.4}, with_pictures=True)
    assert [file.name for file in files] == ["annotations.json", "val_annotations.json"]
    parts = [{image["file_name"] for image in read(file)["images"]} for file in files]
    assert parts[0] | parts[1] == {one.file for one in rows}
    assert not parts[0] & parts[1]
    data = read_dataset(tmp_path / "coco", PictureFolder(tmp_path / "coco", LIMITS), DataChoice(negatives=0.0))
    told = {(one.file, thing.label) for one in rows for thing in one.found}
    assert len(data.train) + len(data.val) == len(told)


def test_without_a_split_parts_of_an_earlier_one_are_gone_and_other_files_stay(tmp_path: Path) -> None:
    write("coco", scene_rows(), tmp_path, split={"train": 0.5, "val": 0.5})
    (tmp_path / "coco" / "notes.txt").write_text("mine")
    write("coco", scene_rows(), tmp_path)
    assert set(contents(tmp_path / "coco")) == {"annotations.json", "notes.txt"}
