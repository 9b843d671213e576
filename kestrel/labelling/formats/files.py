"""Files and folders that appear whole or not at all.

A file gets its name when its last byte is written. A folder is built beside the one it replaces, under a name that
begins with a dot; then the two change places. A program that is killed before leaves the old set, one that is killed
while they change places leaves something that the next run puts right (`recover`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

import orjson


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path, own: Sequence[str]) -> Iterator[Path]:
    """A new folder to fill; it takes the place of `path` when the block ends without an error.

    `own` are the patterns of names that belong to the set. Everything else in the old folder is somebody else's and
    moves into the new one.
    """
    recover(path, own)
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    if path.exists():
        os.rename(path, _old(path))
    os.rename(partial, path)
    recover(path, own)


def recover(path: Path, own: Sequence[str]) -> None:
    """Finish a change of places: go back when the new folder is not there, otherwise keep what is not of the set."""
    old = _old(path)
    if not old.exists():
        return
    if not path.exists():
        os.rename(old, path)
        return
    for entry in old.iterdir():
        target = path / entry.name
        if not any(fnmatch(entry.name, pattern) for pattern in own) and not target.exists():
            os.rename(entry, target)
    shutil.rmtree(old)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def write_list(file: BinaryIO, entries: Iterable[Mapping[str, Any]]) -> None:
    """A JSON array with one entry on a line, and one in memory at a time."""
    before = b"[\n"
    for entry in entries:
        file.write(before + orjson.dumps(entry))
        before = b",\n"
    file.write(b"[]" if before == b"[\n" else b"\n]")
