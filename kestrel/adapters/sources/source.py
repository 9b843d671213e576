"""What a source of adapters is: an id goes in, a local file with a version comes out.

An adapter of peft's is known by the file of its weights; stamps and digests of it cover its config too.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from kestrel.adapters.adapter import AdapterId
from kestrel.adapters.peft import adapter_files

_CHUNK_BYTES = 2**20


class FileStamp(NamedTuple):
    """What changes when a file does; cheap to read, so that contents are hashed only after a change."""

    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int
    beside: tuple[FileStamp, ...] = ()
    """Of the other files of the same adapter."""

    @classmethod
    def of(cls, path: Path) -> FileStamp | None:
        """None when a file is missing, or not a regular one."""
        stamps = [cls._of_one(file) for file in adapter_files(path)]
        whole = [stamp for stamp in stamps if stamp is not None]
        return whole[0]._replace(beside=tuple(whole[1:])) if len(whole) == len(stamps) else None

    @classmethod
    def _of_one(cls, path: Path) -> FileStamp | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class AdapterCopy:
    """An adapter's file on this machine, as it was when it was hashed."""

    path: Path
    digest: str
    """SHA-256 of the contents, in hexadecimal: the version."""
    stamp: FileStamp

    @property
    def is_current(self) -> bool:
        return FileStamp.of(self.path) == self.stamp


@dataclass(frozen=True, slots=True)
class AdapterListing:
    """One adapter that a source can show without being asked for it."""

    name: str
    """Its id; the name of the file where that is not an id."""
    source: str
    num_bytes: int | None = None
    modified_s: float | None = None
    """Seconds since 1970."""
    problem: str | None = None
    """Why it cannot be asked for."""


class AdapterSource(Protocol):
    @property
    def title(self) -> str:
        """Such as "the adapter folder": for messages."""
        ...

    @property
    def downloads(self) -> bool:
        """Whether `fetch` may bring more than `stored` finds."""
        ...

    async def stored(self, adapter_id: AdapterId) -> AdapterCopy | None:
        """The file as it is on this machine; nobody else is asked for it or waited for."""
        ...

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        """The file as it is now. Raises AdapterNotFound when the id is not known here."""
        ...

    async def list(self) -> Sequence[AdapterListing]:
        """What is known without asking anybody: a remote source names what it has downloaded."""
        ...

    async def close(self) -> None:
        """Ends what is under way."""
        ...


def digest_of(path: Path) -> str:
    """SHA-256 of an adapter's files in hexadecimal."""
    found = hashlib.sha256()
    for part in adapter_files(path):
        with part.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                found.update(piece)
    return found.hexdigest()


def stamped_copy(path: Path) -> AdapterCopy | None:
    """Digest and stamp of the same contents; None when they change while they are read. Raises OSError."""
    before = FileStamp.of(path)
    if before is None:
        return None
    digest = digest_of(path)
    return AdapterCopy(path, digest, before) if FileStamp.of(path) == before else None
