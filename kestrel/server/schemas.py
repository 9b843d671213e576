"""The API as JSON Schema: its building blocks, what a native skill takes and answers, and every way to refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kestrel import settings
from kestrel.constraints.cost_limits import MAX_FORMAT_BYTES
from kestrel.constraints.formats import MAX_CHOICES
from kestrel.settings import MAX_NAMES, OTHER_BOUND, ROUTING, SETTINGS, Schema

NULL: Schema = {"type": "null"}
TINY_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def described(description: str, schema: Schema) -> Schema:
    return {**schema, "description": description}


def exemplified(schema: Schema, example: Any) -> Schema:
    return {**schema, "examples": [example]}


def text(description: str, example: str) -> Schema:
    """Text with at least one visible character."""
    return {**settings.text.schema, "description": description, "examples": [example]}


def names(description: str, example: str) -> Schema:
    """A text, or a list of distinct ones."""
    several = {
        "type": "array",
        "items": settings.text.schema,
        "minItems": 1,
        "maxItems": MAX_NAMES,
        "uniqueItems": True,
    }
    described = {"description": f"{description} A list asks for several in one call.", "examples": [example]}
    return {"anyOf": [settings.text.schema, several], **described}


def number(low: float, high: float) -> Schema:
    return settings.number(low, high).schema


def integer(low: int, high: int) -> Schema:
    return settings.integer(low, high).schema


def list_of(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def record(properties: Mapping[str, Schema], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def body(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """An object of a request: null means not given. Further fields have no effect, unless it is closed."""
    properties = {**required, **{name: nullable(schema) for name, schema in optional.items()}}
    return {"type": "object", "properties": properties, "required": list(required)}


def nullable(schema: Schema) -> Schema:
    """Null means not given."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    inner = {key: value for key, value in schema.items() if key != "description"}
    outer = {key: value for key, value in schema.items() if key == "description"}
    return {**outer, "anyOf": [*inner.pop("anyOf", [inner]), NULL]}


def closed(schema: Schema) -> Schema:
    """Of an object that refuses properties beside its own."""
    return {**schema, "additionalProperties": False}


# ---------------------------------------------------------------------- a schema for people

MANY = 8
"""Fields of an object that are still named in one cell."""

BEYOND_COUNTING = 2**31 - 1
"""Bounds from here on are those of a machine's numbers, and no reader needs them."""


def type_text(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(type_text(kind) for kind in schema[key] if kind.get("type") != "null"))
    kinds = schema.get("type", "any")
    if kinds == "null":
        return "null"
    kind = " or ".join(k for k in ([kinds] if isinstance(kinds, str) else kinds) if k != "null")
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}))}{_range(schema, 'minItems', 'maxItems', ' entries')}"
    if kind == "object" and 0 < len(schema.get("properties", {})) <= MANY:
        return "{" + ", ".join(f"`{name}`" for name in schema["properties"]) + "}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        values = type_text(schema["additionalProperties"])
        return f"object of {values}{_range(schema, 'minProperties', 'maxProperties', ' entries')}"
    return kind + _range(schema, "minimum", "maximum") + _range(schema, "minLength", "maxLength", " characters")


