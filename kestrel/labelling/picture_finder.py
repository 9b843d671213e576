"""The pictures of a run, found by key once more, for outputs that hold them beside the labels.

A file is opened by its key, which is its path. Members of zip and plain tar files are listed once. What can only be
read from its beginning is read once more, one picture in memory at a time. A video is read again from the start when an
earlier frame is asked for, so frames should be asked for in their order; pictures of other sources wait in a temporary
file until they are.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from kestrel.labelling.object_stores import is_stored
from kestrel.labelling.pictures import Bulk, Gathering, Notes, SourceOptions, read_file
from kestrel.labelling.records import Item
from kestrel.labelling.sources import Names, parts_of


class PictureFinder:
    """`find` may be called by several threads. Close it to remove the temporary file."""

    def __init__(self, names: Names, options: SourceOptions, folder: Path) -> None:
        """`folder`: where the temporary file is put, if there is one."""
        self._options = options
        self._parts = parts_of(names, _whole(options))
        self._lock = threading.Lock()
        self._store = _Store(folder)
        self._listed: dict[str, Item] | None = None
        self._ordered: dict[str, _Ordered] = {}

    def find(self, key: str) -> Item | None:
        """None for a key that these sources do not have, or no longer."""
        if os.path.isfile(key):
            return Item(key=key, file=key, read=partial(read_file, key, self._options.max_bytes), path=key)
        with self._lock:
            if self._listed is None:
                self._listed = dict(self._list())
            if key in self._listed:
                return self._listed[key]
            starts = (key[: sign.start()] for sign in re.finditer("#|!/", key))
            path = next((start for start in starts if start in self._ordered), None)
            return None if path is None else self._ordered[path].find(key)

    def close(self) -> None:
        self._store.close()

    def _list(self) -> Iterator[tuple[str, Item]]:
        for part in self._parts:
            if isinstance(part, Item):
                if part.key != part.path or is_stored(part.key):  # its name is no Unicode, or an address
                    yield part.key, part
            elif part.is_light:
                yield from ((item.key, item) for item in part.items(_whole(self._options)))
            else:
                self._ordered[part.key] = _Ordered(part, self._options, None if part.is_sorted else self._store)


def _whole(options: SourceOptions) -> Gathering:
    return Gathering(options, (), Notes())


class _Ordered:
    """Pictures that are read one after another."""

    def __init__(self, bulk: Bulk, options: SourceOptions, store: _Store | None) -> None:
        self._bulk = bulk
        self._options = options
        self._store = store
        self._kept: dict[str, Item] = {}
        self._ahead = bulk.items(_whole(options))

    def find(self, key: str) -> Item | None:
        found = self._kept.get(key) or self._search(key)
        if found is None and self._store is None:
            self._ahead = self._bulk.items(_whole(self._options))
            found = self._search(key)
        return found

    def _search(self, key: str) -> Item | None:
        """On from where the last search ended."""
        for item in self._ahead:
            if self._store is not None:
                self._kept[item.key] = item = self._store.put(item)
            if item.key == key:
                return item
        return None


class _Store:
    """A temporary file for pictures, made when the first comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def put(self, item: Item) -> Item:
        """The same item, which holds its picture no longer."""
        try:
            data = b"" if item.path is not None else item.read()
        except (OSError, ValueError):
            data = b""
        if not data:
            return item
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        self._file.flush()
        return replace(item, read=partial(os.pread, self._file.fileno(), len(data), start))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
