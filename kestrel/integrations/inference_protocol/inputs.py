"""Named tensors -> a skill and the engine's fields. The skills' own tables check what the fields hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kestrel.errors import RequestError, shown
from kestrel.images.base64_text import base64_payload, decode_base64, require_decodable
from kestrel.images.encoded import FORMATS
from kestrel.threads import Threads

MODEL = "moondream"
"""The model's name in the protocol, whatever the engine runs."""
VERSION = "1"
BYTES, BOOL = "BYTES", "BOOL"
SKILLS = ("query", "caption", "point", "detect", "segment")
LARGE_TEXT = 2**16
"""Base64 from this length on is decoded off the event loop."""
MAX_JSON_BYTES = 2**19
"""Parsed on the event loop; a list of every id of a vocabulary is smaller."""


@dataclass(frozen=True)
class InputTensor:
    """One input as a client sent it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]
    """bytes for BYTES, bool for BOOL."""


@dataclass(frozen=True)
class Call:
    """What a client asks for."""

    skill: str
    stream: bool
    fields: dict[str, Any]


@dataclass(frozen=True)
class Input:
    """One input of the model: its name in the protocol, the engine's name, and how its value is read."""

    name: str
    field: str
    datatype: str
    read: Callable[[str, Any], Any]


# ---------------------------------------------------------------------- single values


def _text(field: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(field, "is not UTF-8 text; encode it as UTF-8") from None


def _json(field: str, value: bytes) -> Any:
    if len(value) > MAX_JSON_BYTES:
        raise RequestError(field, f"has {len(value)} bytes of JSON; send at most {MAX_JSON_BYTES}")
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise RequestError(field, f"is not JSON: {error.msg} at character {error.pos}") from None


def _as_it_is(field: str, value: Any) -> Any:
    return value


INPUTS = (
    Input("SKILL", "skill", BYTES, _text),
    Input("QUESTION", "question", BYTES, _text),
    Input("OBJECT", "object", BYTES, _text),
    Input("LENGTH", "length", BYTES, _text),
    Input("IMAGE", "image", BYTES, _as_it_is),
    Input("STREAM", "stream", BOOL, _as_it_is),
    Input("REASONING", "reasoning", BOOL, _as_it_is),
    Input("SETTINGS", "settings", BYTES, _json),
    Input("SPATIAL_REFS", "spatial_refs", BYTES, _json),
    Input("ADAPTER", "adapter", BYTES, _text),
    Input("REQUEST_ID", "request_id", BYTES, _text),
)
_BY_NAME = {known.name: known for known in INPUTS}


# ---------------------------------------------------------------------- a whole request


async def read_call(tensors: Iterable[InputTensor], max_image_bytes: int, threads: Threads) -> Call:
    """What the tensors ask for; `threads` decode a large picture.

    Raises RequestError naming the first input that cannot be read.
    """
    fields: dict[str, Any] = {}
    for tensor in tensors:
        known = _BY_NAME.get(tensor.name)
        if known is None:
            raise RequestError(shown(tensor.name), f"is not an input; known inputs: {', '.join(_BY_NAME)}")
        if known.field in fields:
            raise RequestError(known.name, "is given twice; give it once")
        fields[known.field] = known.read(known.name, _single_value(known, tensor))
    skill, stream = fields.pop("skill", None), fields.pop("stream", False)
    if skill not in SKILLS:
        given = "is required" if skill is None else f"{shown(skill)} is no skill"
        raise RequestError("SKILL", f"{given}; give one of: {', '.join(SKILLS)}")
    if "image" in fields:
        fields["image"] = await _picture(fields["image"], max_image_bytes, threads)
    if skill == "query":
        fields.setdefault("reasoning", False)  # as over HTTP: thinking is asked for
    return Call(skill, stream, fields)


def _single_value(known: Input, tensor: InputTensor) -> Any:
    if tensor.datatype != known.datatype:
        raise RequestError(known.name, f"must be {known.datatype} (got {shown(tensor.datatype)})")
    if tensor.shape != (1,) or len(tensor.values) != 1:
        raise RequestError(known.name, f"must hold one element, with shape [1] (got {shown(list(tensor.shape))})")
    return tensor.values[0]


async def _picture(data: bytes, max_bytes: int, threads: Threads) -> bytes:
    """The encoded picture: the bytes themselves, or what they spell in base64."""
    if any(image_format.matches(data) for image_format in FORMATS):
        return data
    if not data.isascii():
        return data  # neither; the engine says what it is
    payload = base64_payload(data.decode("ascii"), "IMAGE")
    require_decodable(payload, max_bytes, "IMAGE")
    if len(payload) < LARGE_TEXT:
        return decode_base64(payload, "IMAGE")
    return await threads.run(decode_base64, payload, "IMAGE")
