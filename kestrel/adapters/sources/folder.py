"""Adapters in a folder, which may change while the engine runs.

`NAME.safetensors`, `NAME.pt`, `NAME.pth`, or a folder `NAME` with one of FILES_IN_FOLDER; NAME may be `ID@STEP`. An id
is looked up among the names found there, so it never becomes part of a path. A file is hashed once, and again when its
size, times or inode differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kestrel.adapters.adapter import AdapterId
from kestrel.adapters.peft import PEFT_CONFIG, PEFT_WEIGHTS, adapter_files
from kestrel.adapters.single_flight import SingleFlight
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, FileStamp, stamped_copy
from kestrel.errors import AdapterNotFound, AdapterSourceError, AdapterUnusable, CheckpointError, ConfigError
from kestrel.threads import Threads

SUFFIXES = (".safetensors", ".pt", ".pth")
FILES_IN_FOLDER = ("adapter.safetensors", PEFT_WEIGHTS, "final.safetensors", "final.pt", "final.pth")
_THREADS = 4


def weights_file(path: Path) -> Path:
    """The file of an adapter's weights: the path itself, or peft's in a folder. Refuses what cannot be one."""
    if path.is_dir() and (path / PEFT_CONFIG).is_file() and not (path / PEFT_WEIGHTS).is_file():
        raise CheckpointError(
            f"{path} has no {PEFT_WEIGHTS}; save the adapter as safetensors with peft (save_pretrained)"
        )
    if path.is_dir() and (path / PEFT_WEIGHTS).is_file():
        path /= PEFT_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; check the path of the adapter")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty; download or copy the adapter again")
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path} is not an adapter file; supported suffixes: {', '.join(SUFFIXES)}")
    return path


@dataclass(frozen=True, slots=True)
class _Hashed:
    """A copy, and the place in the folder that led to it, which may be a link."""

    entry: Path
    copy: AdapterCopy


def require_folder(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError("adapter_dir", f"{folder} is a file; give the folder that it is in")
    if not folder.is_dir():
        raise ConfigError("adapter_dir", f"{folder} is not a folder; create it, or leave adapter_dir out")


class FolderSource:
    downloads = False
    title = "the adapter folder"

    def __init__(self, folder: Path) -> None:
        require_folder(folder)
        self._folder = folder.resolve()
        self._known: dict[AdapterId, _Hashed] = {}
        self._hashing: SingleFlight[AdapterCopy] = SingleFlight()
        self._threads = Threads("adapter-folder", _THREADS)

    async def stored(self, adapter_id: AdapterId) -> AdapterCopy | None:
        try:
            return await self.fetch(adapter_id)
        except AdapterNotFound:
            return None

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        if (known := self._hashed(adapter_id)) is not None:
            return known
        entry = await self._threads.run(self._find, adapter_id)
        if (known := self._hashed(adapter_id)) is not None:
            return known
        # The stamp is part of the key: whoever comes after a change must not get what was there before.
        return await self._hashing.join(f"{entry}\n{FileStamp.of(entry)}", lambda: self._hash(adapter_id, entry))

    async def list(self) -> Sequence[AdapterListing]:
        return await self._threads.run(self._list)

    async def close(self) -> None:
        await self._hashing.close()
        self._threads.close()

    def _hashed(self, adapter_id: AdapterId) -> AdapterCopy | None:
        """What was hashed before, if it is still the same."""
        known = self._known.get(adapter_id)
        return known.copy if known is not None and FileStamp.of(known.entry) == known.copy.stamp else None

    def _find(self, adapter_id: AdapterId) -> Path:
        entries = self._scan().get(str(adapter_id))
        if entries is None:
            self._known.pop(adapter_id, None)
            raise AdapterNotFound(f"adapter '{adapter_id}': not in {self.title}")
        if problem := self._problem(entries):
            raise AdapterUnusable(f"adapter '{adapter_id}': {problem}")
        return entries[0]

    async def _hash(self, adapter_id: AdapterId, entry: Path) -> AdapterCopy:
        try:
            copy = await self._threads.run(stamped_copy, _followed(entry))
        except FileNotFoundError:
            raise AdapterNotFound(f"adapter '{adapter_id}': not in {self.title}") from None
        except OSError as error:
            raise AdapterUnusable(f"adapter '{adapter_id}': its file cannot be read ({error.strerror})") from None
        if copy is None:
            raise AdapterUnusable(f"adapter '{adapter_id}': its file is being written; try again when it is complete")
        self._known[adapter_id] = _Hashed(entry, copy)
        return copy

    def _scan(self) -> dict[str, list[Path]]:
        """Files by the name they stand for. Hidden ones are left out: files are written under such names."""
        found: dict[str, list[Path]] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    path = self._folder / entry.name
                    if entry.name.startswith("."):
                        continue
                    if os.path.isdir(path):  # entry.is_dir() raises for links in a circle
                        inner = _files_in(path)
                        if inner:
                            found.setdefault(entry.name, []).extend(inner)
                    elif path.suffix in SUFFIXES:
                        found.setdefault(path.stem, []).append(path)
        except OSError as error:
            raise AdapterSourceError(f"{self.title} cannot be read ({error.strerror}); check adapter_dir") from error
        return found

    def _problem(self, entries: Sequence[Path]) -> str | None:
        """Why no adapter can be read from these."""
        if len(entries) > 1:
            names = ", ".join(sorted(str(entry.relative_to(self._folder)) for entry in entries))
            return f"{self.title} has several files of this name ({names}); keep one"
        if entries[0].name == PEFT_WEIGHTS and not os.path.lexists(entries[0]):
            return f"it has no {PEFT_WEIGHTS}; save it as safetensors with peft (save_pretrained)"
        problems = (self._file_problem(file) for file in adapter_files(entries[0]))
        return next((problem for problem in problems if problem is not None), None)

    def _file_problem(self, file: Path) -> str | None:
        try:
            target = file.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
            return f"its entry in {self.title} is a link that leads nowhere"
        if not target.is_relative_to(self._folder):
            return f"its entry in {self.title} is a link that leaves the folder; put the file itself there"
        return None if target.is_file() else f"its entry in {self.title} is not a regular file"

    def _list(self) -> list[AdapterListing]:
        return [self._listing(name, entries) for name, entries in sorted(self._scan().items())]

    def _listing(self, name: str, entries: Sequence[Path]) -> AdapterListing:
        if AdapterId.try_parse(name) is None:
            problem = "the name is not an adapter id: use letters A-Z a-z, digits, - and _, and @STEP at the end"
        else:
            problem = self._problem(entries)
        stamp = None if problem else FileStamp.of(entries[0])
        if stamp is None:
            return AdapterListing(name, self.title, problem=problem or "it cannot be read")
        return AdapterListing(name, self.title, stamp.num_bytes, stamp.modified_ns / 1e9)


def _files_in(folder: Path) -> list[Path]:
    """Weights in an adapter's own folder; a config of peft's without them stands for those that are missing."""
    found = [folder / name for name in FILES_IN_FOLDER if os.path.lexists(folder / name)]
    return found or ([folder / PEFT_WEIGHTS] if os.path.lexists(folder / PEFT_CONFIG) else [])


def _followed(entry: Path) -> Path:
    """The file behind a link; one with a second file beside it keeps its place."""
    return entry.resolve() if len(adapter_files(entry)) == 1 else entry.parent.resolve() / entry.name
