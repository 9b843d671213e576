"""A skill's fields as a form (`multipart/form-data`), as `curl -F` and web pages send files.

The form is read as it arrives: the bytes of the picture are kept once, without base64, and no limit waits for the end.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import Scope

from kestrel.errors import RequestError, shown
from kestrel.server.errors import NotJson
from kestrel.server.json_body import LARGE_BODY_BYTES, body_chunks, parse_chunks
from kestrel.server.records import header_of
from kestrel.server.schemas import Schema, described
from kestrel.server.state import state_of

PICTURE_FILE = "image"
"""The part that is a file."""
MAX_PARTS = 256
MAX_PART_HEAD_BYTES = 4096
_PLAIN_ENCODINGS = ("", "7bit", "8bit", "binary")
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s]*)')
_SCALARS = {"number": "a number", "integer": "an integer", "boolean": "true or false"}
_BOUNDARY = re.compile(r"[ -~]{1,70}")


async def read_form(request: Request, fields: Mapping[str, Schema]) -> dict[str, object]:
    """The form as the JSON object that says the same, but for the picture, which is bytes.

    `fields` are those of `form_schema`.
    """
    max_image_bytes = state_of(request).require_serving().config.max_image_bytes
    parts = _Parts(_boundary(request.scope), max_image_bytes)
    fault: RequestError | None = None
    async for chunk in body_chunks(request):
        if fault is not None:
            continue  # most clients listen only when they have sent everything
        try:
            parts.feed(chunk)
        except RequestError as error:
            fault = error.with_traceback(None)
            parts.drop()
    if fault is not None:
        raise fault
    parts.require_end()
    body: dict[str, object] = {}
    for name, values in parts.texts.items():
        body[name] = await _value(request, name, [bytes(value) for value in values], fields.get(name, {}))
    if parts.picture is not None:
        if body.get("image_url") is not None:
            raise RequestError(PICTURE_FILE, "is a second picture next to image_url; send one of them")
        body[PICTURE_FILE] = parts.take_picture()
    return body


def form_schema(schema: Schema) -> Schema:
    """That of the form for a body of JSON."""
    file = described(
        "The picture as a file, in place of `image_url`.",
        {"type": "string", "contentMediaType": "application/octet-stream"},
    )
    fields: Mapping[str, Schema] = schema["properties"]
    properties = {name: field if _takes_text(field) else _as_json(field) for name, field in fields.items()}
    needs_picture = "image_url" in schema["required"]
    either = {"anyOf": [{"required": [PICTURE_FILE]}, {"required": ["image_url"]}]} if needs_picture else {}
    return {
        **schema,
        "properties": {PICTURE_FILE: file, **properties},
        "required": [name for name in schema["required"] if name != "image_url"],
        **either,
    }


def _as_json(field: Schema) -> Schema:
    inner = {key: value for key, value in field.items() if key != "description"}
    as_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": inner}
    return described(field.get("description", ""), as_text)


# ---------------------------------------------------------------------- fields


async def _value(request: Request, name: str, values: list[bytes], field: Schema) -> object:
    is_text = "contentSchema" not in field
    if len(values) > 1 and not (is_text and _takes_texts(field)):
        raise RequestError(name, f"is given {len(values)} times; give it once")
    if is_text:
        texts = [_decoded(name, value) for value in values]
        return texts if len(texts) > 1 else texts[0]
    remedy = "write its value as in a JSON body, such as true, 5 or {…}"
    if not values[0].strip():
        raise RequestError(name, f"is empty; {remedy}, or leave it out")
    try:
        return await parse_chunks(request, values)
    except RequestError as error:
        problem = str(error).removeprefix(f"{error.field}: ")
        expected = _SCALARS.get(_type_in(field["contentSchema"]))
        if expected is not None:
            raise RequestError(name, f"must be {expected} (got {shown(_decoded(name, values[0]))})") from None
        raise RequestError(name, f"{problem}; {remedy}") from None


def _type_in(schema: Schema) -> str:
    """Null is not given."""
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, str) else next(kind for kind in kinds if kind != "null")


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RequestError(name, "is not UTF-8; send text in UTF-8") from None


def _forms(field: Schema) -> list[Schema]:
    return [field, *field.get("anyOf", ())]


def _takes_text(field: Schema) -> bool:
    return any("enum" in form or form.get("type") in ("string", ["string", "null"]) for form in _forms(field))


def _takes_texts(field: Schema) -> bool:
    return any(form.get("type") == "array" for form in _forms(field))


# ---------------------------------------------------------------------- parts


def _boundary(scope: Scope) -> bytes:
    given = dict(_parameters(header_of(scope, b"content-type") or "")).get("boundary", "")
    if not _BOUNDARY.fullmatch(given):
        raise NotJson(
            f"the form's Content-Type names no boundary of 1 to 70 characters (got {shown(given)}); let the client "
            "write it, as curl -F does, or send JSON with Content-Type: application/json"
        )
    return given.encode()


def _parameters(header: str) -> list[tuple[str, str]]:
    """In the order given, without quotation marks."""
    found = _PARAMETER.findall(header)
    return [
        (name.lower(), re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value)
        for name, value in found
    ]


class _Parts:
    """Takes a form apart, piece by piece. Raises RequestError at the first piece that cannot be right."""

    def __init__(self, boundary: bytes, max_image_bytes: int) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._max_image_bytes = max_image_bytes
        self._buffer = bytearray(b"\r\n")  # the first delimiter may open the body
        self._name = ""
        self._sink: bytearray | io.BytesIO | None = None
        self._is_in_head = self._has_ended = False
        self._num_parts = self._num_text_bytes = 0
        self.texts: dict[str, list[bytearray]] = {}
        self.picture: io.BytesIO | None = None

    def feed(self, data: bytes) -> None:
        if self._has_ended:
            return
        self._buffer += data
        while self._read_head() if self._is_in_head else self._read_content():
            pass

    def drop(self) -> None:
        self._sink = self.picture = None
        self._buffer.clear()
        self.texts.clear()

    def take_picture(self) -> bytes:
        """Its one copy: `getvalue` shares the buffer."""
        assert self.picture is not None
        picture, self.picture, self._sink = self.picture, None, None
        return picture.getvalue()

    def require_end(self) -> None:
        if self._num_parts == 0 and not self._is_in_head and not self._has_ended:
            raise RequestError("body", "is not a form: the boundary that its Content-Type names is not in it")
        if not self._has_ended:
            raise RequestError("body", "is a form that was cut short: its last boundary is missing; send it whole")
        if self.picture is not None and self.picture.tell() == 0:
            raise RequestError(PICTURE_FILE, "is an empty file; send a picture")

    def _read_content(self) -> bool:
        """Up to the next delimiter; whether it has come."""
        at = self._buffer.find(self._delimiter)
        has_come = at >= 0
        end = at if has_come else max(len(self._buffer) - len(self._delimiter) + 1, 0)
        self._keep(self._buffer[:end])
        del self._buffer[: end + len(self._delimiter) if has_come else end]
        self._is_in_head = has_come
        return has_come

    def _keep(self, data: bytearray) -> None:
        if isinstance(self._sink, io.BytesIO):
            if self._sink.tell() + len(data) > self._max_image_bytes:
                limit = f"{self._max_image_bytes} bytes (max_image_bytes)"
                raise RequestError(PICTURE_FILE, f"the picture exceeds {limit}; send a smaller one")
            self._sink.write(data)
        elif self._sink is not None:
            self._num_text_bytes += len(data)
            if self._num_text_bytes > LARGE_BODY_BYTES:
                problem = f"brings the form's texts to more than {LARGE_BODY_BYTES} bytes"
                raise RequestError(self._name, f"{problem}; send a picture as a file, the rest as JSON")
            self._sink += data

    def _read_head(self) -> bool:
        """The head of the next part, or the end of the form; whether it is all there."""
        if self._buffer.startswith(b"--"):
            self._has_ended, self._is_in_head, self._sink = True, False, None
            self._buffer.clear()
            return False
        if len(self._buffer) >= 2 and not self._buffer.startswith(b"\r\n"):
            raise RequestError("body", "is a broken form: a boundary is followed by neither a line break nor its end")
        end = self._buffer.find(b"\r\n\r\n")
        if max(end, len(self._buffer) - 4 if end < 0 else 0) > MAX_PART_HEAD_BYTES:
            raise RequestError("body", f"has a part with a head of more than {MAX_PART_HEAD_BYTES} bytes; shorten it")
        if end < 0:
            return False
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        self._is_in_head = False
        self._begin(head)
        return True

    def _begin(self, head: bytes) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestError("body", f"has more than {MAX_PARTS} parts; send fewer")
        headers = _headers(head)
        told = headers.get("content-disposition", "")
        parameters = _parameters(told)
        names = [value for parameter, value in parameters if parameter == "name"]
        if told.partition(";")[0].strip().lower() != "form-data" or len(names) != 1 or not names[0]:
            problem = f"part {self._num_parts} has no name, or two"
            raise RequestError("body", f'{problem}; write form-data; name="…" in its head')
        name = self._name = names[0]
        encoding = headers.get("content-transfer-encoding", "").lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise RequestError(name, f"has the Content-Transfer-Encoding {shown(encoding)}; send its bytes as they are")
        self._open(name, is_file=any(parameter in ("filename", "filename*") for parameter, _ in parameters))

    def _open(self, name: str, *, is_file: bool) -> None:
        if is_file and name != PICTURE_FILE:
            raise RequestError(name, f"is a file; send only the picture as a file, under the name {PICTURE_FILE}")
        if not is_file and name == PICTURE_FILE:
            raise RequestError(name, "is text; send a file (curl -F image=@photo.jpg), or a data URL as image_url")
        if not is_file:
            self._sink = bytearray()
            self.texts.setdefault(name, []).append(self._sink)
            return
        if self.picture is not None:
            raise RequestError(name, "is given twice; send one picture")
        self._sink = self.picture = io.BytesIO()


def _headers(head: bytes) -> dict[str, str]:
    """By their names in lower case."""
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError:
        raise RequestError("body", "has a part whose head is not UTF-8; name its field in UTF-8") from None
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
