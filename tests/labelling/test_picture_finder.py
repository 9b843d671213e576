"""Every picture of a run is found again by its key, in whatever order, without all of them in memory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kestrel.labelling.picture_finder import PictureFinder
from kestrel.labelling.sources import SourceOptions, items
from tests.labelling.test_sources import PNG, folder
from tests.labelling.test_tables_and_archives import ARCHIVES, table
from tests.labelling.test_video import clip
from tests.peak_memory import least_peak_bytes


def test_pictures_of_all_sources_are_found_in_any_order(tmp_path: Path) -> None:
    names = [folder(tmp_path / "photos", "a.png", "b#1.png")]
    with open(os.fsencode(tmp_path) + b"/photos/caf\xe9.png", "wb") as file:
        file.write(PNG)
    names += [write(tmp_path / name) for name, write in ARCHIVES.items()]
    rows = (
        {"image": "photos/a.png", "id": "x#y!/z"},
        {"image": "photos/a.png", "question": "What?"},
        {"image": "gone"},
    )
    names.append(table(tmp_path / "rows.jsonl", *rows))
    found = list(items(names))
    random.Random(0).shuffle(found)
    finder = PictureFinder(names, SourceOptions(), tmp_path)
    for item in found * 2:
        again = finder.find(item.key)
        assert again is not None
        if not item.key.endswith("gone"):
            assert again.read() == item.read()
            assert again.path == item.path
    assert finder.find(f"{tmp_path}/rows.jsonl#nothing") is None
    assert finder.find(f"{tmp_path}/nothing.png") is None
    finder.close()


def test_frames_are_found_again_with_one_in_memory_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("av")
    options = SourceOptions(every=2)
    path = clip(tmp_path / "a.mp4")
    frames = {item.key: item.read() for item in items(path, options)}
    finder = PictureFinder([path], options, tmp_path)
    finder.find(max(frames))

    def find_all() -> None:
        for key, data in frames.items():
            item = finder.find(key)
            assert item is not None
            assert item.read() == data

    assert least_peak_bytes(find_all) < sum(map(len, frames.values())) / 2
    assert finder.find(f"{path}#000001") is None
    finder.close()
