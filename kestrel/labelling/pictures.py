"""What all sources of pictures share: options, notes, unique names of items, and reading one file."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.labelling.object_stores import is_stored, open_file, size_of_file
from kestrel.labelling.records import Item

PICTURES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff")
UNREADABLE_PICTURES = (".heic", ".heif", ".avif", ".jxl", ".jp2")
"""Pictures that the engine does not read: rows that say so, rather than files that nobody misses."""
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".mts", ".m2ts", ".3gp", ".wmv", ".flv")

NO_PICTURE = "files that are not pictures"
HIDDEN = "hidden files and folders"
TWICE = "pictures that were named before"
LINKS = "links to folders that are walked anyway"
EXCLUDED = "folders of the output"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How names become items. Of `every`, `fps` and `scenes` one at most; without, a frame per second of a video."""

    recursive: bool = True
    """Go into folders within folders."""
    every: int | None = None
    """Of a video, each so many frames one, beginning with the first."""
    fps: float | None = None
    """Of a video, so many frames per second of its time."""
    scenes: bool = False
    """Of a video, the first frame and those at which the picture changes as a whole."""
    exclude: tuple[str, ...] = ()
    """Folders that are not walked, such as the output's own."""
    max_bytes: int = RuntimeConfig.max_image_bytes
    """Larger files are not read."""

    def __post_init__(self) -> None:
        given = [name for name in ("every", "fps") if getattr(self, name) is not None] + ["scenes"] * self.scenes
        if len(given) > 1:
            raise ConfigError(given[1], f"cannot be used together with {given[0]}; choose one way to take frames")
        if self.every is not None and self.every < 1:
            raise ConfigError(
                "every", f"{self.every} is not a number of frames; use 1 for all frames, 30 for one in 30"
            )
        if self.fps is not None and not 0 < self.fps <= 1000:
            raise ConfigError("fps", f"{self.fps} is not a rate; use frames per second such as 2, or 0.1")


class Notes:
    """What was passed over on purpose: how many of each kind, and one of them as an example."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, kind: str, example: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._examples.setdefault(kind, example)

    def lines(self) -> list[str]:
        return [f"skipped {kind}: {count}, such as {self._examples[kind]}" for kind, count in self.counts.items()]


class Gathering:
    """One pass over sources. It sees to it that no key and no file name comes twice, and leaves out what is done."""

    def __init__(self, options: SourceOptions, done: Container[str], notes: Notes) -> None:
        self.options = options
        self.notes = notes
        self._done = done
        self._keys: set[bytes] = set()
        self._files: set[bytes] = set()

    def claim(self, key: str, file: str) -> str | None:
        """The name for outputs, made unique; None when this picture came before, or is done."""
        if not _first_time(self._keys, key):
            self.notes.add(TWICE, key)
            return None
        file = safe_path(file)
        if not _first_time(self._files, file):
            path = PurePosixPath(file)
            file = str(path.with_name(f"{path.stem}-{short_digest(key.encode())}{path.suffix}"))
            _first_time(self._files, file)
        return None if key in self._done else file

    def has(self, key: str) -> bool:
        return _digest(key) in self._keys

    def one(self, key: str, file: str, read: Callable[[], bytes], **fields: Any) -> Iterator[Item]:
        """The item, if it is to be labelled."""
        claimed = self.claim(key, file)
        if claimed is not None:
            yield Item(key=key, file=claimed, read=read, **fields)

    def bad(self, key: str, file: str, reason: str, **fields: Any) -> Iterator[Item]:
        """An item that cannot be read, for this reason."""
        return self.one(key, file, failing(reason), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """Something that holds many pictures; it is opened when `items` or `count` is called."""

    key: str
    """Keys of its items begin with it."""
    items: Callable[[Gathering], Iterator[Item]]
    count: Callable[[], int | None]
    is_light: bool = False
    """Its items hold no pictures: all may be in memory."""
    is_sorted: bool = False
    """Its items come in the order of their keys."""


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _first_time(seen: set[bytes], name: str) -> bool:
    digest = _digest(name)
    if digest in seen:
        return False
    seen.add(digest)
    return True


def failing(reason: str) -> Callable[[], bytes]:
    def read() -> NoReturn:
        raise ValueError(reason)

    return read


def short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def text(name: str) -> str:
    """A file's name as valid Unicode: bytes that are not are written as \\xe9."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def safe_path(name: str) -> str:
    """A relative path that stays inside the folder it is put in, whatever an archive or a row says."""
    name = os.fsencode(name).decode("utf-8", "replace").replace("\ufffd", "_").replace("\\", "/")
    parts = [part for part in re.sub(r"[\x00-\x1f\x7f]", "_", name).split("/") if part not in ("", ".", "..")]
    if parts and len(parts[0]) == 2 and parts[0][1] == ":":
        parts = parts[1:]
    return "/".join(parts) or "picture"


