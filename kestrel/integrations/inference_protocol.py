"""Skills as the inference protocol of KServe and Triton sees them: named tensors in, one JSON text out.

The skills' own tables check what the fields hold. Failures become codes of gRPC and of Triton.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from kestrel.engine import EngineResult, EngineStream
from kestrel.engine.streams import chunk_body
from kestrel.errors import (
    MAX_MESSAGE,
    AdapterNotFound,
    AdapterSourceBusy,
    AdapterSourceError,
    AdapterSourceTimeout,
    AdapterUnusable,
    CapacityError,
    DeadlineExceeded,
    EngineStopped,
    ModelNotFound,
    NotAllowed,
    NotServing,
    NumericalError,
    RequestCancelled,
    RequestError,
    TooManyRequests,
    Unauthorised,
    cut,
    shown,
)
from kestrel.images.encoded import FORMATS, base64_start, decode_base64, require_decodable
from kestrel.threads import Threads

MODEL = "moondream"
"""The model's name in the protocol, whatever the engine runs."""
VERSION = "1"
BYTES, BOOL = "BYTES", "BOOL"
OUTPUT = "TEXT_OUTPUT"
TEXT_SKILLS = frozenset({"query", "caption"})
"""Their streams are pieces of one text; those of the others are points, boxes and parts of an outline."""
SKILLS = ("query", "caption", "point", "detect", "segment")
LARGE_TEXT = 2**16
"""Base64 from this length on is decoded off the event loop."""
MAX_JSON_BYTES = 2**19
"""Parsed on the event loop; a list of every id of a vocabulary is smaller."""
_OBJECT = re.compile(r"<[^<>]{0,100} at 0x[0-9a-fA-F]+>")
"""How libraries print what they were given; it says nothing to a client and an address to an attacker."""


@dataclass(frozen=True)
class InputTensor:
    """One input as a client sent it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]
    """bytes for BYTES, bool for BOOL."""


@dataclass(frozen=True)
class SkillCall:
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
    takes_several: bool = False
    """Whether it may hold more than one element."""

    @property
    def shape(self) -> list[int]:
        return [-1 if self.takes_several else 1]


# ---------------------------------------------------------------------- what goes in


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
    Input("OBJECT", "object", BYTES, _text, takes_several=True),
    Input("INSTANCES", "instances", BYTES, _text),
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
_NAME_OF_FIELD = {known.field: known.name for known in INPUTS}


async def read_call(tensors: Iterable[InputTensor], max_image_bytes: int, threads: Threads) -> SkillCall:
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
        values = [known.read(known.name, value) for value in _values(known, tensor)]
        fields[known.field] = values[0] if len(values) == 1 else values
    skill, stream = fields.pop("skill", None), fields.pop("stream", False)
    if skill not in SKILLS:
        given = "is required" if skill is None else f"{shown(skill)} is not a skill"
        raise RequestError("SKILL", f"{given}; give one of: {', '.join(SKILLS)}")
    if "image" in fields:
        fields["image"] = await _picture(fields["image"], max_image_bytes, threads)
    if skill == "query":
        fields.setdefault("reasoning", False)  # as over HTTP: thinking is asked for
    return SkillCall(skill, stream, fields)


def _values(known: Input, tensor: InputTensor) -> Sequence[Any]:
    if tensor.datatype != known.datatype:
        raise RequestError(known.name, f"must be {known.datatype} (got {shown(tensor.datatype)})")
    wanted = (len(tensor.values),) if known.takes_several and tensor.values else (1,)
    if tensor.shape != wanted or len(tensor.values) != wanted[0]:
        what = "one element or more, with shape [n]" if known.takes_several else "one element, with shape [1]"
        raise RequestError(known.name, f"must hold {what} (got {shown(list(tensor.shape))})")
    return tensor.values


async def _picture(data: bytes, max_bytes: int, threads: Threads) -> bytes:
    """The encoded picture: the bytes themselves, or what they spell in base64."""
    if any(image_format.matches(data) for image_format in FORMATS):
        return data
    if not data.isascii():
        return data  # neither; the engine says what it is
    if len(data) < LARGE_TEXT:
        return _decoded(data, max_bytes)
    return await threads.run(_decoded, data, max_bytes)


def _decoded(data: bytes, max_bytes: int) -> bytes:
    text = data.decode("ascii")
    start = base64_start(text, "IMAGE")
    require_decodable(text, max_bytes, "IMAGE", start)
    return decode_base64(text, "IMAGE", start)


# ---------------------------------------------------------------------- what comes out


@dataclass(frozen=True)
class Answer:
    """One response."""

    text: bytes
    """JSON."""
    is_final: bool


async def answers(stream: EngineStream, wants_pieces: bool) -> AsyncIterator[Answer]:
    """What the client gets of a running request: every piece as it comes and then the whole, or the whole alone."""
    opening: dict[str, Any] = {}
    if wants_pieces:
        async for chunk in stream:
            yield Answer(orjson.dumps(chunk_body(chunk)), is_final=False)
        opening = {"chunk": ""} if stream.skill in TEXT_SKILLS else {"type": "final"}
        opening["completed"] = True
    yield Answer(orjson.dumps({**opening, **_result_body(await stream.result())}), is_final=True)


def _result_body(result: EngineResult) -> dict[str, Any]:
    metrics = result.metrics
    return {
        "request_id": result.request_id,
        "finish_reason": result.finish_reason,
        **result.output,
        "metrics": {
            "input_tokens": metrics.input_tokens,
            "output_tokens": metrics.output_tokens,
            "prefill_time_ms": metrics.prefill_time_ms,
            "decode_time_ms": metrics.decode_time_ms,
            "ttft_ms": metrics.ttft_ms,
        },
    }


# ---------------------------------------------------------------------- failures


class TritonCode(Enum):
    """Codes that Triton knows in every release with decoupled models."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"


