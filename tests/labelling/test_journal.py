"""A journal gives back every whole line, whatever happened to the program that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel.errors import ConfigError
from kestrel.labelling.journal import Journal
from kestrel.labelling.records import Found, Frame, Row

JOB = {"task": "detect", "objects": ["gear", "bolt"]}


def written(path: Path, number: int) -> bytes:
    with Journal.open(path, JOB) as journal:
        for index in range(number):
            journal.add(f"p{index}", {"index": index, "text": "ä\n" * index})
    return path.read_bytes()


def test_cut_anywhere_it_holds_the_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    data = written(path, 4)
    first_line = data.index(b"\n") + 1
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        with Journal.open(path, JOB) as journal:
            num_whole = max(0, data[:end].count(b"\n") - 1) if end >= first_line else 0
            assert [record["index"] for record in journal.records()] == list(range(num_whole))
            journal.add("late", {"index": 9})
        with Journal.open(path, JOB) as journal:
            assert len(journal) == num_whole + 1
            assert journal.record("late") == {"index": 9}


def test_a_damaged_line_costs_its_own_work_only(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    header, first, second, third = written(path, 3).splitlines(keepends=True)
    path.write_bytes(header + first + b"\0" * (len(second) - 1) + b"\n" + third)
    with Journal.open(path, JOB) as journal:
        assert "p1" not in journal
        assert [record["index"] for record in journal.records()] == [0, 2]


def test_of_one_key_the_last_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, JOB) as journal:
        journal.add("a", {"index": 1})
        journal.add("a", {"index": 2})
        assert (len(journal), journal.record("a")) == (1, {"index": 2})
    with Journal.open(path, JOB) as journal:
        assert list(journal.records()) == [{"index": 2}]


def test_another_job_and_a_second_program_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, {**JOB, "task": "point"}):
        pass
    with Journal.open(path, JOB) as journal:  # where nothing was done, any job may begin
        journal.add("a", {})
        with pytest.raises(ConfigError, match="in use by another run"):
            Journal.open(path, JOB)
    with pytest.raises(ConfigError, match=r"objects = \['gear', 'bolt'\], not \['gear'\]"):
        Journal.open(path, {**JOB, "objects": ["gear"]})
    path.write_text('{"hello": 1}\n')
    with pytest.raises(ConfigError, match="not a journal"):
        Journal.open(path, JOB)


def test_a_row_survives_its_json() -> None:
    row = Row(
        key="a.mp4#12",
        file="a/000012.jpg",
        width=640,
        height=480,
        digest="00ff",
        found=(
            Found(label="gear", score=0.5, box=(0.0, 0.25, 1.0, 0.5), path="M 0 0 Z"),
            Found(label="bolt", point=(0.5, 0.5), decision="rejected"),
        ),
        question="Where?",
        frame=Frame("a.mp4", 12, 0.48),
        extra={"shelf": [1, {"b": None}]},
    )
    assert Row.from_json(row.as_json()) == row
    assert Row(key="b", file="b", error="damaged").as_json() == {"key": "b", "file": "b", "error": "damaged"}
