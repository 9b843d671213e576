"""What holds for every format: same rows, same bytes; whole or not at all; what was rejected is not there."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import ConfigError
from kestrel.labelling.formats import FormatOptions, shards, split_of, stable_classes, write_labels
from kestrel.labelling.plans import FORMATS, parse_split, require_fits
from kestrel.labelling.records import ACCEPTED, REJECTED, Found, Frame, Row
from tests.labelling.label_rows import contents, place, row, scene_rows, write
from tests.peak_memory import least_peak_bytes

BOX = (0.1, 0.2, 0.5, 0.6)
FOLDERS = ["coco", "yolo", "voc", "labelstudio", "webdataset"]


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_same_rows_give_the_same_bytes(format_name: str, tmp_path: Path) -> None:
    rows = [*scene_rows(6), Row(key="z", file="z", error="damaged")]
    for name in ("a", "b", "b"):  # into a new folder, and over an old one
        paths = write(format_name, rows, tmp_path / name, split={"train": 0.5, "val": 0.5}, with_pictures=True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("format_name", FORMATS)
def test_rejected_objects_rows_and_low_scores_are_left_out(format_name: str, tmp_path: Path) -> None:
    kept = [
        Found(label=name, score=score, box=BOX, decision=decision)
        for name, score, decision in (("high", 0.9, None), ("sure", 0.1, ACCEPTED), ("unscored", None, None))
    ]
    gone = [Found(label="low", score=0.1, box=BOX), Found(label="wrong", score=0.9, box=BOX, decision=REJECTED)]
    rows = [row("a.png", *kept, *gone), row("gone.png", *kept, decision=REJECTED)]
    write(format_name, rows, tmp_path, min_score=0.5)
    wanted = [row("a.png", *kept)]
    write(format_name, wanted, tmp_path / "wanted", classes=("high", "low", "sure", "unscored", "wrong"))
    assert {k: v for k, v in contents(tmp_path).items() if not k.startswith("wanted")} == contents(tmp_path / "wanted")


@pytest.mark.parametrize("format_name", FOLDERS)
def test_killed_anywhere_it_leaves_one_set_or_what_the_next_run_completes(
    format_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_rows(number: int, name: str) -> None:
        write(format_name, scene_rows(number), tmp_path / name, classes=classes, with_pictures=True)

    classes = tuple({found.label: None for one in scene_rows(4) for found in one.found})
    write_rows(4, "wanted")
    wanted = contents(tmp_path / "wanted" / format_name)
    folder = tmp_path / "out" / format_name
    write_rows(2, "out")
    before = contents(folder)
    (folder / "mine.txt").write_text("notes")
    steps = _Steps()
    monkeypatch.setattr(os, "rename", steps.limited(os.rename))
    monkeypatch.setattr(shutil, "rmtree", steps.limited(shutil.rmtree))
    for steps.left in range(10):
        try:
            write_rows(4, "out")
        except SystemExit:
            if folder.exists():
                found = contents(folder)
                found.pop("mine.txt", None)
                assert found in (before, wanted)
        else:
            break
    assert steps.killed > 3
    assert contents(folder) == wanted | {"mine.txt": b"notes"}
    assert not list((tmp_path / "out").glob(".*"))


class _Steps:
    """Ends the program, in a way, after some calls."""

    def __init__(self) -> None:
        self.left = self.killed = 0

    def limited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                self.killed += 1
                raise SystemExit
            return function(*arguments)

        return call


@pytest.mark.parametrize("format_name", FORMATS)
def test_an_error_while_writing_leaves_the_old_set(format_name: str, tmp_path: Path) -> None:
    write(format_name, scene_rows(2), tmp_path)
    before = contents(tmp_path)
    calls = 0

    def rows() -> Iterator[Row]:
        nonlocal calls
        calls += 1
        yield from scene_rows(2)
        if calls > 2:  # after the survey and the list of errors
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        write_labels(format_name, rows, tmp_path, FormatOptions(place=place))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("format_name", FORMATS)
def test_few_rows_are_in_memory_at_a_time(format_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number, size = 60, 30_000
    monkeypatch.setattr(shards, "ROWS_PER_GROUP", 4)
    options = FormatOptions(place=lambda row, path: path.write_bytes(b"x") and None)

    def rows() -> Iterator[Row]:
        return (row(f"{index:03}.png", extra={"text": f"{index:{size}}"}) for index in range(number))

    assert least_peak_bytes(lambda: write_labels(format_name, rows, tmp_path, options)) < number * size / 3


def test_a_format_that_cannot_hold_a_task_names_those_that_can() -> None:
    for name in FORMATS:
        require_fits(name, "detect")
    with pytest.raises(ConfigError, match="yolo cannot hold the results of caption; choose among coco, csv, jsonl"):
        require_fits("yolo", "caption")
    with pytest.raises(ConfigError, match="voc cannot hold the results of point"):
        require_fits("voc", "point")
    with pytest.raises(ConfigError, match="did you mean 'coco'"):
        require_fits("cocoo", "detect")


@pytest.mark.parametrize("one", [row("a.png", Found(label="x", point=(0, 0))), row("a.png", answer="Yes.")])
def test_results_without_a_place_in_a_format_are_refused(one: Row, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="yolo cannot hold"):
        write("yolo", [one], tmp_path)


# ---------------------------------------------------------------------- tables


def test_a_table_has_a_line_for_each_object_each_negative_and_each_error(tmp_path: Path) -> None:
    rows = [
        row("a,b.png", Found(label="x", score=0.5, box=BOX, path="M 0 0 Z"), Found(label="y", point=(0.5, 0.5))),
        row("b.png", question='Say "a"?', answer="a\nb", frame=Frame("v.mp4", 3, 0.12), extra={"id": 7}),
        Row(key="c", file="c.png", error="damaged"),
    ]
    (path,) = write("csv", rows, tmp_path, split={"train": 1.0})
    with path.open(newline="", encoding="utf-8") as file:
        first, second, third, last = ({k: v for k, v in line.items() if v} for line in csv.DictReader(file))
    picture = {"file": "a,b.png", "key": "a,b.png", "width": "200", "height": "100", "split": "train"}
    places = {"x_min": "20.0", "y_min": "20.0", "x_max": "100.0", "y_max": "60.0"}
    assert first == {**picture, "label": "x", "score": "0.5", **places, "path": "M 0 0 Z"}
    assert second == {**picture, "label": "y", "x": "100.0", "y": "50.0"}
    assert (third["question"], third["answer"], third["extra"]) == ('Say "a"?', "a\nb", '{"id":7}')
    assert (third["video"], third["frame"], third["time_s"]) == ("v.mp4", "3", "0.12")
    assert last == {"file": "c.png", "key": "c", "error": "damaged"}


def test_json_lines_tell_shares_and_pixels(tmp_path: Path) -> None:
    rows = [row("a.png", Found(label="x", score=0.5, box=BOX)), row("b.png"), Row(key="c", file="c.png", error="bad")]
    (path,) = write("jsonl", rows, tmp_path)
    first, second, last = (json.loads(line) for line in path.read_text().splitlines())
    places = {"x_min": 0.1, "y_min": 0.2, "x_max": 0.5, "y_max": 0.6}
    pixels = {"x_min": 20, "y_min": 20, "x_max": 100, "y_max": 60}
    assert first["objects"] == [{"label": "x", "score": 0.5, **places, "pixels": pixels}]
    assert second == {"file": "b.png", "key": "b.png", "width": 200, "height": 100, "objects": []}
    assert last == {"file": "c.png", "key": "c", "error": "bad"}


# ---------------------------------------------------------------------- split and classes


def test_a_picture_keeps_its_part_whatever_is_added_and_parts_have_their_shares() -> None:
    split = {"train": 0.8, "val": 0.2}
    rows = [row(f"{index}.png") for index in range(2000)]
    parts = [split_of(one, split) for one in rows]
    assert 0.75 < parts.count("train") / len(parts) < 0.85
    renamed = replace(rows[0], key="other", file="other.png")
    assert split_of(renamed, split) == parts[0]
    larger = [split_of(one, {"train": 0.9, "val": 0.1}) for one in rows]
    assert all(now == "train" for before, now in zip(parts, larger, strict=True) if before == "train")


@pytest.mark.parametrize("text", ["train", "train=2", "train=0.5", "train=0.5,train=0.5", "a/b=1", "train=x", "=1", ""])
def test_a_split_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        parse_split(text)
    assert parse_split("train=0.9, val=0.1") == {"train": 0.9, "val": 0.1}


def test_classes_keep_their_numbers(tmp_path: Path) -> None:
    assert stable_classes(tmp_path, ("gear", "bolt")) == ("gear", "bolt")
    assert stable_classes(tmp_path, ("a nut", "bolt")) == ("gear", "bolt", "a nut")
    assert stable_classes(tmp_path, ()) == ("gear", "bolt", "a nut")
    assert (tmp_path / "classes.txt").read_text() == "gear\nbolt\na nut\n"
    with pytest.raises(ConfigError, match="one line"):
        stable_classes(tmp_path, ("two\nlines",))
