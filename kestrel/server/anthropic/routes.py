"""The routes of the Messages API, and their bodies as JSON Schema."""

from __future__ import annotations

from fastapi import APIRouter

from kestrel.server.anthropic.messages import CHOICES, EFFORT, UNUSED, count_tokens, create_message
from kestrel.server.errors import ANTHROPIC_STATUSES
from kestrel.server.openai.chat import MAX_MESSAGES
from kestrel.server.openai.routes import BOOLEAN, COUNT, TEXT, ApiRoute, api_routes
from kestrel.server.records import MESSAGES_PATH
from kestrel.server.schemas import (
    FUNCTION_ARGUMENTS,
    REFUSALS,
    TAKEN,
    WARNINGS,
    Schema,
    body,
    closed,
    described,
    exemplified,
    list_of,
    nullable,
    record,
)
from kestrel.settings import SETTINGS
from kestrel.skills.tools import MAX_TOOLS, NAME


def _sent(block: Schema) -> Schema:
    """In a request a block has its own fields and a mark for a cache."""
    return closed({**block, "properties": {**block["properties"], "cache_control": {}}})


_TEXT_BLOCK = record({"type": {"const": "text"}, "text": TEXT})
_TEXTS: Schema = {"anyOf": [TEXT, list_of(_sent(_TEXT_BLOCK))]}
_SOURCE: Schema = {
    "anyOf": [
        closed(record({"type": {"const": "base64"}, "media_type": {}, "data": TEXT}, "media_type")),
        closed(record({"type": {"const": "url"}, "url": TEXT})),
    ]
}
_CALL = record({"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": {"type": "object"}})
_THOUGHT = record({"type": {"const": "thinking"}, "thinking": TEXT, "signature": {}}, "signature")
_RESULT = record(
    {"type": {"const": "tool_result"}, "tool_use_id": TEXT, "content": nullable(_TEXTS), "is_error": nullable(BOOLEAN)},
    "content",
    "is_error",
)
_PICTURE = record({"type": {"const": "image"}, "source": _SOURCE})
_BLOCKS = {"user": (_TEXT_BLOCK, _PICTURE, _RESULT), "assistant": (_TEXT_BLOCK, _CALL, _THOUGHT)}


def _message(role: str) -> Schema:
    blocks = list_of({"anyOf": [_sent(block) for block in _BLOCKS[role]]}, minItems=1)
    return closed(record({"role": {"const": role}, "content": {"anyOf": [TEXT, blocks]}}))


_MESSAGE: Schema = {"anyOf": [_message(role) for role in _BLOCKS]}
_TOOL = closed(
    body(
        {"name": {"type": "string", "pattern": f"^{NAME.pattern}$"}, "input_schema": FUNCTION_ARGUMENTS},
        {"type": {"const": "custom"}, "description": TEXT, "strict": BOOLEAN, "cache_control": {}},
    )
)
_ONE_CALL = {"disable_parallel_tool_use": BOOLEAN}
_TOOL_CHOICE: Schema = {
    "anyOf": [
        closed(body({"type": {"enum": list(CHOICES)}}, _ONE_CALL)),
        closed(body({"type": {"const": "tool"}, "name": TEXT}, _ONE_CALL)),
    ]
}
_THINKING: Schema = {
    "anyOf": [
        closed(record({"type": {"const": "enabled"}, "budget_tokens": {"type": "integer", "minimum": 1}})),
        closed(record({"type": {"enum": ["adaptive", "disabled"]}})),
    ]
}
_FORMAT = closed(record({"type": {"const": "json_schema"}, "schema": {"type": "object"}}))
_OUTPUT_CONFIG = closed(body({}, {"format": _FORMAT, "effort": {"const": EFFORT}}))
_MESSAGES = exemplified(
    list_of(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES), [{"role": "user", "content": "Who are you?"}]
)
_CONVERSATION = {
    "model": {"type": "string", "description": "The model's name, or name/adapter. Default: the one served."},
    "system": described("What stands before the conversation.", _TEXTS),
    "tools": described("Functions that the answer may call.", list_of(_TOOL, maxItems=MAX_TOOLS)),
    "tool_choice": described("Whether to call one, and which. Default: auto.", _TOOL_CHOICE),
    "output_config": described("What the answer must look like.", _OUTPUT_CONFIG),
    "thinking": described("Whether to think first. The budget has no effect.", _THINKING),
}
MESSAGE_REQUEST = closed(
    body(
        {"messages": _MESSAGES, "max_tokens": exemplified(SETTINGS["max_tokens"].schema, 100)},
        {
            **_CONVERSATION,
            **{name: SETTINGS[name].schema for name in ("temperature", "top_p", "top_k")},
            "stop_sequences": described(SETTINGS["stop"].meaning, SETTINGS["stop"].schema["anyOf"][1]),
            "stream": described("Answer as Server-Sent Events.", BOOLEAN),
            **dict.fromkeys(UNUSED, TAKEN),
        },
    )
)
COUNT_REQUEST = closed(body({"messages": _MESSAGES}, {**_CONVERSATION, "cache_control": TAKEN}))
MESSAGE = record(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": list_of({"anyOf": [_TEXT_BLOCK, _CALL, _THOUGHT]}),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": nullable(TEXT),
        "usage": record(
            {
                "input_tokens": described("Those of the prompt that were not cached.", COUNT),
                "cache_creation_input_tokens": COUNT,
                "cache_read_input_tokens": COUNT,
                "output_tokens": COUNT,
            }
        ),
        "warnings": WARNINGS,
    },
    "warnings",
)
_ERROR = record({"type": {"const": "error"}, "error": record({"type": TEXT, "message": TEXT})})
ROUTES = (
    ApiRoute(MESSAGES_PATH, create_message, MESSAGE, MESSAGE_REQUEST, streams=True),
    ApiRoute(f"{MESSAGES_PATH}/count_tokens", count_tokens, record({"input_tokens": COUNT}), COUNT_REQUEST),
)


def anthropic_routes() -> APIRouter:
    told = {status: meaning for status, meaning in REFUSALS.items() if status not in ANTHROPIC_STATUSES}
    told |= {own: f"As {status} elsewhere. {REFUSALS[status]}" for status, own in ANTHROPIC_STATUSES.items()}
    content = {"application/json": {"schema": _ERROR}}
    return api_routes(
        "anthropic", ROUTES, {status: {"description": meaning, "content": content} for status, meaning in told.items()}
    )
