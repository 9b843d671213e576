"""Names on a command line become pictures: every one once, under a key that lasts, what was passed over is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kestrel.errors import ConfigError
from kestrel.labelling.pictures import EXCLUDED, HIDDEN, LINKS, NO_PICTURE, TWICE
from kestrel.labelling.records import Item
from kestrel.labelling.sources import Notes, SourceOptions, count, items
from tests.peak_memory import least_peak_bytes
from tests.scene import SCENE

PNG = SCENE.read_bytes()


def folder(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)
    return root


def files(*names: Path | str, recursive: bool = True) -> list[str]:
    return [item.file for item in items(names, SourceOptions(recursive=recursive))]


def keys(*names: Path | str) -> list[str]:
    return [item.key for item in items(names)]


def reason(item: Item) -> str:
    with pytest.raises((OSError, ValueError)) as caught:
        item.read()
    return str(caught.value)


def test_a_folder_gives_its_pictures_by_sorted_name_and_notes_the_rest(tmp_path: Path) -> None:
    folder(tmp_path, "b.JPG", "a.png", "cats/c.Jpeg", "cats/deep/d.webp", "e.HEIC", "0f3a", ".hidden.png", ".git/x.png")
    (tmp_path / "readme.txt").write_text("a.png")
    (tmp_path / "cats/data").write_bytes(b"no picture")
    os.mkfifo(tmp_path / "pipe.png")
    notes = Notes()
    found = list(items(tmp_path, notes=notes))
    assert [item.file for item in found] == ["0f3a", "a.png", "b.JPG", "cats/c.Jpeg", "cats/deep/d.webp", "e.HEIC"]
    assert {item.read() for item in found} == {PNG}
    assert [item.path for item in found] == [str(tmp_path / item.file) for item in found]
    assert notes.counts == {HIDDEN: 2, NO_PICTURE: 3}
    assert notes.lines()[1] == f"skipped files that are not pictures: 3, such as {tmp_path}/cats/data"
    assert files(tmp_path, recursive=False) == ["0f3a", "a.png", "b.JPG", "e.HEIC"]
    assert count(tmp_path) == 6


def test_keys_depend_on_the_picture_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = folder(tmp_path / "x/day", "cats/a.png"), folder(tmp_path / "y/day", "cats/a.png")
    (tmp_path / "link").symlink_to(first)
    alone = keys(first)
    monkeypatch.chdir(tmp_path)
    for spelling in ("x/day", "./x/../x/day/", "link", "x/*", "x/day/cats/a.png", "link/cats/*.png"):
        assert keys(spelling) == alone, spelling
    both = [*alone, *keys(second)]
    assert keys(first, second) == both
    assert len(set(both)) == 2
    assert files("x/day", "y/day", tmp_path) == ["cats/a.png", "day/cats/a.png"]


def test_a_picture_named_twice_comes_once_and_names_for_outputs_differ(tmp_path: Path) -> None:
    photos = folder(tmp_path / "photos", "a.png", "more/a.png")
    more = folder(tmp_path / "more", "a.png")
    folder(tmp_path / "x/more", "a.png")
    notes = Notes()
    found = list(items([str(photos), str(photos / "a.png"), str(more)], notes=notes))
    assert notes.counts == {TWICE: 1}
    assert [item.file for item in found[:2]] == ["a.png", "more/a.png"]
    assert found[2].file.startswith("more/a-")
    assert found[2].file == files(photos, more)[2]
    assert files(f"{photos}/more/*", f"{photos}/more/a*", more, tmp_path / "x/more") == [
        "a.png",
        "more/a.png",
        "more-2/a.png",
    ]


def test_what_is_done_is_left_out_and_changes_no_other_name(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "photos", "more/a.png"), folder(tmp_path / "more", "a.png", "b.png")
    names = [str(first), str(second)]
    whole = list(items(names))
    for done in whole:
        assert list(items(names, done={done.key})) == [item for item in whole if item != done]


def test_links_are_followed_but_lead_nowhere_twice(tmp_path: Path) -> None:
    photos, store = folder(tmp_path / "photos", "a/x.png"), folder(tmp_path / "store", "y.png")
    (photos / "b").symlink_to(photos / "a")
    (photos / "loop").symlink_to(photos)
    (photos / "above").symlink_to(tmp_path)
    (photos / "outside").symlink_to(store)
    (photos / "outside2").symlink_to(store)
    (store / "back").symlink_to(photos)
    (photos / "z.png").symlink_to(store / "y.png")
    (photos / "zz.png").symlink_to(tmp_path / "gone.png")
    notes = Notes()
    found = {item.file: item for item in items(photos, notes=notes)}
    assert list(found) == ["a/x.png", "outside/y.png", "z.png", "zz.png"]
    assert found["z.png"].read() == PNG
    assert "No such file" in reason(found["zz.png"])
    assert notes.counts == {LINKS: 5}


def test_the_output_within_a_source_is_not_walked(tmp_path: Path) -> None:
    folder(tmp_path, "a.png", "out/images/a.png")
    notes = Notes()
    options = SourceOptions(exclude=(str(tmp_path / "out"),))
    assert [item.file for item in items(tmp_path, options, notes=notes)] == ["a.png"]
    assert notes.counts == {EXCLUDED: 1}


def test_a_folder_that_cannot_be_read_is_one_item_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path, "a/x.png", "b/x.png", "c/x.png")
    scan = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = list(items(tmp_path))
    assert [item.file for item in found] == ["a/x.png", "b", "c/x.png"]
    assert "cannot be read (Permission denied)" in reason(found[1])


def test_names_that_are_no_unicode_have_keys_that_a_journal_can_hold(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.png", "wb") as file:
        file.write(PNG)
    (item,) = items(tmp_path)
    assert item.key == rf"{tmp_path}/caf\xe9.png"
    assert item.file == "caf_.png"
    assert item.read() == PNG
    item.key.encode()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.png", ["a.png"]),
        ("**/*.png", ["a.png", "cats/b.png", "cats/deep/c.png", "dogs/d.png"]),
        ("c*", ["cats/b.png", "cats/deep/c.png"]),
        ("*/?.png", ["cats/b.png", "dogs/d.png"]),
        ("[cd]*/deep/**", ["cats/deep/c.png"]),
        ("**/deep", ["cats/deep/c.png"]),
    ],
)
def test_a_glob_takes_files_and_folders_that_fit(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    folder(tmp_path, "a.png", "cats/b.png", "cats/deep/c.png", "dogs/d.png", "cats/[x]/e.jpg")
    assert [file for file in files(tmp_path / pattern) if file.endswith(".png")] == expected
    assert files(tmp_path / "cats/[x]") == ["e.jpg"]


def test_a_list_names_pictures_from_its_own_folder_and_errors_name_the_line(tmp_path: Path) -> None:
    folder(tmp_path, "set/a.png", "other/b.png")
    wanted = tmp_path / "set/list.txt"
    wanted.write_bytes(f"\ufeffa.png\r\n\n{tmp_path}/other/b.png\ngone.png\n../other\nhttps://x/y.png\n".encode())
    found = list(items(wanted))
    assert [item.file for item in found][:2] == ["a.png", f"{tmp_path}/other/b.png"[1:]]
    assert found[0].read() == found[1].read() == PNG
    assert found[0].key == keys(tmp_path / "set")[0]
    assert [reason(item).split(": ")[0] for item in found[2:]] == [f"line {line} of {wanted}" for line in (4, 5, 6)]
    assert "cannot be read (No such file or directory)" in reason(found[2])
    assert "is a folder" in reason(found[3])
    assert "download it" in reason(found[4])


def test_comments_of_a_list_are_no_pictures(tmp_path: Path) -> None:
    folder(tmp_path, "a.png", "#1.png")
    (tmp_path / "list.txt").write_text("# mine\na.png\n#1.png\n./#1.png\n")
    assert [Path(item.key).name for item in items(tmp_path / "list.txt")] == ["a.png", "#1.png"]


def test_a_named_file_is_taken_by_its_name_or_by_what_it_begins_with(tmp_path: Path) -> None:
    folder(tmp_path, "0f3a", "a.doc")
    (tmp_path / "damaged.png").write_bytes(b"words")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    for name in ("0f3a", "a.doc", "damaged.png", "gone.png"):
        assert len(keys(tmp_path / name)) == 1, name
    (tmp_path / "README.md").write_bytes(b"# Words")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "README.md")
    for name in ("README.md", "pipe", "link"):
        said = rf"SOURCE: '{tmp_path}/{name}' is no picture .*, video .*, archive .*\.zip.*, table .*\.jsonl.* or list"
        with pytest.raises(ConfigError, match=said):
            items([str(tmp_path / "0f3a"), str(tmp_path / name)])


def test_a_huge_picture_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "b.png").open("wb") as file:
        file.truncate(2**40)
    (item,) = items(tmp_path / "b.png")
    assert "the limit for a picture" in reason(item)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "there is no"), ("no*.png", "matches nothing"), ("https://x/a.zip", "is an address; download it")],
)
def test_a_name_that_stands_for_nothing_is_refused_at_once(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"SOURCE: .*{message}"):
        items([str(folder(tmp_path, "a.png")), name])


def test_wrong_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="scenes: cannot be used together with every"):
        SourceOptions(every=2, scenes=True)
    with pytest.raises(ConfigError, match="every: 0"):
        SourceOptions(every=0)
    with pytest.raises(ConfigError, match="fps: nan"):
        SourceOptions(fps=float("nan"))
    with pytest.raises(ConfigError, match="SOURCE: name at least one"):
        items([])


def test_items_come_one_at_a_time(tmp_path: Path) -> None:
    for index in range(20):
        folder(tmp_path, *(f"{index:02}/{number:03}.png" for number in range(100)))

    def go_through() -> None:
        assert sum(1 for _ in items(tmp_path)) == 2000

    assert least_peak_bytes(go_through) < 2000 * 400  # two digests of each stay
