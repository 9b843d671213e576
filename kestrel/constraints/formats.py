"""`response_format` of a request, in the shapes of the OpenAI API and two more for plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kestrel.constraints.cost_limits import MAX_FORMAT_BYTES, check_shape
from kestrel.errors import RequestError, did_you_mean, shown

MAX_CHOICES = MAX_FORMAT_BYTES // 2
"""More cannot fit: each takes a character and a sign between."""
ANY_OBJECT = '{"type": "object"}'
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_JOINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "if", "dependentSchemas")
"""Keywords that may name further properties of the same object."""
_BY_NAME = ("properties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "prefixItems")
"""Keywords over schemas that stand for whole values."""
_REGEX_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the answer has to match: `text` is a JSON schema, a regular expression, or calls of tools (`calls.py`)."""

    kind: Literal["json_schema", "regex", "calls"]
    text: str
    field: str = "response_format"
    """What asks for it, for messages."""


def response_format(name: str, value: Any) -> ResponseFormat | None:
    """A format; None for {"type": "text"}. Whether it makes sense, and what it costs, shows when it is compiled."""
    if not isinstance(value, Mapping):
        raise RequestError(name, f'must be an object such as {{"type": "json_object"}} (got {shown(value)})')
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise RequestError(f"{name}.type", f"must be one of: {', '.join(_READERS)} (got {shown(kind)})")
    fields, read = _READERS[kind]
    _require_known(name, value, ("type", *fields))
    return read(name, value)


def _json_schema(name: str, value: Mapping[str, Any]) -> ResponseFormat:
    given, name = value.get("json_schema"), f"{name}.json_schema"
    if not isinstance(given, Mapping):
        raise RequestError(name, f'must be an object with "name" and "schema" (got {shown(given)})')
    _require_known(name, given, _SCHEMA_FIELDS)
    for key in ("name", "description"):
        if given.get(key) is not None and not isinstance(given[key], str):
            raise RequestError(f"{name}.{key}", f"must be text (got {shown(given[key])})")
    if given.get("strict") not in (None, True, False):
        raise RequestError(f"{name}.strict", f"must be true or false (got {shown(given['strict'])})")
    schema, name = given.get("schema"), f"{name}.schema"
    if not isinstance(schema, Mapping):
        raise RequestError(name, f"must be a JSON schema as an object (got {shown(schema)})")
    check_shape(name, schema)
    held_to = closed(schema) if given.get("strict") else schema
    return ResponseFormat("json_schema", json.dumps(held_to, allow_nan=False))


def closed(schema: Any, *, is_deep: bool = True) -> Any:
    """The schema with objects that have the properties it names and no others, unless it says so itself."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    if "properties" in schema and not any(keyword in schema for keyword in _JOINING):
        result.setdefault("additionalProperties", False)
    if not is_deep:
        return result
    for key in _BY_NAME:
        if isinstance(schema.get(key), Mapping):
            result[key] = {name: closed(inner) for name, inner in schema[key].items()}
    for key in _IN_LISTS if "properties" not in schema else ():
        if isinstance(schema.get(key), list):
            result[key] = [closed(inner) for inner in schema[key]]
    for key in ("items", "additionalProperties"):
        if key in schema:
            result[key] = closed(schema[key])
    return result


def _regex(name: str, value: Mapping[str, Any]) -> ResponseFormat:
    pattern, name = value.get("regex"), f"{name}.regex"
    if not isinstance(pattern, str) or not pattern:
        raise RequestError(name, f"must be a regular expression as text (got {shown(pattern)})")
    if len(pattern) > MAX_FORMAT_BYTES:
        raise RequestError(name, f"is longer than {MAX_FORMAT_BYTES} characters; shorten it")
    return ResponseFormat("regex", pattern)


def _choice(name: str, value: Mapping[str, Any]) -> ResponseFormat:
    choices, name = value.get("choices"), f"{name}.choices"
    if isinstance(choices, (list, tuple)) and len(choices) > MAX_CHOICES:
        raise RequestError(name, f"has {len(choices)} texts; give at most {MAX_CHOICES}")
    if not isinstance(choices, (list, tuple)) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError(name, f"must be a list of texts with at least one in it (got {shown(choices)})")
    pattern = ""
    if sum(map(len, choices)) <= MAX_FORMAT_BYTES:
        pattern = "|".join(_REGEX_SIGNS.sub(r"\\\g<0>", choice) for choice in choices)
    if not 0 < len(pattern) <= MAX_FORMAT_BYTES:
        raise RequestError(name, f"hold more than {MAX_FORMAT_BYTES} characters together; give fewer or shorter ones")
    return ResponseFormat("regex", pattern)


def _require_known(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in value:
        if key not in known:
            close = did_you_mean(key, known)
            raise RequestError(f"{name}.{key}", f"is not known here; known fields: {', '.join(known)}{close}")


_READERS: Mapping[str, tuple[tuple[str, ...], Callable[[str, Mapping[str, Any]], ResponseFormat | None]]] = {
    "text": ((), lambda name, value: None),
    "json_object": ((), lambda name, value: ResponseFormat("json_schema", ANY_OBJECT)),
    "json_schema": (("json_schema",), _json_schema),
    "regex": (("regex",), _regex),
    "choice": (("choices",), _choice),
}
