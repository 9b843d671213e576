"""A file that remembers what is done, whatever happens to the program: one JSON line for each finished piece of work.

The first line describes the job. A line is written with one call, so a killed program leaves at most its last one
unfinished; what cannot be read is dropped, and its work is done again. Lines reach the disk within a second or so: a
machine that loses its power costs that second. Of several lines with one key the last counts.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from kestrel.errors import ConfigError

VERSION = 1
SYNC_INTERVAL_S = 1.0


class Journal:
    """Open with `Journal.open`; one program at a time holds it. `add` may be called from one thread at a time."""

    def __init__(self, path: Path, descriptor: int, job: dict[str, Any], places: dict[str, tuple[int, int]]) -> None:
        self.path = path
        self.job = job
        """What the first line says."""
        self._descriptor = descriptor
        self._places = places
        self._end = os.fstat(descriptor).st_size
        self._synced_s = time.monotonic()

    @classmethod
    def open(cls, path: Path, job: Mapping[str, Any]) -> Journal:
        """A new journal, or one of the same job to go on with. Raises ConfigError when another program has it, or when
        it holds work of another job: the message names the first difference."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError("output", f"{path} is in use by another run; wait for it or end it") from None
            found, places, end = _read(path)
            if not places:
                found, end = None, 0
            os.ftruncate(descriptor, end)
            if found is None:
                header = {"kestrel_journal": VERSION, "job": dict(job)}
                os.write(descriptor, orjson.dumps(header) + b"\n")
                os.fsync(descriptor)
                _sync_folder(path.parent)
            else:
                _require_same(path, found, orjson.loads(orjson.dumps(dict(job))))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, dict(job), places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def keys(self) -> list[str]:
        """In the order in which they were first written."""
        return list(self._places)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Remember a piece of work; when this returns, no kill of this program can lose it."""
        line = orjson.dumps({"key": key, "record": dict(record)}) + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise OSError(f"{self.path}: the disk is full")
        self._places[key] = (self._end, len(line))
        self._end += len(line)
        if time.monotonic() - self._synced_s > SYNC_INTERVAL_S:
            self.sync()

    def sync(self) -> None:
        """Bring everything to the disk."""
        os.fsync(self._descriptor)
        self._synced_s = time.monotonic()

    def record(self, key: str) -> dict[str, Any]:
        offset, size = self._places[key]
        return orjson.loads(os.pread(self._descriptor, size, offset))["record"]

    def records(self, keys: Iterable[str] | None = None) -> Iterator[dict[str, Any]]:
        """Of these keys, in their order; by default of all, sorted by key. One is in memory at a time."""
        for key in sorted(self._places) if keys is None else keys:
            yield self.record(key)

    def close(self) -> None:
        self.sync()
        os.close(self._descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(path: Path) -> tuple[dict[str, Any] | None, dict[str, tuple[int, int]], int]:
    """(the job, where the line of each key is, the end of the last whole line)."""
    job: dict[str, Any] | None = None
    places: dict[str, tuple[int, int]] = {}
    at = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            data = _parsed(line)
            if at == 0:
                job = _job_in(path, data)
            elif isinstance(data, dict) and isinstance(data.get("key"), str) and "record" in data:
                places[data["key"]] = (at, len(line))
            at += len(line)
    return job, places, at


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _job_in(path: Path, header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("kestrel_journal") != VERSION or not isinstance(header["job"], dict):
        raise ConfigError("output", f"{path} is not a journal of this version; move it away, or choose another output")
    return header["job"]


def _require_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in dict.fromkeys((*found, *wanted)):
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                "output",
                f"{path} is of a run with {name} = {found.get(name)!r}, not {wanted.get(name)!r}; "
                "run the same command to continue, or choose another output",
            )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
