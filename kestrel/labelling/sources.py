"""From names on a command line to pictures: one at a time, in a fixed order, each with a key of its own.

A name is a picture, a video, a folder, a glob, a list of paths (.txt), an archive, or rows (.jsonl, .parquet). A folder
is walked by sorted names; what is no picture in it is counted in `Notes`. A picture that cannot be read is an item
whose `read` says why.

The key of a file is its absolute path, in which links above the named folder are resolved: another spelling, another
working folder or further sources do not change it. That of a file in an object store is its address. Things within a
file add their place: `data.zip!/cats/a.png`, `rows.jsonl#id=17`, `clip.mp4#000120`. The name for outputs is short:
relative to the first source; those of further folders, archives and tables are put under a name of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import count as counting

from kestrel.errors import ConfigError
from kestrel.images.encoded import FORMATS
from kestrel.labelling.archives import TARS, ZIPS, tar_parts, zip_parts
from kestrel.labelling.object_stores import files_below, is_stored, kind_of, open_file
from kestrel.labelling.pictures import (
    EXCLUDED,
    GLOB_SIGNS,
    HIDDEN,
    LINKS,
    NO_PICTURE,
    VIDEOS,
    Bulk,
    Gathering,
    Notes,
    SourceOptions,
    absolute,
    below,
    is_hidden,
    is_picture_name,
    joined,
    named_in,
    named_read,
    read_file,
    require_named,
    stem_of,
    suffix_of,
    text,
    why_no_path,
)
from kestrel.labelling.records import Item
from kestrel.labelling.tables import JSON_LINES, PARQUETS, jsonl_parts, parquet_parts, require_pyarrow
from kestrel.labelling.video import require_av, video_parts

__all__ = ["Notes", "SourceOptions", "count", "items"]

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Parts = Iterator["Item | Bulk"]
Reader = Callable[[str, Gathering, str], Parts]
"""Of a path; the text stands before the names for outputs."""


def items(
    names: Names,
    options: SourceOptions | None = None,
    done: Container[str] = (),
    notes: Notes | None = None,
) -> Iterator[Item]:
    """The pictures that `names` stand for, without those whose key is in `done`. A wrong name is a ConfigError, raised
    before this returns. Taking an item may take long: a video is decoded, a folder on another machine listed."""
    gathering = Gathering(options or SourceOptions(), done, notes or Notes())
    parts = parts_of(names, gathering)
    return (item for part in parts for item in ((part,) if isinstance(part, Item) else part.items(gathering)))


def count(names: Names, options: SourceOptions | None = None) -> int | None:
    """How many pictures `items` will give; of videos an estimate; None when only reading all would tell."""
    total = 0
    for part in parts_of(names, Gathering(options or SourceOptions(), (), Notes())):
        number = 1 if isinstance(part, Item) else part.count()
        if number is None:
            return None
        total += number
    return total


def parts_of(names: Names, gathering: Gathering) -> Parts:
    """Names are looked at before this returns, what is behind them when the parts are taken."""
    sources = [_source(os.fspath(name)) for name in ([names] if isinstance(names, (str, os.PathLike)) else names)]
    if not sources:
        raise ConfigError("SOURCE", "name at least one folder, picture, video, archive or list")
    labels = {sources[0][0]: ""}
    taken = set(labels.values())
    for path, read in sources:
        if path not in labels and read is not _picture_parts:
            labels[path] = _label(path, taken)
            taken.add(labels[path])
    return (part for path, read in sources for part in read(path, gathering, labels.get(path, "")))


def _label(path: str, taken: set[str]) -> str:
    """For the outputs of a further source: the last part of its path, with a number where that is taken."""
    stem = os.path.basename(path) or "root"
    if not os.path.isdir(path):
        stem = stem_of(stem)
    tries = (stem if number == 1 else f"{stem}-{number}" for number in counting(1))
    return next(label for label in tries if label not in taken)


# ---------------------------------------------------------------------- names


def _source(name: str) -> tuple[str, Reader]:
    """What a name stands for: its absolute path (of a glob, that of the folder it begins in), and what reads it."""
    require_named(name)
    if is_stored(name):
        return _stored(name)
    path = os.path.expanduser(name)
    if not os.path.lexists(path):
        return _glob(path)
    kind = "folder" if os.path.isdir(path) else _kind(path)
    is_opened_now = kind != "picture" or not is_picture_name(path)
    if is_opened_now and not os.access(path, os.R_OK | (os.X_OK if kind == "folder" else 0)):
        raise ConfigError("SOURCE", f"{text(name)!r} cannot be opened; give yourself the right to read it")
    _require_kind(path, kind)
    if kind in REQUIREMENTS:
        REQUIREMENTS[kind](path)
    return (os.path.realpath if kind == "folder" else absolute)(path), READERS[kind]


def _stored(name: str) -> tuple[str, Reader]:
    """As `_source`, for an address."""
    sign = GLOB_SIGNS.search(name)
    folder, pattern = name, ""
    if sign is not None:
        folder, _, _ = name[: sign.start()].rpartition("/")
        pattern = name[len(folder) + 1 :]
    kind = kind_of(folder, "SOURCE")
    if kind == "nothing":
        raise ConfigError("SOURCE", f"there is no {folder!r}; compare it with what the store lists")
    if kind == "folder":
        return folder.rstrip("/"), partial(_store_parts, pattern=[piece for piece in pattern.split("/") if piece])
    if _kind(name) == "video":
        raise ConfigError("SOURCE", f"{name} is a video, which is read from a file; download it, and name the file")
    _require_kind(name, _kind(name))
    if _kind(name) in REQUIREMENTS:
        REQUIREMENTS[_kind(name)](name)
    return name, READERS[_kind(name)]


def _require_kind(path: str, kind: str) -> None:
    """Refuse a file that neither its name nor its beginning makes a picture."""
    if kind != "picture" or is_picture_name(path) or _begins_like_a_picture(path):
        return
    raise ConfigError(
        "SOURCE",
        f"{text(path)!r} is no picture (.jpg, .png, …), video (.mp4, …), archive ({', '.join((*ZIPS, *TARS))}), table "
        f"({', '.join((*JSON_LINES, *PARQUETS))}) or list (.txt); name one of these, or a folder",
    )


def _kind(path: str) -> str:
    lowered = path.lower()
    return next((kind for kind, suffixes in SUFFIXES.items() if lowered.endswith(suffixes)), "picture")


def _glob(path: str) -> tuple[str, Reader]:
    """Refuses a pattern without a match."""
    sign = GLOB_SIGNS.search(path)
    assert sign is not None
    start = path.rfind("/", 0, sign.start()) + 1
    folder = os.path.realpath(path[:start] or ".")
    if not os.path.isdir(folder):
        raise ConfigError("SOURCE", f"{text(path)!r} matches nothing: there is no folder {text(folder)!r}")
    pattern = [piece for piece in path[start:].split("/") if piece not in ("", ".")]
    if next(_Walk(folder, Gathering(SourceOptions(), (), Notes()), pattern).entries(), None) is None:
        raise ConfigError("SOURCE", f"{text(path)!r} matches nothing; compare it with what `ls` shows")
    return folder, partial(_folder_parts, pattern=pattern)


# ---------------------------------------------------------------------- folders


def _folder_parts(folder: str, gathering: Gathering, label: str, pattern: Sequence[str] = ()) -> Parts:
    for entry in _Walk(folder, gathering, pattern).entries():
        kind, file = _kind(entry.path), joined(label, entry.relative)
        if entry.error is not None:
            yield from gathering.bad(text(entry.path), file, entry.error)
        elif kind in (MEANT_BY_A_PATTERN if pattern else FOUND_IN_FOLDERS):
            yield from READERS[kind](entry.path, gathering, stem_of(file))
        elif is_picture_name(entry.path) or (not suffix_of(entry.path) and _begins_like_a_picture(entry.path)):
            yield from _file_item(entry.path, file, gathering)
        else:
            gathering.notes.add(NO_PICTURE, text(entry.path))


def _store_parts(folder: str, gathering: Gathering, label: str, pattern: Sequence[str]) -> Parts:
    is_deep = gathering.options.recursive or "**" in pattern
    for relative in files_below(folder, is_deep or len(pattern) > 1):
        path, kind, file = f"{folder}/{relative}", _kind(relative), joined(label, relative)
        if not _fits(relative.split("/"), pattern, as_far_as_it_goes=False):
            continue
        if is_hidden(relative):
            gathering.notes.add(HIDDEN, path)
        elif pattern and kind in MEANT_BY_A_PATTERN and kind != "video":
            yield from READERS[kind](path, gathering, stem_of(file))
        elif is_picture_name(path):
            yield from _file_item(path, file, gathering)
        else:
            gathering.notes.add(NO_PICTURE, path)


def _begins_like_a_picture(path: str) -> bool:
    """For names without a suffix, as collections that go by digests have them. What is no file is not waited for."""
    try:
        if not is_stored(path) and not os.path.isfile(path):
            return False
        with open_file(path) as file:
            beginning = file.read(32)
    except OSError:
        return False
    return any(image_format.matches(beginning) for image_format in FORMATS)


@dataclass(frozen=True)
class _Entry:
    path: str
    relative: str
    error: str | None = None
    """Of a folder that cannot be read."""


class _Walk:
    """The files below a folder, sorted by name: all, or those that fit a pattern or lie in a folder that does.

    Links to folders are followed, but none into what is walked anyway.
    """

    def __init__(self, folder: str, gathering: Gathering, pattern: Sequence[str] = ()) -> None:
        self._folder = folder
        self._notes = gathering.notes
        self._pattern = pattern
        self._depth = None if gathering.options.recursive or "**" in pattern else len(pattern)
        self._roots = [folder]
        self._excluded = {os.path.realpath(path) for path in gathering.options.exclude}

    def entries(self) -> Iterator[_Entry]:
        return self._below(self._folder, ())

    def _below(self, folder: str, relative: tuple[str, ...]) -> Iterator[_Entry]:
        try:
            with os.scandir(folder) as found:
                listed = sorted((entry.name, _is_folder(entry), entry.is_symlink()) for entry in found)
        except OSError as error:
            reason = f"the folder cannot be read ({error.strerror}); give yourself the right to read it"
            yield _Entry(folder, "/".join(relative), reason)
            return
        for name, is_folder, is_link in listed:
            path, inner = os.path.join(folder, name), (*relative, name)
            if not _fits(inner, self._pattern, as_far_as_it_goes=is_folder):
                continue
            if is_hidden(name):
                self._notes.add(HIDDEN, text(path))
            elif is_folder is None:
                self._notes.add(NO_PICTURE, text(path))
            elif not is_folder:
                yield _Entry(path, "/".join(inner))
            elif (self._depth is None or len(inner) <= self._depth) and self._is_new(path, is_link):
                yield from self._below(path, inner)

    def _is_new(self, path: str, is_link: bool) -> bool:
        real = os.path.realpath(path) if is_link or self._excluded else path
        if real in self._excluded:
            self._notes.add(EXCLUDED, text(path))
            return False
        if is_link:
            if any(os.path.commonpath((real, root)) in (real, root) for root in self._roots):
                self._notes.add(LINKS, text(path))
                return False
            self._roots.append(real)
        return True


def _is_folder(entry: os.DirEntry[str]) -> bool | None:
    """None for what is neither a folder nor a file, such as a pipe. A link to nothing counts as a file: it has a name,
    and reading it tells why it cannot be read."""
    return True if entry.is_dir() else False if entry.is_file() or entry.is_symlink() else None


def _fits(path: Sequence[str], pattern: Sequence[str], as_far_as_it_goes: bool | None) -> bool:
    """Whether a path or a folder above it fits; `as_far_as_it_goes`: whether something below it can."""
    if not pattern:
        return True
    if not path:
        return bool(as_far_as_it_goes)
    if pattern[0] == "**":
        return _fits(path, pattern[1:], as_far_as_it_goes) or _fits(path[1:], pattern, as_far_as_it_goes)
    return fnmatchcase(path[0], pattern[0]) and _fits(path[1:], pattern[1:], as_far_as_it_goes)


# ---------------------------------------------------------------------- files that were named


def _file_item(path: str, file: str, gathering: Gathering) -> Iterator[Item]:
    return gathering.one(text(path), file, partial(read_file, path, gathering.options.max_bytes), path=path)


def _picture_parts(path: str, gathering: Gathering, label: str) -> Parts:
    file = path.partition("://")[2] if is_stored(path) else below(path, os.path.realpath("."))
    return _file_item(path, file, gathering)


def _list_parts(path: str, gathering: Gathering, label: str) -> Parts:
    """A path per line, relative to the list's own folder. What begins with # is a comment: ./#1.png is a picture."""
    folder = os.path.dirname(path)
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            name = os.fsdecode(line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"))
            place, reason = f"line {number} of {text(path)}", why_no_path(name)
            if reason:
                yield from gathering.bad(text(name), joined(label, name), f"{place}: {text(name)} {reason}")
            elif name.strip() and not name.startswith("#"):
                named = named_in(folder, name)
                yield from _listed(named, place, gathering, joined(label, below(named, folder)))


def _listed(path: str, place: str, gathering: Gathering, file: str) -> Parts:
    kind = _kind(path)
    if kind in FOUND_IN_FOLDERS and os.path.exists(path):
        yield from READERS[kind](path, gathering, stem_of(file))
    else:
        yield from gathering.one(text(path), file, named_read(place, path, gathering.options.max_bytes), path=path)


SUFFIXES: dict[str, tuple[str, ...]] = {
    "list": (".txt", ".lst"),
    "zip": ZIPS,
    "tar": TARS,
    "jsonl": JSON_LINES,
    "parquet": PARQUETS,
    "video": VIDEOS,
}
READERS: dict[str, Reader] = {
    "picture": _picture_parts,
    "folder": _folder_parts,
    "list": _list_parts,
    "zip": zip_parts,
    "tar": tar_parts,
    "jsonl": jsonl_parts,
    "parquet": parquet_parts,
    "video": video_parts,
}
REQUIREMENTS: dict[str, Callable[[str], object]] = {"parquet": require_pyarrow, "video": require_av}
FOUND_IN_FOLDERS = frozenset({"video"})
MEANT_BY_A_PATTERN = frozenset({"video", "zip", "tar", "jsonl", "parquet"})
"""A pattern such as *.zip means archives; files of text are more often notes than lists."""
