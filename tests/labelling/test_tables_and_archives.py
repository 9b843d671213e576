"""Pictures within one file: archives read in any order and up to their damage, rows whose mistakes name the line."""

from __future__ import annotations

import base64
import io
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from kestrel.labelling.archives import PACKED_VIDEOS
from kestrel.labelling.pictures import HIDDEN, NO_PICTURE, TWICE
from kestrel.labelling.records import Item
from kestrel.labelling.sources import Notes, SourceOptions, count, items
from kestrel.labelling.tables import LEFT_OUT
from tests.labelling.test_sources import PNG, files, keys, reason
from tests.peak_memory import least_peak_bytes

NAMES = ("b.png", "./cats/a.JPG", "../../etc/x.png", "/root.png", "c:\\photos\\w.png")
SAFE = ["b.png", "cats/a.JPG", "etc/x.png", "root.png", "photos/w.png"]


def content(name: str) -> bytes:
    return PNG + name.encode()


def written_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*NAMES, "readme.md", "__MACOSX/._b.png", "cats/"):
            archive.writestr(name, content(name))
    return path


def written_tar(path: Path, mode: str) -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name in (*NAMES, "readme.md", "__MACOSX/._b.png"):
            member = tarfile.TarInfo(name)
            member.size = len(content(name))
            archive.addfile(member, io.BytesIO(content(name)))
    return path


ARCHIVES: dict[str, Callable[[Path], Path]] = {
    "a.zip": written_zip,
    "a.tar": lambda path: written_tar(path, "w"),
    "a.tar.gz": lambda path: written_tar(path, "w:gz"),
    "a.TGZ": lambda path: written_tar(path, "w:gz"),
    "a.tar.xz": lambda path: written_tar(path, "w:xz"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_gives_its_pictures_in_any_order_under_safe_names(tmp_path: Path, name: str) -> None:
    path = ARCHIVES[name](tmp_path / name)
    notes = Notes()
    found = list(items(path, notes=notes))
    assert [item.file for item in found] == SAFE
    assert [item.key for item in found] == [f"{path}!/{member}" for member in NAMES]
    assert notes.counts == {NO_PICTURE: 1, HIDDEN: 1}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            data = list(pool.map(lambda item: item.read(), reversed(found)))
            assert data == [content(member) for member in reversed(NAMES)]
    assert count(path) == (5 if name in ("a.zip", "a.tar") else None)
    assert files(tmp_path / "a.*")[0].startswith("a/")


def test_damage_in_an_archive_is_an_item_and_the_rest_is_read(tmp_path: Path) -> None:
    path = written_zip(tmp_path / "a.zip")
    data = bytearray(path.read_bytes())
    data[60:70] = bytes(10)  # within the first member
    data[data.rindex(b"PK\1\2", 0, data.rindex(b"/root.png")) + 8] |= 1  # its entry says: encrypted
    path.write_bytes(data)
    found = list(items(path))
    assert "b.png is damaged" in reason(found[0])
    assert "root.png is encrypted; unpack the archive with its password" in reason(found[3])
    assert [item.read() for item in (found[1], found[2], found[4])] == [content(NAMES[at]) for at in (1, 2, 4)]
    path.write_bytes(data[:-100])
    (item,) = items(path)
    assert "is not a complete zip file" in reason(item)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_tar_file_that_is_cut_off_is_read_up_to_there(tmp_path: Path, name: str, share: float) -> None:
    path = ARCHIVES[name](tmp_path / name)
    data = path.read_bytes()
    end = data.rindex(content(NAMES[-1])[-9:]) if name == "a.tar" else len(data)
    path.write_bytes(data[: int(end * share)])
    *good, bad = items(path)
    assert [item.file for item in good if _reads(item)] == SAFE[: sum(map(_reads, good))]
    assert "is damaged after" in reason(bad)
    assert sum(map(_reads, good)) < len(SAFE)


def _reads(item: Item) -> bool:
    try:
        return item.read() in map(content, NAMES)
    except ValueError:
        return False


def test_a_damaged_header_does_not_pass_for_the_end_of_a_tar_file(tmp_path: Path) -> None:
    path = written_tar(tmp_path / "a.tar", "w")
    data = bytearray(path.read_bytes())
    start = data.index(b"../../etc/x.png\0")
    data[start + 20] ^= 1
    path.write_bytes(data)
    found = list(items(path))
    assert [item.file for item in found[:-1]] == SAFE[:2]
    assert "is damaged after ./cats/a.JPG (bad checksum)" in reason(found[-1])


def test_a_changed_byte_in_a_compressed_tar_file_is_found_at_its_end(tmp_path: Path) -> None:
    path = written_tar(tmp_path / "a.tgz", "w:gz")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1  # of the checksum: changed data would differ from it
    path.write_bytes(data)
    found = list(items(path))
    assert [item.file for item in found[:-1]] == SAFE
    assert "CRC check failed" in reason(found[-1])


def test_links_and_videos_in_archives_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "b.png"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("clip.MP4"))
    notes = Notes()
    (item,) = items(tmp_path / "a.tar", notes=notes)
    assert "is a link" in reason(item)
    assert notes.counts == {PACKED_VIDEOS: 1}


def test_a_long_tar_file_is_read_without_keeping_it(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for number in range(1000):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = 1000
            archive.addfile(member, io.BytesIO(bytes(1000)))
    done = {f"{path}!/{number}.png" for number in range(500)}

    def read() -> None:
        assert sum(len(item.read()) for item in items(path, SourceOptions(), done)) == 500_000

    assert next(items(path, SourceOptions(), done)).file == "500.png"
    assert least_peak_bytes(read) < 1000 * 400  # two digests of each of the 1000 stay


# ---------------------------------------------------------------------- rows


def table(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else orjson.dumps(row)) + b"\n" for row in rows))
    return path