def _json(value: Any) -> str:
    """Texts without quotation marks, which would only make a table harder to read."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _range(schema: Mapping[str, Any], low: str, high: str, unit: str = "") -> str:
    ends = [schema.get(low), schema.get(high)]
    least, most = (None if end is None or abs(end) >= BEYOND_COUNTING else _bound(float(end)) for end in ends)
    if least is None and most is None:
        return ""
    if most is None:
        return " (not empty)" if unit and least == "1" else f" (at least {least}{unit})"
    if least is None:
        return f" (at most {most}{unit})"
    return f" ({least}{unit})" if least == most else f" ({least} to {most}{unit})"


def _bound(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.3g}"


# ---------------------------------------------------------------------- what goes in

SHARE = number(0, 1)
REFS = list_of({"anyOf": [list_of(SHARE, minItems=2, maxItems=2), list_of(SHARE, minItems=4, maxItems=4)]})
PICTURE = described(
    "A picture file as a base64 data URL or raw base64: JPEG, PNG, WebP, GIF, BMP or TIFF.",
    {"type": "string", "examples": [TINY_PICTURE]},
)
EXPRESSION: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_FORMAT_BYTES}
TEXTS_TO_CHOOSE = list_of({"type": "string", "minLength": 1}, minItems=1, maxItems=MAX_CHOICES)
FUNCTION_ARGUMENTS: Schema = {"type": "object", "properties": {"type": {"const": "object"}}}
"""The JSON schema of an object."""
_NAMED_SCHEMA = closed(
    body(
        {"schema": {"type": "object"}},
        {"name": {"type": "string"}, "description": {"type": "string"}, "strict": {"type": "boolean"}},
    )
)
RESPONSE_FORMAT = described(
    "What the answer must look like: text, json_object, json_schema, regex or choice.",
    {
        "anyOf": [
            closed(record({"type": {"enum": ["text", "json_object"]}})),
            closed(record({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA})),
            closed(record({"type": {"const": "regex"}, "regex": EXPRESSION})),
            closed(record({"type": {"const": "choice"}, "choices": TEXTS_TO_CHOOSE})),
        ]
    },
)

COMMON_FIELDS: Mapping[str, Schema] = {
    "model": described("The model's name, or name/adapter.", {"type": "string"}),
    "stream": described("Answer as Server-Sent Events.", {"type": "boolean"}),
    **{name: setting.schema for name, setting in ROUTING.items()},
}


def body_schema(fields: Mapping[str, Schema], required: tuple[str, ...], bound: str, in_words: bool) -> Schema:
    """The body of a skill: its own fields, the common ones, and each setting in `settings` or beside it."""
    taken: dict[str, Schema] = {}
    for name, setting in SETTINGS.items():
        if name != OTHER_BOUND[bound] and (in_words or not setting.in_words):
            taken[name] = nullable(setting.schema)
            for other in setting.other_names:
                taken[other] = described(f"Another name for `{name}`.", taken[name])
    own = {name: schema if name in required else nullable(schema) for name, schema in fields.items()}
    common = {name: nullable(schema) for name, schema in COMMON_FIELDS.items()}
    inner = {"type": ["object", "null"], "properties": taken, "additionalProperties": False}
    settings = described("Settings as one object; each may also stand beside it.", inner)
    return {
        "type": "object",
        "properties": {
            **taken,
            **own,
            **common,
            "settings": settings,
        },
        "required": list(required),
        "additionalProperties": False,
    }


# ---------------------------------------------------------------------- what comes out

AMOUNT: Schema = {"type": "number", "minimum": 0}
COUNT: Schema = {"type": "integer", "minimum": 0}
SIZE = described("Of the picture as it came, upright.", record({"width": COUNT, "height": COUNT}))

NAMED: Mapping[str, Schema] = {
    "label": described("What was asked for.", {"type": "string"}),
    "score": described("How sure the model was of it.", {"type": "number", "minimum": 0, "maximum": 1}),
}


def place(*sides: str) -> Schema:
    """Shares of the picture, and the same in pixels."""
    shares: dict[str, Schema] = {side: {"type": "number"} for side in sides}
    pixels = described("The same in pixels, inside the picture.", record(dict.fromkeys(sides, AMOUNT)))
    return record({**shares, **NAMED, "pixels": pixels})


BOX_SIDES = ("x_min", "y_min", "x_max", "y_max")
BOX = record({side: {"type": "number"} for side in BOX_SIDES})
PIXEL_BOX = {"anyOf": [record(dict.fromkeys(BOX_SIDES, AMOUNT)), NULL]}
GROUND = record({"start_idx": COUNT, "end_idx": COUNT, "points": list_of(list_of({"type": "number"}))})
METRICS = record(
    {
        "input_tokens": described("The prompt's, pictures included.", COUNT),
        "output_tokens": COUNT,
        "cached_tokens": described("Those of the prompt that came from the prefix cache.", COUNT),
        "prefill_time_ms": AMOUNT,
        "decode_time_ms": AMOUNT,
        "ttft_ms": described("Until the first token.", AMOUNT),
        "queue_time_ms": AMOUNT,
    }
)
RESULTS: Mapping[str, Mapping[str, Schema]] = {
    "query": {
        "answer": {"type": "string"},
        "reasoning": described(
            "When it was asked for.", record({"text": {"type": "string"}, "grounding": list_of(GROUND)})
        ),
    },
    "caption": {"caption": {"type": "string"}},
    "point": {"points": list_of(place("x", "y")), "image": SIZE},
    "detect": {"objects": list_of(place(*BOX_SIDES)), "image": SIZE},
    "segment": {
        "path": described("An SVG path, relative to the box. Of a single outline, as `bbox`.", {"type": "string"}),
        "bbox": {"anyOf": [BOX, NULL]},
        "pixels": described("The box in pixels.", PIXEL_BOX),
        "label": NAMED["label"],
        "score": nullable(NAMED["score"]),
        "segments": list_of(
            record(
                {
                    "svg_path": {"type": "string"},
                    "bbox": {"anyOf": [BOX, NULL]},
                    "pixels": PIXEL_BOX,
                    "label": NAMED["label"],
                    "score": nullable(NAMED["score"]),
                    "path": described("As `svg_path`, where several may be outlined.", {"type": "string"}),
                },
                "path",
            )
        ),
        "image": SIZE,
    },
}
"""What each skill adds to the answer."""


OF_ONE_OUTLINE = ("path", "bbox", "pixels", "label", "score")
"""Where several may be outlined, only the entries of `segments` have them."""


TAKEN = {"description": "Taken and not used."}
"""A field of other servers that changes no answer."""
WARNINGS = described("Of the embedded model: it is not for photographs.", list_of({"type": "string"}))


def result_schema(skill: str) -> Schema:
    common = {
        "request_id": {"type": "string"},
        "finish_reason": {"enum": ["stop", "length"]},
        "metrics": METRICS,
        "processing_latency_s": AMOUNT,
        "ttft_s": AMOUNT,
        "decode_latency_s": AMOUNT,
        "decode_tokens_per_s": AMOUNT,
        "logprobs": described("When they were asked for.", list_of({"type": "object"})),
        "warnings": WARNINGS,
    }
    return record({**common, **RESULTS[skill]}, "reasoning", "logprobs", "warnings", *OF_ONE_OUTLINE)


ERROR = record(
    {
        "error": record(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": described("The field at fault.", {"type": ["string", "null"]}),
                "code": {"type": ["string", "null"]},
            }
        )
    }
)
REFUSALS = {
    400: "A field or the body is wrong, or the prompt is longer than the context.",
    401: "No key, or an unknown key.",
    403: "The key may not do that, or the request comes from another web page, or the Host is not allowed.",
    404: "No such model, adapter or stored response.",
    408: "The request arrived too slowly, or took too long.",
    410: "The source of the adapter has removed it.",
    413: "The body is too large.",
    415: "The body is not declared as JSON (or, for a skill, as a form), or it is compressed.",
    429: "This client has too many unanswered requests; see Retry-After.",
    431: "The request line and headers are too large.",
    500: "An internal error of the server.",
    502: "The source of the adapter failed.",
    503: "Starting, draining or full; see Retry-After.",
    504: "The source of the adapter did not answer in time.",
}
EVENT: Schema = {
    "type": "object",
    "properties": {
        "completed": described("True in the last event, which holds the whole result.", {"type": "boolean"}),
        "chunk": described("A piece of the answer, the caption or the path.", {"type": "string"}),
        "token_index": COUNT,
        "reasoning": described("A piece of thinking.", {"type": "string"}),
        "grounding": described("A point of thinking; those of one `start_idx` belong together.", GROUND),
        "type": {"enum": ["reasoning", "bbox", "path_delta", "point", "object", "final"]},
        "error": ERROR["properties"]["error"],
    },
}

OUTLINE_EVENT: Schema = {
    **EVENT,
    "properties": {
        **EVENT["properties"],
        "label": described("Whose piece it is, where several are outlined.", {"type": "string"}),
        "index": described("Likewise: its place in `segments`.", COUNT),
    },
}


def stream_schema(payload: Schema | None) -> Schema:
    """What `text/event-stream` holds, as OpenAPI before 3.2 has it: one event, whose data is JSON of this schema."""
    data: Schema = {"type": "string"}
    if payload is not None:
        data |= {"contentMediaType": "application/json", "contentSchema": payload}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def skill_responses(skill: str) -> dict[int | str, dict[str, Any]]:
    content = {
        "application/json": {"schema": result_schema(skill)},
        "text/event-stream": {"schema": stream_schema(OUTLINE_EVENT if skill == "segment" else EVENT)},
    }
    return {200: {"description": "The answer.", "content": content}, **refusals(*REFUSALS)}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"description": REFUSALS[status], "content": {"application/json": {"schema": ERROR}}}
        for status in statuses
    }