class Unsupported(RequestError):
    """Something that the protocol knows and this endpoint does not do."""


@dataclass(frozen=True)
class ErrorKind:
    grpc: str
    """The name of a gRPC status code."""
    triton: TritonCode
    message: str | None = None
    """Said in place of the error's own words, which may name what is no client's business."""


ERROR_KINDS: tuple[tuple[type[BaseException], ErrorKind], ...] = (
    (Unauthorised, ErrorKind("UNAUTHENTICATED", TritonCode.INVALID_ARG)),
    (NotAllowed, ErrorKind("PERMISSION_DENIED", TritonCode.INVALID_ARG)),
    (ModelNotFound, ErrorKind("NOT_FOUND", TritonCode.NOT_FOUND)),
    (AdapterNotFound, ErrorKind("NOT_FOUND", TritonCode.NOT_FOUND)),
    (AdapterUnusable, ErrorKind("FAILED_PRECONDITION", TritonCode.INVALID_ARG)),
    (AdapterSourceBusy, ErrorKind("UNAVAILABLE", TritonCode.UNAVAILABLE)),
    (AdapterSourceTimeout, ErrorKind("DEADLINE_EXCEEDED", TritonCode.UNAVAILABLE)),
    (AdapterSourceError, ErrorKind("UNAVAILABLE", TritonCode.UNAVAILABLE)),
    (DeadlineExceeded, ErrorKind("DEADLINE_EXCEEDED", TritonCode.UNAVAILABLE)),
    (TooManyRequests, ErrorKind("RESOURCE_EXHAUSTED", TritonCode.UNAVAILABLE)),
    (NotServing, ErrorKind("UNAVAILABLE", TritonCode.UNAVAILABLE)),
    (CapacityError, ErrorKind("RESOURCE_EXHAUSTED", TritonCode.UNAVAILABLE)),
    (Unsupported, ErrorKind("UNIMPLEMENTED", TritonCode.UNSUPPORTED)),
    (RequestError, ErrorKind("INVALID_ARGUMENT", TritonCode.INVALID_ARG)),
    (EngineStopped, ErrorKind("UNAVAILABLE", TritonCode.UNAVAILABLE, "the engine has stopped; retry later")),
    (RequestCancelled, ErrorKind("CANCELLED", TritonCode.UNKNOWN, "the request was cancelled")),
    (
        NumericalError,
        ErrorKind("INTERNAL", TritonCode.INTERNAL, "the model's numbers for this request are not finite"),
    ),
    (Exception, ErrorKind("INTERNAL", TritonCode.INTERNAL, "an internal error; the server's log has it")),
)
"""The first entry an error is an instance of counts."""


def kind_of(error: BaseException) -> ErrorKind:
    return next(kind for known, kind in ERROR_KINDS if isinstance(error, known))


def message_of(error: BaseException) -> str:
    """What a client is told. A field is called by the input that carries it."""
    text = _OBJECT.sub("the data", cut(kind_of(error).message or str(error), MAX_MESSAGE))
    if isinstance(error, RequestError) and error.field in _NAME_OF_FIELD:
        return _NAME_OF_FIELD[error.field] + text.removeprefix(error.field)
    return text