def test_rows_name_pictures_questions_and_objects(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/a.png").write_bytes(PNG)
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    rows = table(
        tmp_path / "rows.jsonl",
        {"image": "cats/a.png"},
        b"",
        {"image": "cats/a.png", "question": "How many?", "weight": 3, "tags": ["x"]},
        {"image": str(tmp_path / "cats/a.png"), "id": 17, "objects": ["gear", "bolt"]},
        {"image": url, "object": "gear", "question": None},
    )
    found = list(items(rows))
    assert [item.read() for item in found] == [PNG] * 4
    assert [item.question for item in found] == [None, "How many?", None, None]
    assert [item.objects for item in found] == [None, None, ("gear", "bolt"), ("gear",)]
    assert [item.extra for item in found] == [{}, {"weight": 3, "tags": ["x"]}, {"id": 17}, {}]
    assert [item.key for item in found][::2] == [f"{rows}#cats/a.png", f"{rows}#id=17"]
    assert found[0].file == "cats/a.png"
    assert found[3].file == "000005.png"
    assert len({item.file for item in found}) == 4
    assert count(rows) == 4


def test_rows_keep_their_keys_when_others_are_added_or_moved(tmp_path: Path) -> None:
    rows = [{"image": "a.png"}, {"image": "a.png", "question": "What?"}, {"image": "b.png", "id": "x"}]
    path = tmp_path / "rows.jsonl"
    before = keys(table(path, *rows))
    notes = Notes()
    table(path, {"image": "0.png"}, *reversed(rows), rows[0])
    assert [item.key for item in items(path, notes=notes)][1:] == before[::-1]
    assert notes.counts == {TWICE: 1}
    assert keys(table(path, {"image": "a.png", "question": "Why?"}))[0] not in before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"image": ', "is not JSON"),
        ([1], "is not an object"),
        ({"picture": "a.png"}, 'has no field "image"'),
        ({"image": 3}, "image is 3"),
        ({"image": ""}, "image is ''"),
        ({"image": "https://x/a.png"}, "is an address; download it"),
        ({"image": "a\0b.png"}, "holds a zero byte"),
        ({"image": "a.png", "objects": []}, "objects is []"),
        ({"image": "a.png", "objects": ["x"], "object": "y"}, "has both object and objects"),
        ({"image": "a.png", "question": " "}, "question is ' '"),
        ({"image": "a.png", "id": True}, "id is True"),
        ({"image": "a.png", "id": 1}, "id 1 is another row's"),
        ({"image": "gone.png"}, "gone.png cannot be read (No such file or directory)"),
        ({"image": "data:image/png;base64,@@@"}, "is not base64"),
    ],
)
def test_a_mistake_in_a_row_names_its_line(tmp_path: Path, row: Any, message: str) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path = table(tmp_path / "rows.jsonl", {"image": "a.png", "id": 1}, row, {"image": "a.png"})
    first, bad, last = items(path)
    assert first.read() == last.read() == PNG
    assert reason(bad).startswith(f"line 2 of {path}")
    assert message in reason(bad)


def test_parquet_rows_hold_or_name_their_pictures(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.png").write_bytes(PNG)
    path = tmp_path / "rows.parquet"
    for images, expected in [
        ([PNG + bytes([number]) for number in range(40)], [f"{number:06d}" for number in range(1, 41)]),
        ([{"bytes": PNG, "path": "x/y.png"}, {"bytes": None, "path": "a.png"}], ["x/y.png", "a.png"]),
        (["a.png", "a.png"], ["a.png", "a-"]),
    ]:
        masks = [b"mask"] * len(images)
        parquet.write_table(pa.table({"image": images, "weight": list(range(len(images))), "mask": masks}), path)
        notes = Notes()
        found = list(items(path, notes=notes))
        assert [item.key for item in found] == [f"{path}#{number:06d}" for number in range(1, len(images) + 1)]
        assert all(item.file.startswith(file) for item, file in zip(found, expected, strict=True))
        assert [item.read()[: len(PNG)] for item in found] == [PNG] * len(images)
        assert [item.extra["weight"] for item in found] == list(range(len(images)))
        assert notes.counts == {LEFT_OUT: 1}
        assert count(path) == len(images)


def test_parquet_files_without_pictures_or_damaged_are_one_item_with_the_reason(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"picture": ["a.png"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    first, second = items([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")])
    assert "no column is named \"image\"; there are ['picture']" in reason(first)
    assert "cannot be read" in reason(second)
