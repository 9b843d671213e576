"""Files in object stores (s3://bucket/photos, gs://…), through pyarrow. `file:///photos` is the same way to local ones.

Names and keys are addresses. Everything that reads a file of a source opens it here, whether it is local or not.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, cast

from kestrel.errors import ConfigError

STORE = re.compile(r"(s3|gs|gcs|hdfs|abfss?|file)://", re.IGNORECASE)
REMEDY = "needs pyarrow, which is not installed; run `pip install -e '.[parquet]'` in the checkout"


def is_stored(path: str) -> bool:
    return STORE.match(path) is not None


def open_file(path: str) -> BinaryIO:
    if not is_stored(path):
        return open(path, "rb")
    system, inner = _place(path)
    return cast(BinaryIO, io.BufferedReader(system.open_input_file(inner)))


def size_of_file(path: str) -> int | None:
    """None for what is no file."""
    system, inner = _place(path)
    return system.get_file_info(inner).size


def kind_of(path: str, field: str) -> str:
    """file, folder or nothing; raises ConfigError where the store does not answer."""
    if find_spec("pyarrow") is None:
        raise ConfigError(field, f"{path} {REMEDY}")
    try:
        system, inner = _place(path)
        info = system.get_file_info(inner)
    except (OSError, ValueError) as error:
        raise ConfigError(
            field, f"{path} cannot be reached ({error}); check the address, your credentials and the network"
        ) from None
    return "file" if info.is_file else "nothing" if info.type.name == "NotFound" else "folder"


def require_store(address: str, field: str) -> None:
    if not is_stored(address):
        raise ConfigError(field, f"must be an address such as s3://bucket/labels (got {address!r})")
    if kind_of(address, field) == "file":
        raise ConfigError(field, f"{address} is a file; name a folder")


def files_below(folder: str, recursive: bool) -> Iterator[str]:
    """Paths from this folder on, in the order in which a walk by sorted names meets them."""
    from pyarrow.fs import FileSelector  # noqa: PLC0415 - an extra

    system, inner = _place(folder)
    start = inner.rstrip("/") + "/"
    found = system.get_file_info(FileSelector(inner, recursive=recursive))
    paths = [info.path.removeprefix(start) for info in found if info.is_file]
    return iter(sorted(paths, key=lambda path: path.split("/")))


def upload(folder: Path, address: str) -> None:
    """A copy of everything in a folder."""
    from pyarrow.fs import LocalFileSystem, copy_files  # noqa: PLC0415 - an extra

    system, inner = _place(address)
    try:
        system.create_dir(inner, recursive=True)
        copy_files(str(folder.resolve()), inner, LocalFileSystem(), system)
    except OSError as error:
        raise ConfigError("upload", f"{address} cannot be written ({error}); the files are in {folder}") from None


def _place(path: str) -> tuple[Any, str]:
    """The file system, and the path in it."""
    root, name = re.match(r"(\w+://[^/]*)/?(.*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
    system, inner = _system(root)
    return system, f"{inner.rstrip('/')}/{name}".rstrip("/")


@lru_cache
def _system(root: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem  # noqa: PLC0415 - an extra

    return FileSystem.from_uri(f"{root}/")
