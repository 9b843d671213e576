"""Sources behind addresses. `file://` goes the same way through pyarrow as s3:// and needs no server."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from kestrel.errors import ConfigError
from kestrel.labelling.job import open_journal
from kestrel.labelling.object_stores import require_store, upload
from kestrel.labelling.picture_finder import PictureFinder
from kestrel.labelling.sources import Notes, SourceOptions, count, items
from kestrel.labelling.task import LabelTask

pyarrow = pytest.importorskip("pyarrow")
PICTURES = {"b.png": b"1", "a/z.jpg": b"2", "a/.hidden.png": b"3", "a/notes.md": b"4", "a-b/c.png": b"5"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in PICTURES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    return tmp_path / "in"


def test_a_folder_gives_the_same_pictures_by_its_address(folder: Path) -> None:
    notes, stored_notes = Notes(), Notes()
    local = list(items(str(folder), notes=notes))
    stored = list(items(folder.as_uri(), notes=stored_notes))
    assert [(item.file, item.read()) for item in stored] == [(item.file, item.read()) for item in local]
    assert [item.key for item in stored] == [f"file://{item.key}" for item in local]
    assert stored_notes.counts == notes.counts
    assert [item.file for item in items(folder.as_uri(), SourceOptions(recursive=False))] == ["b.png"]
    assert count(folder.as_uri()) == len(local)


def test_archives_and_tables_are_read_behind_addresses(folder: Path) -> None:
    pictures = ["b.png", "a/z.jpg"]
    for name, mode in (("s.tar", "w"), ("p.tar.gz", "w:gz")):
        with tarfile.open(folder / name, mode) as archive:  # type: ignore[call-overload]
            for picture in pictures:
                archive.add(folder / picture, picture)
    with zipfile.ZipFile(folder / "s.zip", "w") as archive:
        for picture in pictures:
            archive.write(folder / picture, picture)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps({'image': picture})}\n" for picture in pictures))
    (folder / "list.txt").write_text("\n".join([pictures[0], (folder / pictures[1]).as_uri()]))
    table = pyarrow.table({"image": [(folder / picture).read_bytes() for picture in pictures]})
    __import__("pyarrow.parquet").parquet.write_table(table, folder / "rows.parquet")
    for name in ("s.tar", "p.tar.gz", "s.zip", "rows.jsonl", "list.txt", "rows.parquet"):
        found = list(items((folder / name).as_uri()))
        assert [item.read() for item in found] == [b"1", b"2"], name
    shards = list(items(f"{folder.as_uri()}/*.tar*"))
    assert [item.file for item in shards] == [f"{stem}/{name}" for stem in ("p", "s") for name in pictures]


def test_pictures_behind_addresses_are_found_again_by_their_keys(folder: Path, tmp_path: Path) -> None:
    names = [folder.as_uri(), (folder / "b.png").as_uri()]
    finder = PictureFinder(names, SourceOptions(), tmp_path)
    for item in items(names):
        again = finder.find(item.key)
        assert again is not None
        assert again.read() == item.read()
    finder.close()


def test_a_journal_keeps_addresses_as_they_are(folder: Path, tmp_path: Path) -> None:
    with open_journal(tmp_path / "out", LabelTask(objects=("a",)), "m", ["s3://b/x"], SourceOptions()) as journal:
        assert journal.job["sources"] == ["s3://b/x"]


def test_an_address_without_a_picture_is_refused_by_name(folder: Path) -> None:
    (folder / "clip.mp4").write_bytes(b"")
    (folder / "README.md").write_bytes(b"# Words")
    for name, said in {
        f"{folder.as_uri()}/nothing": "there is no",
        f"{folder.as_uri()}/clip.mp4": "download it",
        f"{folder.as_uri()}/README.md": "is no picture",
        "https://example.com/a.png": "download it",
    }.items():
        with pytest.raises(ConfigError, match=f"SOURCE.*{said}"):
            items(name)
    with pytest.raises(ConfigError, match="upload: must be an address"):
        require_store("labels", "upload")


def test_an_upload_is_a_copy_of_the_output(folder: Path, tmp_path: Path) -> None:
    upload(folder, (tmp_path / "copy" / "of").as_uri())
    assert {name: (tmp_path / "copy" / "of" / name).read_bytes() for name in PICTURES} == PICTURES
