"""The routes of the Responses API, and their bodies as JSON Schema."""

from __future__ import annotations

from fastapi import APIRouter

from kestrel.server.openai.chat import EFFORTS, MAX_MESSAGES
from kestrel.server.openai.parameters import parameter_schemas
from kestrel.server.openai.routes import BOOLEAN, COUNT, TEXT, ApiRoute, api_routes
from kestrel.server.responses_api.create import (
    CHOICES,
    INCLUDED,
    MAX_METADATA,
    MAX_METADATA_CHARACTERS,
    REFUSED,
    SAMPLING,
    UNUSED,
    create_response,
    delete_response,
    get_response,
)
from kestrel.server.responses_api.items import MESSAGE_ROLES
from kestrel.server.schemas import (
    FUNCTION_ARGUMENTS,
    NULL,
    REFUSALS,
    TAKEN,
    WARNINGS,
    Schema,
    body,
    closed,
    described,
    list_of,
    nullable,
    record,
    refusals,
)
from kestrel.settings import SETTINGS
from kestrel.skills.tools import MAX_TOOLS, NAME

PATH = "/v1/responses"
_ANY: Schema = {}
_IDENTITY = {"id": TEXT, "status": _ANY}
_MESSAGE = {"type": {"const": "message"}, "phase": _ANY, **_IDENTITY}
_TEXT_PART = closed(body({"type": {"const": "input_text"}, "text": TEXT}, {}))
_SAID_PART = closed(body({"type": {"const": "output_text"}, "text": TEXT}, {"annotations": _ANY, "logprobs": _ANY}))
_PICTURE = closed(body({"type": {"const": "input_image"}, "image_url": TEXT}, {"detail": _ANY}))
_TEXTS: Schema = {"anyOf": [TEXT, list_of({"anyOf": [_TEXT_PART, _SAID_PART]}, minItems=1)]}
_CONTENT: Schema = {"anyOf": [TEXT, list_of({"anyOf": [_TEXT_PART, _SAID_PART, _PICTURE]}, minItems=1)]}
_THOUGHT = record({"type": {"const": "reasoning_text"}, "text": TEXT})
_ITEMS = (
    body({"role": {"const": "user"}, "content": _CONTENT}, _MESSAGE),
    body({"role": {"enum": [role for role in MESSAGE_ROLES if role != "user"]}, "content": _TEXTS}, _MESSAGE),
    body({"type": {"const": "function_call"}, "call_id": TEXT, "name": TEXT, "arguments": TEXT}, _IDENTITY),
    body({"type": {"const": "function_call_output"}, "call_id": TEXT, "output": _TEXTS}, _IDENTITY),
    body({"type": {"const": "reasoning"}}, {"summary": _ANY, "content": list_of(_THOUGHT), **_IDENTITY}),
)
_ITEM: Schema = {"anyOf": [closed(item) for item in _ITEMS]}
_TOOL = closed(
    body(
        {"type": {"const": "function"}, "name": {"type": "string", "pattern": f"^{NAME.pattern}$"}},
        {"description": TEXT, "parameters": FUNCTION_ARGUMENTS, "strict": BOOLEAN},
    )
)
_TOOL_CHOICE: Schema = {
    "anyOf": [{"enum": list(CHOICES)}, closed(record({"type": {"const": "function"}, "name": TEXT}))]
}
_FORMAT: Schema = {
    "anyOf": [
        closed(record({"type": {"enum": ["text", "json_object"]}})),
        closed(
            body(
                {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
                {"name": TEXT, "description": TEXT, "strict": BOOLEAN},
            )
        ),
    ]
}
_REASONING = closed(body({}, {"effort": {"enum": list(EFFORTS)}, "summary": {"const": "auto"}}))
_TEXT = closed(body({}, {"format": _FORMAT, "verbosity": {"const": "medium"}}))
_METADATA: Schema = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_METADATA_CHARACTERS},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_CHARACTERS},
}
_ONLY = {"description": "Anything else is refused."}
_SETTINGS = parameter_schemas()
RESPONSE_REQUEST = closed(
    body(
        {
            "input": {
                "anyOf": [TEXT, list_of(_ITEM, minItems=1, maxItems=MAX_MESSAGES)],
                "description": "What to answer: a text, or messages and other items.",
                "examples": ["Who are you?"],
            }
        },
        {
            "model": {"type": "string", "description": "The model's name, or name/adapter. Default: the one served."},
            "instructions": described("A system message before everything.", TEXT),
            "previous_response_id": described("A stored response that this one goes on from.", TEXT),
            "store": described("Whether to keep the response. Default: true.", BOOLEAN),
            "stream": described("Answer as Server-Sent Events.", BOOLEAN),
            "max_output_tokens": SETTINGS["max_tokens"].schema,
            **{name: _SETTINGS[name] for name in SAMPLING},
            "text": described("What the answer must look like.", _TEXT),
            "reasoning": described("Whether to think first.", _REASONING),
            "tools": described("Functions that the answer may call.", list_of(_TOOL, maxItems=MAX_TOOLS)),
            "tool_choice": described("Whether to call one, and which. Default: auto.", _TOOL_CHOICE),
            "parallel_tool_calls": described("Whether there may be several calls. Default: true.", BOOLEAN),
            "include": described("Has no effect: thoughts are there as text.", list_of({"enum": list(INCLUDED)})),
            "metadata": described("Repeated in the response.", _METADATA),
            **dict.fromkeys(UNUSED, TAKEN),
            **{name: {**_ONLY, "enum": list(one.harmless)} for name, one in REFUSED.items() if one.harmless},
        },
    )
)
_ITEM_IDENTITY = {"id": TEXT, "status": {"enum": ["in_progress", "completed", "incomplete"]}}
_OUTPUT: Schema = {
    "anyOf": [
        record({"type": {"const": "message"}, "role": {"const": "assistant"}, "content": list_of(_SAID_PART)}),
        record({"type": {"const": "reasoning"}, "summary": list_of(_ANY), "content": list_of(_THOUGHT)}),
        record({"type": {"const": "function_call"}, "call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    ],
    **record(_ITEM_IDENTITY),
}
_USAGE = record(
    {
        "input_tokens": COUNT,
        "input_tokens_details": record({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": record({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
RESPONSE = record(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "model": TEXT,
        "status": {"enum": ["completed", "incomplete"]},
        "error": NULL,
        "incomplete_details": nullable(record({"reason": {"const": "max_output_tokens"}})),
        "output": list_of(_OUTPUT),
        "usage": _USAGE,
        "background": {"const": False},
        "instructions": nullable(TEXT),
        "max_output_tokens": nullable(COUNT),
        "metadata": _METADATA,
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": nullable(TEXT),
        "reasoning": record({"effort": nullable(TEXT), "summary": nullable(TEXT)}),
        "store": BOOLEAN,
        "temperature": {"type": "number"},
        "text": record({"format": _FORMAT}),
        "tool_choice": _TOOL_CHOICE,
        "tools": list_of(_TOOL),
        "top_p": {"type": "number"},
        "truncation": {"const": "disabled"},
        "warnings": WARNINGS,
    },
    "warnings",
)
_BY_ID = f"{PATH}/{{response_id}}"
_DELETED = record({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}})
ROUTES = (
    ApiRoute(PATH, create_response, RESPONSE, RESPONSE_REQUEST, streams=True),
    ApiRoute(_BY_ID, get_response, RESPONSE, path_parameters=("response_id",)),
    ApiRoute(_BY_ID, delete_response, _DELETED, path_parameters=("response_id",), method="DELETE"),
)


def responses_routes() -> APIRouter:
    return api_routes("responses", ROUTES, refusals(*REFUSALS))
