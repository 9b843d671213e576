"""Downloaded adapters on disk, with a checksum that is verified before a file of an earlier process is used.

One folder per adapter, named after a digest, so that no id is part of a path. In it the contents, named after their own
SHA-256, and `checksum.json`, whose replacement makes a download count. Its time is that of the last use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kestrel.adapters.sources.cache_folder import CHECKSUM_FILE, DEFAULT_MAX_BYTES, CacheFolder, PartialFile
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, FileStamp, stamped_copy

logger = logging.getLogger("kestrel.adapters")

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