def suffix_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def stem_of(path: str) -> str:
    """Without its suffix, or both of .tar.gz."""
    return os.path.splitext(path)[0].removesuffix(".tar")


def is_picture_name(name: str) -> bool:
    return suffix_of(name) in PICTURES or suffix_of(name) in UNREADABLE_PICTURES


def is_hidden(path: str) -> bool:
    """Also of a path in an archive: what file managers leave beside pictures counts as hidden."""
    parts = (part for part in path.split("/") if part not in (".", ".."))
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def read_file(path: str, max_bytes: int) -> bytes:
    if is_stored(path):
        num_bytes = size_of_file(path)
        if num_bytes is None:
            raise ValueError(f"{path} is not there, or is a folder")
        require_small(path, num_bytes, max_bytes)
        with open_file(path) as file:
            return file.read(max_bytes + 1)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{text(path)} is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}")
    require_small(text(path), status.st_size, max_bytes)
    with open(path, "rb") as file:
        return file.read(max_bytes + 1)


def require_small(name: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ValueError(f"{name} has {num_bytes} bytes, the limit for a picture is {max_bytes}; save it smaller")


def named_read(place: str, path: str, max_bytes: int) -> Callable[[], bytes]:
    """As `read_file`, for a path that stands in a list or a table: errors name the place."""

    def read() -> bytes:
        try:
            return read_file(path, max_bytes)
        except OSError as error:
            raise ValueError(f"{place}: {text(path)} cannot be read ({error.strerror}); correct the path") from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    return read


ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def why_no_path(name: str) -> str | None:
    if ADDRESS.match(name) and not is_stored(name):
        return "is an address; download it, and name the file"
    return "holds a zero byte; is this a file of text?" if "\0" in name else None


GLOB_SIGNS = re.compile(r"[*?\[]")


def require_named(name: str) -> None:
    """Refuse what can be no source, a name that is not there, and a pattern without a match."""
    reason = why_no_path(name)
    if reason:
        raise ConfigError("SOURCE", f"{name!r} {reason}")
    path = os.path.expanduser(name)
    if is_stored(name) or os.path.lexists(path):
        return
    if GLOB_SIGNS.search(path) is None:
        raise ConfigError("SOURCE", f"there is no {text(path)!r}; name a folder, picture, video, archive or list")
    if next(glob.iglob(path, recursive=True), None) is None:
        raise ConfigError("SOURCE", f"{text(path)!r} matches nothing; compare it with what `ls` shows")


def absolute(path: str) -> str:
    """Links to folders are resolved; a link to a file keeps its own name. An address stays as it is."""
    if is_stored(path):
        return path
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def named_in(folder: str, name: str) -> str:
    """The absolute path or address of what is named in a file of this folder."""
    return name if is_stored(name) else absolute(os.path.join(folder, os.path.expanduser(name)))


def below(path: str, folder: str) -> str:
    """The path from this folder on, or from the root for one that is elsewhere."""
    return os.path.relpath(path, folder) if path.startswith(os.path.join(folder, "")) else path


def joined(folder: str, name: str) -> str:
    return f"{folder}/{name.lstrip('/')}" if folder else name
