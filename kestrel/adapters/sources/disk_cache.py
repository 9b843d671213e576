"""Downloaded adapters on disk, with a checksum that is verified before a file of an earlier process is used.

One folder per adapter, named after a digest, so that no id is part of a path. In it the contents, named after their own
SHA-256, and `checksum.json`, whose replacement makes a download count. Its time is that of the last use.

Several processes may share the cache; whoever changes what it holds has its lock. A download takes its size in the
cache before its bytes come, so that all of them count it. Its file is locked while somebody writes it: one that is not
was left behind.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, FileStamp, stamped_copy

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
    """What lies in it, who is writing there, and how room is made. Blocking: call it from a thread."""

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
            logger.warning("the folder of downloaded adapters cannot be cleaned up (%s)", error.strerror)

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
            logger.info("a downloaded adapter of %d bytes was removed to make room for another", adapter.num_bytes)

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


# ---------------------------------------------------------------------- adapters by name

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SUFFIXES = (".safetensors", ".pt")


def default_cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kestrel" / "adapters"


@dataclass(frozen=True, slots=True)
class _Checksum:
    """What `checksum.json` says."""

    adapter: str
    namespace: str
    sha256: str
    num_bytes: int
    suffix: str

    @classmethod
    def read(cls, folder: Path) -> _Checksum | None:
        try:
            found = cls(**json.loads((folder / CHECKSUM_FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        sound = isinstance(found.sha256, str) and _DIGEST.fullmatch(found.sha256) and found.suffix in _SUFFIXES
        return found if sound and isinstance(found.adapter, str) and isinstance(found.num_bytes, int) else None

    @property
    def file_name(self) -> str:
        return self.sha256 + self.suffix


class AdapterDiskCache:
    """Blocking: call it from a thread. Several processes may share one folder."""

    def __init__(self, folder: Path, namespace: str, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """`namespace` tells sources apart, which may know different adapters by the same id."""
        self._folder = CacheFolder(folder, max_bytes)
        # A digest: the namespace may hold a URL with a secret in it.
        self._namespace = hashlib.sha256(namespace.encode()).hexdigest()

    def find(self, adapter: str) -> AdapterCopy | None:
        """A verified copy. What is damaged is removed, so that it is downloaded again."""
        folder = self._folder_of(adapter)
        checksum = _Checksum.read(folder)
        if checksum is None:
            return None
        self.touch(adapter)
        try:
            copy = stamped_copy(folder / checksum.file_name)
        except OSError:
            copy = None
        if copy is not None and copy.digest == checksum.sha256:
            return copy
        with self._folder.locked():
            if _Checksum.read(folder) == checksum:  # else another process has removed or replaced it meanwhile
                logger.warning("the cached file of adapter %s is damaged; it is downloaded again", adapter)
                (folder / CHECKSUM_FILE).unlink(missing_ok=True)
                (folder / checksum.file_name).unlink(missing_ok=True)
        return None

    def touch(self, adapter: str) -> None:
        """The most recently used ones are kept longest."""
        with suppress(OSError):  # just removed, or not ours to change
            os.utime(self._folder_of(adapter) / CHECKSUM_FILE)

    def partial_file(self) -> PartialFile:
        """A place to write a download to."""
        return PartialFile(self._folder)

    def keep(self, adapter: str, partial: Path, sha256: str, suffix: str) -> AdapterCopy:
        """Takes a complete download over. A reader sees the old files or the new ones, never a part."""
        folder = self._folder_of(adapter)
        checksum = _Checksum(adapter, self._namespace, sha256, partial.stat().st_size, suffix)
        path = folder / checksum.file_name
        with self._folder.locked():
            folder.mkdir(exist_ok=True)
            os.replace(partial, path)
            written = folder / f"{CHECKSUM_FILE}.new"
            written.write_text(json.dumps(asdict(checksum), indent=2) + "\n")
            os.replace(written, folder / CHECKSUM_FILE)
            for other in folder.iterdir():
                if other.name not in (CHECKSUM_FILE, path.name):
                    other.unlink(missing_ok=True)
        stamp = FileStamp.of(path)
        if stamp is None:
            raise FileNotFoundError(path)
        return AdapterCopy(path, sha256, stamp)

    def list(self, source: str) -> list[AdapterListing]:
        """What was downloaded for this namespace."""
        return downloaded_adapters(self._folder.path, source, self._namespace)

    def _folder_of(self, adapter: str) -> Path:
        return self._folder.path / hashlib.sha256(f"{self._namespace}\n{adapter}".encode()).hexdigest()[:40]


def downloaded_adapters(folder: Path, source: str, namespace: str | None = None) -> list[AdapterListing]:
    """What a cache folder holds, of one namespace or of all."""
    listings = []
    for file in sorted(folder.glob(f"*/{CHECKSUM_FILE}")):
        checksum = _Checksum.read(file.parent)
        if checksum is None or namespace not in (None, checksum.namespace):
            continue
        stamp = FileStamp.of(file.parent / checksum.file_name)
        if stamp is not None:
            listings.append(AdapterListing(checksum.adapter, source, stamp.num_bytes, stamp.modified_ns / 1e9))
    return listings


def recognised_suffix(path: Path) -> str | None:
    """The suffix that a complete adapter file should have, by its contents; None for a part or something else."""
    if zipfile.is_zipfile(path):
        return ".pt"
    try:
        with safe_open(path, framework="pt"):
            return ".safetensors"
    except (SafetensorError, OSError):
        return None
