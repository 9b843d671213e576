"""Adapters in a folder: seen when they come, change or go, hashed once, and never from outside the folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources import FolderSource, folder
from kestrel.errors import AdapterNotFound, AdapterSourceError, AdapterUnusable, ConfigError


async def version(source: FolderSource, name: str) -> str:
    copy = await source.fetch(AdapterId.parse(name))
    assert copy.is_current
    return copy.digest


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("cats.safetensors", "cats"),
        ("cats.pt", "cats"),
        ("cats.pth", "cats"),
        ("01J5@1000.safetensors", "01J5@1000"),
        ("cats/final.pt", "cats"),
        ("cats/adapter.safetensors", "cats"),
        ("01J5@7/final.pt", "01J5@7"),
    ],
)
async def test_a_file_is_found_by_the_name_before_its_suffix_or_by_its_folder(
    tmp_path: Path, file: str, name: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"content")
    source = FolderSource(tmp_path)
    copy = await source.fetch(AdapterId.parse(name))
    assert (copy.path, copy.digest) == (tmp_path / file, sha256(b"content"))
    assert [listing.name for listing in await source.list()] == [name]
    for other in ("dogs", "cats@1", "Cats", "01J5"):
        with pytest.raises(AdapterNotFound, match=f"'{other}'"):
            await source.fetch(AdapterId.parse(other))


async def test_files_are_seen_as_they_come_change_and_go(tmp_path: Path) -> None:
    source, file = FolderSource(tmp_path), tmp_path / "cats.pt"
    with pytest.raises(AdapterNotFound):
        await version(source, "cats")
    file.write_bytes(b"one")
    assert await version(source, "cats") == sha256(b"one")
    file.write_bytes(b"three")
    assert await version(source, "cats") == sha256(b"three")
    replacement = tmp_path / ".new"
    replacement.write_bytes(b"seven")
    os.utime(replacement, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    os.replace(replacement, file)  # same size, same time of change: another inode
    assert await version(source, "cats") == sha256(b"seven")
    file.unlink()
    with pytest.raises(AdapterNotFound):
        await version(source, "cats")
    assert await source.list() == []


async def test_a_file_is_hashed_once_for_many_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    real = folder.stamped_copy
    monkeypatch.setattr(folder, "stamped_copy", lambda path: (hashed.append(path), real(path))[1])
    (tmp_path / "cats.pt").write_bytes(bytes(10_000))
    source = FolderSource(tmp_path)
    await asyncio.gather(*(version(source, "cats") for _ in range(20)))
    await version(source, "cats")
    assert len(hashed) == 1


async def test_links_inside_the_folder_are_followed_and_others_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "adapters", tmp_path / "secret.pt"
    inside.mkdir()
    outside.write_bytes(b"secret")
    (inside / "real.pt").write_bytes(b"real")
    (inside / "alias.pt").symlink_to("real.pt")
    (inside / "leak.pt").symlink_to(outside)
    (inside / "up.pt").symlink_to("../secret.pt")
    (inside / "circle.pt").symlink_to("circle.pt")
    (inside / "nowhere.pt").symlink_to("missing.pt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "final.pt").write_bytes(b"secret")
    (inside / "linked").symlink_to(tmp_path / "elsewhere")
    source = FolderSource(inside)
    assert await version(source, "alias") == sha256(b"real")
    for name in ("leak", "up", "linked"):
        with pytest.raises(AdapterUnusable, match="leaves the folder") as caught:
            await version(source, name)
        assert str(tmp_path) not in str(caught.value)
    for name in ("circle", "nowhere"):
        with pytest.raises(AdapterUnusable, match="leads nowhere"):
            await version(source, name)
    problems = {listing.name: listing.problem for listing in await source.list()}
    assert {name for name, problem in problems.items() if problem is None} == {"alias", "real"}


async def test_a_link_that_is_turned_to_another_file_is_a_new_version(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.pt").write_bytes(name.encode())
    link = tmp_path / "current.pt"
    link.symlink_to("one.pt")
    source = FolderSource(tmp_path)
    assert await version(source, "current") == sha256(b"one")
    link.unlink()
    link.symlink_to("two.pt")
    assert await version(source, "current") == sha256(b"two")


async def test_what_is_no_file_or_two_files_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "twice.pt").write_bytes(b"1")
    (tmp_path / "twice.safetensors").write_bytes(b"2")
    source = FolderSource(tmp_path)
    with pytest.raises(AdapterUnusable, match="not a regular file"):
        await asyncio.wait_for(version(source, "pipe"), 5)
    with pytest.raises(AdapterUnusable, match=r"several files .*twice\.pt, twice\.safetensors.*keep one"):
        await version(source, "twice")


async def test_names_that_no_request_can_ask_for_are_listed_with_the_reason(tmp_path: Path) -> None:
    for name in ("my cats.pt", "v1.5.safetensors", "fine.pt", ".hidden.pt", "README.md"):
        (tmp_path / name).write_bytes(b"x")
    problems = {listing.name: listing.problem for listing in await FolderSource(tmp_path).list()}
    assert problems.keys() == {"my cats", "v1.5", "fine"}
    assert problems["fine"] is None
    assert "not an adapter id" in (problems["v1.5"] or "")


async def test_a_folder_that_is_missing_at_first_or_later_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_dir"):
        FolderSource(tmp_path / "none")
    (tmp_path / "some").mkdir()
    source = FolderSource(tmp_path / "some")
    (tmp_path / "some").rmdir()
    with pytest.raises(AdapterSourceError, match="cannot be read") as caught:
        await version(source, "cats")
    assert str(tmp_path) not in str(caught.value)
