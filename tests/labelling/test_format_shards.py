"""Parquet files and tar shards: what other pipelines read is what the lines of JSON say."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from kestrel.errors import ConfigError
from kestrel.labelling import plans
from kestrel.labelling.formats import shards
from kestrel.labelling.plans import require_fits
from kestrel.labelling.records import Found, Frame, Row
from kestrel.labelling.sources import items
from tests.labelling.label_rows import place, row, write

BOX = Found(label="gear", score=0.9, box=(0.1, 0.2, 0.5, 0.6))
ROWS = (
    row("a.png", BOX, Found(label="bolt", point=(0.5, 0.25))),
    row("b.c/d.png", extra={"shelf": 3}, answer="two", question="how many?"),
    row("clip/000003.png", frame=Frame("clip.mp4", 3, 0.1)),
    Row(key="z", file="z", error="damaged"),
)


def test_a_parquet_file_holds_the_fields_of_the_lines(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (path,) = write("parquet", ROWS, tmp_path, split={"train": 0.5, "val": 0.5})
    (lines,) = write("jsonl", ROWS, tmp_path, split={"train": 0.5, "val": 0.5})
    for found, line in zip(parquet.read_table(path).to_pylist(), lines.read_text().splitlines(), strict=True):
        wanted = json.loads(line)
        if found["extra"] is not None:
            found["extra"] = json.loads(found["extra"])
        for one, object_of in zip(found.pop("found") or (), wanted.pop("objects", ()), strict=True):
            del object_of["pixels"]
            assert {name: value for name, value in one.items() if value is not None} == object_of
        assert {name: value for name, value in found.items() if value is not None} == wanted


def test_a_parquet_file_with_pictures_can_be_labelled_again(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (path,) = write("parquet", ROWS[:2], tmp_path, with_pictures=True)
    place(ROWS[0], tmp_path / "wanted.png")
    first, second = items(str(path))
    assert first.read() == (tmp_path / "wanted.png").read_bytes()
    assert second.question == "how many?"


def test_shards_hold_each_picture_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SAMPLES_PER_SHARD", 2)
    paths = write("webdataset", ROWS, tmp_path)
    assert [path.name for path in paths] == ["000000.tar", "000001.tar"]
    samples: dict[str, dict[str, bytes]] = {}
    for path in paths:
        with tarfile.open(path) as archive:
            for member in archive:
                stem, _, suffix = member.name.partition(".")
                samples.setdefault(stem, {})[suffix] = archive.extractfile(member).read()  # type: ignore[union-attr]
    (lines,) = write("jsonl", ROWS[:3], tmp_path)
    assert [json.loads(one["json"]) for one in samples.values()] == [
        json.loads(line) for line in lines.read_text().splitlines()
    ]
    place(ROWS[1], tmp_path / "wanted.png")
    assert samples["000001"]["png"] == (tmp_path / "wanted.png").read_bytes()
    assert [item.read() for item in items([str(path) for path in paths])] == [one["png"] for one in samples.values()]


def test_parquet_without_pyarrow_is_refused_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"format: parquet needs pyarrow.*\[parquet\]"):
        require_fits("parquet", "detect")
