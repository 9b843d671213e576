"""The folder of downloaded adapters: what lies in it, who is writing there, and how room is made.

Several processes may share it; whoever changes what it holds has its lock. A download takes its size in the folder
before its bytes come, so that all of them count it. Its file is locked while somebody writes it: one that is not was
left behind.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not on Windows: there, one process uses a folder
    fcntl = None

logger = logging.getLogger("kestrel.adapters")

DEFAULT_MAX_BYTES = 20 * 2**30
MIN_FREE_BYTES = 2**28
"""Of the disk, which downloads leave to others."""
CHECKSUM_FILE = "checksum.json"
_LOCK_FILE = ".lock"
_PARTIAL = ".download-"
_FOLDER_NAME = re.compile(r"[0-9a-f]{40}")
_FILE_NAME = re.compile(rf"[0-9a-f]{{64}}\.(?:safetensors|pt)|{re.escape(CHECKSUM_FILE)}(?:\.new)?")


class NoRoom(Exception):
    """A download does not fit; the text says what is in the way."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        """Whether it can fit later."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One downloaded adapter."""

    folder: Path
    num_bytes: int
    used_s: float
    """When it was last used; 0 of what has no checksum, which nobody can use."""

    @classmethod
    def of(cls, folder: Path) -> _Kept | None:
        """None for a folder that somebody else made."""
        try:
            files = list(folder.iterdir())
            if not all(_FILE_NAME.fullmatch(file.name) for file in files):
                return None
            checksum = folder / CHECKSUM_FILE
            used_s = checksum.stat().st_mtime if checksum in files else 0.0
            return cls(folder, sum(file.stat().st_size for file in files), used_s)
        except OSError:  # another program is just removing it
            return None

    def remove(self) -> None:
        for file in sorted(self.folder.iterdir(), key=lambda file: file.name != CHECKSUM_FILE):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


class CacheFolder:
    """Blocking: call it from a thread."""

    def __init__(self, path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all processes; makes the folder if need be."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK_FILE).open("ab") as file:
            _lock(file, wait=True)  # ends with the file
            yield

    def sweep(self) -> None:
        """Removes what programs that ended in the middle left behind, and what a smaller bound leaves no room for."""
        if not self.path.is_dir():
            return
        try:
            with self.locked():
                for partial in self.path.glob(_PARTIAL + "*"):
                    _remove_abandoned(partial)
                for kept in self._kept():
                    if not kept.used_s:
                        kept.remove()
                self._make_room(0)
        except NoRoom:
            pass  # other programs are downloading, and their next step makes room
        except OSError as error:
            logger.warning("the folder of downloaded adapters cannot be swept (%s)", error.strerror)

    def reserve(self, partial: Path, num_bytes: int) -> None:
        """Gives a download its size. The least recently used adapters make way; raises NoRoom where that is no help."""
        if num_bytes > self._max_bytes:
            raise NoRoom(
                f"is larger than adapter_cache_bytes ({self._max_bytes}); start with a larger one", may_pass=False
            )
        with self.locked():
            self._make_room(num_bytes - partial.stat().st_size)
            os.truncate(partial, num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        kept = sorted(self._kept(), key=lambda kept: kept.used_s)
        partials = [found for partial in self.path.glob(_PARTIAL + "*") if (found := _stat(partial)) is not None]
        kept_bytes = sum(adapter.num_bytes for adapter in kept)
        above_bound = kept_bytes + sum(found.st_size for found in partials) + num_bytes - self._max_bytes
        promised = sum(max(0, found.st_size - found.st_blocks * 512) for found in partials)
        above_disk = num_bytes + promised + MIN_FREE_BYTES - shutil.disk_usage(self.path).free if num_bytes else 0
        missing = max(above_bound, above_disk)
        if missing > kept_bytes:
            what = (
                "adapter_cache_bytes are taken by other downloads" if above_bound > kept_bytes else "the disk is full"
            )
            raise NoRoom(f"does not fit now: {what}; retry later", may_pass=True)
        for adapter in kept:
            if missing <= 0:
                return
            adapter.remove()
            missing -= adapter.num_bytes
            logger.info("a downloaded adapter of %d bytes made way for another", adapter.num_bytes)

    def _kept(self) -> Iterator[_Kept]:
        for folder in self.path.iterdir():
            if _FOLDER_NAME.fullmatch(folder.name) and (found := _Kept.of(folder)) is not None:
                yield found


class PartialFile:
    """A download while it is written. Blocking, and for any thread; after `discard`, nothing is written any more."""

    def __init__(self, folder: CacheFolder) -> None:
        self.path = folder.path / f"{_PARTIAL}{uuid.uuid4().hex}"
        self._folder = folder
        self._turn = threading.Lock()
        self._file: BinaryIO | None = None
        self._is_over = False
        self._digest = hashlib.sha256()
        self._num_reserved = 0
        self.num_bytes = 0

    def start(self, num_bytes: int) -> None:
        """With the size that was announced, 0 where none was. Raises NoRoom."""
        with self._turn:
            if self._is_over:
                return
            with self._folder.locked():  # nobody may take it for abandoned before it is locked
                handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                self._file = open(handle, "wb", buffering=0)  # noqa: SIM115 (closed by discard)
                _lock(self._file, wait=False)
            self._reserve(num_bytes)

    def write(self, piece: bytes) -> None:
        with self._turn:
            if self._is_over or self._file is None:
                return
            self._reserve(self.num_bytes + len(piece))
            rest = memoryview(piece)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._digest.update(piece)
            self.num_bytes += len(piece)

    def finish(self, piece: bytes) -> str:
        """Writes the last piece; gives the SHA-256 of all."""
        self.write(piece)
        with self._turn:
            if self._file is not None:
                self._file.truncate(self.num_bytes)
                os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Removes it, unless it was moved away."""
        with self._turn:
            self._is_over = True
            if self._file is not None:
                self.path.unlink(missing_ok=True)
                self._file.close()
                self._file = None

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > self._num_reserved:
            self._folder.reserve(self.path, num_bytes)
            self._num_reserved = num_bytes


def _remove_abandoned(partial: Path) -> None:
    with suppress(OSError), partial.open("ab") as file:
        if _lock(file, wait=False):
            partial.unlink(missing_ok=True)


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    """Whether the lock on a file could be had."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return wait
    return True


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
