"""Pictures in zip and tar archives, without unpacking them.

Members of zip files and of plain tar files are read where they lie, in any order. A compressed tar file can only
be read from its beginning: the iterator reads on, and each item holds its picture. Links in archives are not followed.
"""

from __future__ import annotations

import io
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from lzma import LZMAError
from tarfile import HeaderError, ReadError

from kestrel.labelling.object_stores import is_stored, open_file
from kestrel.labelling.pictures import (
    HIDDEN,
    NO_PICTURE,
    VIDEOS,
    Bulk,
    Gathering,
    failing,
    is_hidden,
    is_picture_name,
    joined,
    require_small,
    suffix_of,
    text,
)
from kestrel.labelling.records import Item

ZIPS = (".zip",)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
PACKED_VIDEOS = "videos in archives (unpack them)"
DAMAGE = (tarfile.TarError, zlib.error, LZMAError, EOFError, OSError, ValueError)
ZIP_DAMAGE = (*DAMAGE, zipfile.BadZipFile, struct.error, RuntimeError)
"""RuntimeError is also that of a method of compression which is not built in."""


def zip_parts(path: str, gathering: Gathering, label: str) -> Iterator[Bulk]:
    members = partial(_zip_items, path, label)
    yield Bulk(key=text(path), items=members, count=lambda: sum(1 for _ in members(gathering)), is_light=True)


def _zip_items(path: str, label: str, gathering: Gathering) -> Iterator[Item]:
    try:
        archive = zipfile.ZipFile(open_file(path) if is_stored(path) else path)
    except ZIP_DAMAGE as error:
        yield from gathering.bad(text(path), label or text(path), f"{text(path)} is not a complete zip file ({error})")
        return
    lock = threading.Lock()
    for member in archive.infolist():
        if not member.is_dir() and _is_wanted(path, member.filename, gathering):
            key = _key(path, member.filename)
            read = partial(_read_zipped, archive, key, member, lock, gathering.options.max_bytes)
            yield from gathering.one(key, joined(label, member.filename), read)


def _read_zipped(
    archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo, lock: threading.Lock, max_bytes: int
) -> bytes:
    if member.flag_bits & 1:
        raise ValueError(f"{name} is encrypted; unpack the archive with its password")
    require_small(name, member.file_size, max_bytes)
    try:
        with lock:
            return archive.read(member)
    except ZIP_DAMAGE as error:
        raise ValueError(f"{name} is damaged or packed in an unknown way ({error}); pack it again") from error


def _key(path: str, member: str) -> str:
    return f"{text(path)}!/{text(member)}"


def _is_wanted(path: str, member: str, gathering: Gathering) -> bool:
    if is_picture_name(member) and not is_hidden(member):
        return True
    kind = HIDDEN if is_hidden(member) else PACKED_VIDEOS if suffix_of(member) in VIDEOS else NO_PICTURE
    gathering.notes.add(kind, _key(path, member))
    return False


# ---------------------------------------------------------------------- tar


class _Member(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> tarfile.TarInfo:
        """Left alone, tarfile takes a damaged header for the end of the archive, without a word."""
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # the mark of the end
                raise
            raise ReadError(str(error)) from error


class _Tar(tarfile.TarFile):
    tarinfo = _Member


def _opened(path: str) -> tarfile.TarFile:
    return _Tar.open(fileobj=open_file(path)) if is_stored(path) else _Tar.open(path)


def tar_parts(path: str, gathering: Gathering, label: str) -> Iterator[Bulk]:
    def number() -> int | None:
        """Of a plain archive; a compressed one has no table of contents."""
        try:
            with _opened(path) as archive:
                is_plain = isinstance(archive.fileobj, io.BufferedReader)
        except DAMAGE:
            return None
        return sum(1 for _ in members(gathering)) if is_plain else None

    members = partial(_tar_items, path, label)
    yield Bulk(key=text(path), items=members, count=number, is_light=path.lower().endswith(".tar"))


def _tar_items(path: str, label: str, gathering: Gathering) -> Iterator[Item]:
    last = "nothing"
    try:
        with _opened(path) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]
                if not member.isdir() and _is_wanted(path, member.name, gathering):
                    yield from _tar_item(path, archive, member, gathering, label)
                last = text(member.name)
            while archive.fileobj is not None and archive.fileobj.read(2**14):
                pass  # the checksum of a compressed file stands at its end
    except DAMAGE as error:
        reason = f"{text(path)} is damaged after {last} ({error}); what comes after it is not labelled"
        yield from gathering.bad(text(path), label or text(path), reason)


def _tar_item(
    path: str, archive: tarfile.TarFile, member: tarfile.TarInfo, gathering: Gathering, label: str
) -> Iterator[Item]:
    key, name = _key(path, member.name), joined(label, member.name)
    if not member.isreg():
        yield from gathering.bad(key, name, f"{key} is a link or no file; pack the picture itself")
        return
    file = gathering.claim(key, name)
    if file is None:
        return
    try:
        require_small(key, member.size, gathering.options.max_bytes)
    except ValueError as error:
        yield Item(key=key, file=file, read=failing(str(error)))
        return
    if isinstance(archive.fileobj, io.BufferedReader) and not member.issparse():
        yield Item(key=key, file=file, read=partial(_read_slice, path, key, member.offset_data, member.size))
        return
    content = archive.extractfile(member)
    assert content is not None
    data = content.read()
    yield Item(key=key, file=file, read=lambda: data)


def _read_slice(path: str, key: str, start: int, size: int) -> bytes:
    with open_file(path) as file:
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{key} is cut off after {len(data)} of {size} bytes; copy the archive again")
    return data
