"""Answer formats by the names that vLLM and SGLang have for them; each becomes a `response_format`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from kestrel.constraints.cost_limits import MAX_FORMAT_BYTES
from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.server.openai.parameters import Body, EngineFields, Refusal, refuse
from kestrel.server.schemas import EXPRESSION, RESPONSE_FORMAT, TEXTS_TO_CHOOSE, Schema, body, closed, described
from kestrel.settings import boolean

OBJECT = "structured_outputs"
"""vLLM's object, which holds one of several formats."""


def _schema(name: str, value: Any) -> Any:
    """A schema may come as JSON in a text."""
    if isinstance(value, str):
        if len(value) > MAX_FORMAT_BYTES:
            raise RequestError(name, f"is longer than {MAX_FORMAT_BYTES} characters; make it shorter")
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise RequestError(name, f"must be a JSON schema, as an object or as text (got {shown(value)})") from None
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _any_object(name: str, value: Any) -> Any:
    return {"type": "json_object" if boolean(name, value) else "text"}


def _regex(name: str, value: Any) -> Any:
    return {"type": "regex", "regex": value}


def _choice(name: str, value: Any) -> Any:
    return {"type": "choice", "choices": value}


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "response_format": lambda name, value: value,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    f"{OBJECT}.json": _schema,
    f"{OBJECT}.regex": _regex,
    f"{OBJECT}.choice": _choice,
    f"{OBJECT}.json_object": _any_object,
    "json_schema": _schema,
    "regex": _regex,
}
_GRAMMAR = Refusal("write the grammar as a regular expression or a JSON schema")
_TAG = Refusal("use tools, or a JSON schema")
_BLANKS = Refusal("JSON is written with a space after each comma and colon; leave it out", (False,))
_CLOSED = Refusal('write "additionalProperties": false into the schema', (False,))
_REFUSED: Mapping[str, Refusal] = {
    "guided_grammar": _GRAMMAR,
    "ebnf": _GRAMMAR,
    f"{OBJECT}.grammar": _GRAMMAR,
    "structural_tag": _TAG,
    f"{OBJECT}.structural_tag": _TAG,
    "guided_whitespace_pattern": _BLANKS,
    "guided_decoding_disable_any_whitespace": _BLANKS,
    "guided_decoding_disable_additional_properties": _CLOSED,
    f"{OBJECT}.whitespace_pattern": _BLANKS,
    f"{OBJECT}.disable_any_whitespace": _BLANKS,
    f"{OBJECT}.disable_additional_properties": _CLOSED,
}
NAMES = (OBJECT, *(name for name in (*_READERS, *_REFUSED) if not name.startswith(OBJECT)))
"""Every field of a body that is about formats."""
_PLACES = ("response_format", *(f"response_format.{part}" for part in ("json_schema.schema", "regex", "choices")))
"""What refusals of a format may name."""
_ANY_SCHEMA: Schema = {
    "anyOf": [{"type": "object"}, {"type": "string", "minLength": 2, "contentMediaType": "application/json"}]
}
_OBJECT = closed(
    body(
        {},
        {
            **{"json": _ANY_SCHEMA, "regex": EXPRESSION, "choice": TEXTS_TO_CHOOSE, "json_object": {"type": "boolean"}},
            **{
                name.removeprefix(f"{OBJECT}."): {"enum": list(one.harmless)}
                for name, one in _REFUSED.items()
                if name.startswith(OBJECT) and one.harmless
            },
        },
    )
)
SCHEMAS: Mapping[str, Schema] = {
    "response_format": RESPONSE_FORMAT,
    "guided_json": described("A JSON schema that the answer fits, as an object or as text.", _ANY_SCHEMA),
    "guided_regex": described("A regular expression that the answer matches.", EXPRESSION),
    "guided_choice": described("Texts of which the answer is one.", TEXTS_TO_CHOOSE),
    OBJECT: described("One of json, regex, choice and json_object.", _OBJECT),
    "json_schema": described("Another name for `guided_json`.", _ANY_SCHEMA),
    "regex": described("Another name for `guided_regex`.", EXPRESSION),
}


def take_format(body: Body, fields: EngineFields) -> None:
    """The format that a body asks for, under any of its names. Two at once are refused."""
    asked = dict(_asked(body))
    refuse(asked, _REFUSED)
    names = [name for name in _READERS if name in asked]
    if len(names) > 1:
        raise RequestError(
            names[1], f"cannot be used together with {names[0]}: an answer has one format; give one of them"
        )
    for name in names:
        fields.values["response_format"] = _READERS[name](name, asked[name])
        if name != "response_format":
            fields.names |= dict.fromkeys(_PLACES, name)


def _asked(body: Body) -> Iterator[tuple[str, Any]]:
    """Everything about formats; the fields of vLLM's object have its name before their own."""
    for name in (*_READERS, *_REFUSED):
        if name in body:
            yield name, body[name]
    inner = body.get(OBJECT, {})
    if not isinstance(inner, Mapping):
        raise RequestError(OBJECT, f'must be an object such as {{"regex": "[0-9]+"}} (got {shown(inner)})')
    known = [name.removeprefix(f"{OBJECT}.") for name in (*_READERS, *_REFUSED) if name.startswith(OBJECT)]
    for key, value in inner.items():
        if key not in known:
            close = did_you_mean(key, known)
            raise RequestError(f"{OBJECT}.{key}", f"is not known here; known fields: {', '.join(known)}{close}")
        if value is not None:
            yield f"{OBJECT}.{key}", value
