"""The one table from failures to the codes of gRPC and of Triton, and the words that clients see."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

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
)
from kestrel.integrations.inference_protocol.inputs import INPUTS

INPUT_OF_FIELD = {known.field: known.name for known in INPUTS}
_OBJECT = re.compile(r"<[^<>]{0,100} at 0x[0-9a-fA-F]+>")
"""How libraries print what they were given; it says nothing to a client and an address to an attacker."""


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
    if isinstance(error, RequestError) and error.field in INPUT_OF_FIELD:
        return INPUT_OF_FIELD[error.field] + text.removeprefix(error.field)
    return text
