"""Pictures named or held by rows: JSON lines, and parquet files where pyarrow is installed.

A row has `image`: a path, relative to the table's own folder, a data URL, or in parquet the picture itself (bytes, or a
struct of bytes and path). Optional are `question`, `object` or `objects`, and `id`; other fields go to the outputs as
they are. A row with a mistake is an item whose `read` names the line.

A row's key is its `id`. Without, it is the image and a digest of the rest in a line of JSON: lines may be added and
moved, and one that was changed is another. In parquet it is the number of the row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import orjson

from kestrel.errors import ConfigError, shown
from kestrel.images.encoded import base64_start, decode_base64, require_decodable
from kestrel.labelling.object_stores import REMEDY, is_stored, open_file
from kestrel.labelling.pictures import (
    Bulk,
    Gathering,
    below,
    joined,
    named_in,
    named_read,
    require_small,
    short_digest,
    text,
    why_no_path,
)
from kestrel.labelling.records import Item

JSON_LINES = (".jsonl", ".ndjson")
PARQUETS = (".parquet",)
MAX_LINE = 2**28
"""Of one row, in bytes: a picture as a data URL takes four thirds of its size."""
BATCH_ROWS = 16
LEFT_OUT = "columns of bytes"
OWN_FIELDS = ("image", "question", "object", "objects", "id")


@dataclass(frozen=True)
class _Table:
    path: str
    gathering: Gathering
    label: str

    def row(self, number: int, place: str, read_row: Callable[[], Any], number_is_key: bool = False) -> Iterator[Item]:
        """The item of a row; of one with a mistake, an item that says so."""
        try:
            row = read_row()
            if not isinstance(row, dict):
                raise ValueError('is not an object; write {"image": "cats/a.png"}')
            fields = _fields(row)
            key = f"{text(self.path)}#{f'{number:06d}' if number_is_key and row.get('id') is None else _name(row)}"
            if row.get("id") is not None and self.gathering.has(key):
                raise ValueError(f"id {shown(row['id'])} is another row's; give each row its own")
            file, read, path = self._picture(number, place, row["image"])
        except ValueError as error:
            key = f"{text(self.path)}#line {number}"
            yield from self.gathering.bad(key, joined(self.label, f"line-{number}"), f"{place}: {error}")
        else:
            yield from self.gathering.one(key, joined(self.label, file), read, path=path, **fields)

    def _picture(self, number: int, place: str, image: Any) -> tuple[str, Callable[[], bytes], str | None]:
        """(a name for outputs, what reads it, its path)."""
        path = image.get("path") if isinstance(image, dict) else image
        data = image.get("bytes") if isinstance(image, dict) else image
        limit = self.gathering.options.max_bytes
        if isinstance(data, bytes):
            file = path if isinstance(path, str) and path else f"{number:06d}"
            return file, partial(_held, place, data, limit), None
        if not isinstance(path, str) or not path:
            raise ValueError(f"image is {shown(image)}; give the path of a picture")
        if path[:5].lower() == "data:":
            kind = re.match(r"data:image/(\w+)", path, re.IGNORECASE)
            file = f"{number:06d}.{kind[1].lower()}" if kind else f"{number:06d}"
            return file, partial(_decoded, place, path, limit), None
        reason = why_no_path(path)
        if reason:
            raise ValueError(f"image {shown(path)} {reason}")
        folder = os.path.dirname(self.path)
        whole = named_in(folder, path)
        return below(whole, folder), named_read(place, whole, limit), whole


def _held(place: str, data: bytes, max_bytes: int) -> bytes:
    require_small(place, len(data), max_bytes)
    return data


def _decoded(place: str, url: str, max_bytes: int) -> bytes:
    start = base64_start(url, place)
    require_decodable(url, max_bytes, place, start)
    return decode_base64(url, place, start)


def _name(row: Mapping[str, Any]) -> str:
    """What tells a row from the others of its table."""
    if row.get("id") is not None:
        return f"id={row['id']}"
    image = row["image"] if isinstance(row["image"], str) else ""
    image = image if len(image) <= 500 and image[:5].lower() != "data:" else "data"
    return image if set(row) == {"image"} and image != "data" else f"{image}?{short_digest(_canonical(row))}"


def _canonical(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_SORT_KEYS)


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of the item; raises ValueError for what cannot be meant."""
    if row.get("image") is None:
        raise ValueError(f'has no field "image" (it has {shown(list(row))}); give the path of the picture there')
    question, name = row.get("question"), row.get("id")
    if question is not None and (not isinstance(question, str) or not question.strip()):
        raise ValueError(f"question is {shown(question)}; write a text")
    if name is not None and (isinstance(name, bool) or not isinstance(name, (str, int)) or name == ""):
        raise ValueError(f"id is {shown(name)}; write a text or a number")
    if row.get("object") is not None and row.get("objects") is not None:
        raise ValueError("has both object and objects; write objects alone")
    objects = row["objects"] if row.get("objects") is not None else row.get("object")
    if isinstance(objects, str):
        objects = [objects]
    if objects is not None and not (
        isinstance(objects, list) and objects and all(isinstance(one, str) and one.strip() for one in objects)
    ):
        raise ValueError(f"objects is {shown(objects)}; write a list of names")
    extra = {field: value for field, value in row.items() if field not in OWN_FIELDS}
    if name is not None:
        extra["id"] = name
    return {"question": question, "objects": None if objects is None else tuple(objects), "extra": extra}


# ---------------------------------------------------------------------- JSON lines


def jsonl_parts(path: str, gathering: Gathering, label: str) -> Iterator[Bulk]:
    yield Bulk(key=text(path), items=partial(_jsonl_rows, path, label), count=lambda: sum(1 for _ in _lines(path)))


def _jsonl_rows(path: str, label: str, gathering: Gathering) -> Iterator[Item]:
    table = _Table(path, gathering, label)
    for number, line in _lines(path):
        yield from table.row(number, f"line {number} of {text(path)}", partial(_json, line))


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """With their numbers, those that hold something; after one that is too long, no other."""
    with open_file(path) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if line.strip():
                yield number, line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > MAX_LINE:
                return


def _json(line: bytes) -> Any:
    if len(line) > MAX_LINE:
        raise ValueError(f"is longer than {MAX_LINE} bytes, and lines after it are not read; write one row per line")
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error}); write one object per line") from error


# ---------------------------------------------------------------------- parquet


def require_pyarrow(path: str) -> None:
    if find_spec("pyarrow") is None:
        raise ConfigError("SOURCE", f"{text(path)} {REMEDY}")


def parquet_parts(path: str, gathering: Gathering, label: str) -> Iterator[Bulk]:
    yield Bulk(key=text(path), items=partial(_parquet_rows, path, label), count=partial(_num_parquet_rows, path))


def _num_parquet_rows(path: str) -> int | None:
    try:
        with _parquet(path) as file:
            return file.metadata.num_rows
    except (OSError, ValueError):
        return None


def _parquet(path: str) -> Any:
    require_pyarrow(path)
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415

    return ParquetFile(open_file(path) if is_stored(path) else path)


def _parquet_rows(path: str, label: str, gathering: Gathering) -> Iterator[Item]:
    number = 0
    table = _Table(path, gathering, label)
    try:
        with _parquet(path) as file:
            columns = _columns(path, file, gathering)
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    place = f"row {number} of {text(path)}"
                    yield from table.row(number, place, partial(_plain, row), number_is_key=True)
    except (OSError, ValueError) as error:
        after = f"is damaged after row {number}" if number else "cannot be read"
        yield from gathering.bad(text(path), label or text(path), f"{text(path)} {after} ({error})")


def _columns(path: str, file: Any, gathering: Gathering) -> list[str]:
    """Those whose values can go to the outputs, and the picture's."""
    schema = file.schema_arrow
    if "image" not in schema.names:
        raise ValueError(f'no column is named "image"; there are {shown(schema.names)}')
    wanted: list[str] = []
    for column in schema:
        if column.name == "image" or "binary" not in str(column.type):
            wanted.append(column.name)
        else:
            gathering.notes.add(LEFT_OUT, f"{column.name} of {text(path)}")
    return wanted


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Dates and decimals become texts, as in JSON."""
    rest = {name: value for name, value in row.items() if name != "image"}
    return {"image": row["image"], **orjson.loads(orjson.dumps(rest, default=str))}
