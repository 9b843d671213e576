"""OpenAI's routes, and their bodies as JSON Schema. What a parameter may be is said beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kestrel.server.middleware import DirectRoute
from kestrel.server.openai import chat, completions
from kestrel.server.openai.chat import MAX_MESSAGES, chat_completion
from kestrel.server.openai.completions import completion
from kestrel.server.openai.embeddings import ENCODINGS, MAX_INPUTS, ROUTED, embeddings
from kestrel.server.openai.formats import SCHEMAS as FORMATS
from kestrel.server.openai.model_info import detokenize, list_models, retrieve_model, tokenize, tokenizer_info
from kestrel.server.openai.parameters import CHOICES, UNUSED, parameter_schemas
from kestrel.server.schemas import (
    COMMON_FIELDS,
    FUNCTION_ARGUMENTS,
    NULL,
    REFUSALS,
    TAKEN,
    WARNINGS,
    Schema,
    body,
    closed,
    described,
    exemplified,
    integer,
    list_of,
    nullable,
    number,
    record,
    refusals,
)
from kestrel.settings import SETTINGS, boolean, tokens_or_none
from kestrel.settings import text as visible
from kestrel.skills.tools import MAX_TOOLS, NAME

BOOLEAN = boolean.schema
TEXT: Schema = {"type": "string"}
COUNT = integer(0, 2**53)
Responses: TypeAlias = dict[int | str, dict[str, Any]]
TOKEN_ID = integer(0, 2**31 - 1)


# ---------------------------------------------------------------------- requests

_IMAGE: Schema = {"anyOf": [TEXT, record({"url": TEXT, "detail": {}}, "detail")]}
_TEXT_PART = record({"type": {"const": "text"}, "text": TEXT})
PART: Schema = {"oneOf": [_TEXT_PART, record({"type": {"const": "image_url"}, "image_url": _IMAGE})]}
_CALL = record({"id": TEXT, "type": {"const": "function"}, "function": record({"name": TEXT, "arguments": TEXT})})
_NOTHING: Schema = {"enum": [None, []]}
_WORDS: Schema = {"anyOf": [TEXT, list_of(_TEXT_PART)]}


def _message(content: Schema, *roles: str) -> Schema:
    return record({"role": {"enum": list(roles)}, "content": content, "tool_calls": _NOTHING}, "tool_calls")


_ANSWER = {"role": {"const": "assistant"}, "content": nullable(_WORDS), "tool_calls": nullable(list_of(_CALL))}


def _messages(part: Schema) -> Schema:
    """`part`: what a user may send."""
    one: Schema = {
        "anyOf": [
            _message(_WORDS, "system", "developer", "tool"),
            _message({"anyOf": [TEXT, list_of(part)]}, "user"),
            record(_ANSWER, "content", "tool_calls"),
        ],
        "properties": {"function_call": _NOTHING, "audio": _NOTHING},
    }
    return exemplified(list_of(one, minItems=1, maxItems=MAX_MESSAGES), [{"role": "user", "content": "Who are you?"}])


_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_TOOL = record(
    {
        "type": {"const": "function"},
        "function": closed(
            body({"name": _NAME}, {"description": TEXT, "parameters": FUNCTION_ARGUMENTS, "strict": BOOLEAN})
        ),
    }
)
_TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        record({"type": {"const": "function"}, "function": record({"name": TEXT})}),
    ]
}
_STREAM_OPTIONS = body({}, {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN})
_UNUSED: Mapping[str, Schema] = dict.fromkeys(UNUSED, TAKEN)
_COMMON: Mapping[str, Schema] = {
    "model": {"type": "string", "description": "The model's name, or name/adapter. Default: the one served."},
    "n": described("How many answers. Default: 1.", CHOICES.schema),
    "best_of": described("Must equal `n`.", CHOICES.schema),
    **FORMATS,
    "stream": COMMON_FIELDS["stream"],
    "stream_options": described("Whether a stream tells the usage: at its end, or in every event.", _STREAM_OPTIONS),
    **_UNUSED,
}
_TEMPLATE_FIELDS: Mapping[str, Schema] = {
    "chat_template_kwargs": described("Variables for the model's chat template.", {"type": "object"}),
    "add_generation_prompt": described("Whether the template opens an answer. Default: true.", BOOLEAN),
    "continue_final_message": described("Go on with the last message instead of opening an answer.", BOOLEAN),
}
_EFFORT: Schema = {"enum": list(chat.EFFORTS)}
CHAT_REQUEST = body(
    {"messages": described("The conversation so far.", _messages(PART))},
    {
        **_COMMON,
        **parameter_schemas(),
        "logprobs": described("Add the log-probability of each token.", BOOLEAN),
        "top_logprobs": described("Likely tokens to show beside each; needs `logprobs`.", SETTINGS["logprobs"].schema),
        "reasoning": described(
            "Whether to think first.",
            {"anyOf": [BOOLEAN, body({}, {"effort": _EFFORT, "enabled": BOOLEAN})]},
        ),
        "reasoning_effort": described("`none` is not to think first; all others are alike.", _EFFORT),
        "include_reasoning": described(
            "false hides thoughts; true also asks for them, of a model without a chat template.", BOOLEAN
        ),
        **_TEMPLATE_FIELDS,
        "tools": described("Functions that the answer may call.", list_of(_TOOL, maxItems=MAX_TOOLS)),
        "tool_choice": described("Whether to call one, and which. Default: auto.", _TOOL_CHOICE),
        "parallel_tool_calls": described("Whether there may be several calls. Default: true.", BOOLEAN),
    },
)
_IDS = list_of(TOKEN_ID, minItems=1)
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_VISIBLE_OR_IDS: Schema = {"anyOf": [visible.schema, _IDS]}
COMPLETION_REQUEST = body(
    {
        "prompt": {
            "description": "What to continue: a text, token ids, or a list of either.",
            "anyOf": [
                _SOME_TEXT,
                _IDS,
                list_of(_SOME_TEXT, minItems=1, maxItems=completions.MAX_PROMPTS),
                list_of(_IDS, minItems=1, maxItems=completions.MAX_PROMPTS),
            ],
            "examples": ["A kestrel is"],
        }
    },
    {
        **_COMMON,
        **parameter_schemas(tokens_or_none),
        "echo": described("Put the prompt before the text.", BOOLEAN),
        "logprobs": SETTINGS["logprobs"].schema,
        "add_special_tokens": described(
            "Of a text: whether the beginning of text is put before it. Default: true.", BOOLEAN
        ),
    },
)
EMBEDDING_REQUEST = body(
    {
        "input": {
            "description": "A text, token ids, or parts with at most one picture; a list of these for several vectors.",
            "anyOf": [
                _VISIBLE_OR_IDS,
                list_of(PART, minItems=1),
                list_of({"anyOf": [_VISIBLE_OR_IDS, list_of(PART, minItems=1)]}, minItems=1, maxItems=MAX_INPUTS),
            ],
            "examples": ["a kestrel"],
        }
    },
    {
        "model": _COMMON["model"],
        "encoding_format": described("How to write numbers. Default: float.", {"enum": list(ENCODINGS)}),
        "dimensions": {"type": "integer", "description": "Must be the model's own number."},
        "adapter": SETTINGS["adapter"].schema,
        "max_crops": SETTINGS["max_crops"].schema,
        **{name: COMMON_FIELDS[name] for name in ROUTED},
        **_UNUSED,
    },
)
TOKENIZE_REQUEST = body(
    {},
    {
        "prompt": described("The text.", TEXT),
        "messages": described("In place of a prompt. Without pictures.", _messages(_TEXT_PART)),
        "model": _COMMON["model"],
        "add_special_tokens": described("Of a prompt: whether the beginning of text is there. Default: true.", BOOLEAN),
        **_TEMPLATE_FIELDS,
    },
) | {
    "anyOf": [
        {
            "required": ["prompt"],
            "properties": {"prompt": TEXT, **dict.fromkeys(("messages", *_TEMPLATE_FIELDS), NULL)},
        },
        {
            "required": ["messages"],
            "properties": {
                "messages": {"type": "array"},
                "prompt": NULL,
                "add_special_tokens": {"enum": [None, False]},
            },
        },
    ],
    "examples": [{"prompt": "a kestrel"}],
}
DETOKENIZE_REQUEST = body(
    {"tokens": described("The ids.", exemplified(list_of(TOKEN_ID), [5, 6, 7]))}, {"model": _COMMON["model"]}
)

# ---------------------------------------------------------------------- answers

_NUMBER: Schema = {"type": "number"}
_USAGE = record(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": nullable(record({"cached_tokens": COUNT, "image_tokens": COUNT})),
        "completion_tokens_details": record({"reasoning_tokens": COUNT}),
    }
)
_CHAT_TOKEN = {"token": TEXT, "bytes": nullable(list_of(integer(0, 255))), "logprob": _NUMBER}
_CHAT_LOGPROBS = record(
    {
        "content": list_of(record({**_CHAT_TOKEN, "top_logprobs": list_of(record(_CHAT_TOKEN))})),
        "refusal": NULL,
    }
)
_COLUMNS = record(
    {
        "tokens": list_of(TEXT),
        "token_logprobs": list_of(nullable(_NUMBER)),
        "top_logprobs": list_of(nullable({"type": "object", "additionalProperties": number(-1e30, 0)})),
        "text_offset": list_of(COUNT),
    }
)
_FINISH: Schema = {"enum": ["stop", "length"]}
_ENVELOPE: Mapping[str, Schema] = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
_FOREIGN = described("Fields of the request that are not known and had no effect.", list_of(TEXT))
_WARNINGS = described(f"{_FOREIGN['description']} {WARNINGS['description']}", list_of(TEXT))
CHAT_ANSWER = record(
    {
        **_ENVELOPE,
        "object": {"const": "chat.completion"},
        "choices": list_of(
            record(
                {
                    "index": COUNT,
                    "message": record(
                        {
                            "role": {"const": "assistant"},
                            "content": nullable(TEXT),
                            "refusal": NULL,
                            "reasoning_content": TEXT,
                            "tool_calls": list_of(_CALL),
                        },
                        "reasoning_content",
                        "tool_calls",
                    ),
                    "logprobs": nullable(_CHAT_LOGPROBS),
                    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                }
            )
        ),
        "usage": _USAGE,
        "warnings": _WARNINGS,
    },
    "warnings",
)
COMPLETION_ANSWER = record(
    {
        **_ENVELOPE,
        "object": {"const": "text_completion"},
        "choices": list_of(
            record({"index": COUNT, "text": TEXT, "logprobs": nullable(_COLUMNS), "finish_reason": _FINISH})
        ),
        "usage": _USAGE,
        "warnings": _WARNINGS,
    },
    "warnings",
)
EMBEDDING_ANSWER = record(
    {
        "object": {"const": "list"},
        "data": list_of(
            record(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT,
                    "embedding": {"anyOf": [list_of(_NUMBER), {"type": "string", "contentEncoding": "base64"}]},
                }
            )
        ),
        "model": TEXT,
        "usage": record({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        "warnings": _WARNINGS,
    },
    "warnings",
)
TOKENIZE_ANSWER = record(
    {"count": COUNT, "max_model_len": COUNT, "tokens": list_of(TOKEN_ID), "warnings": _FOREIGN}, "warnings"
)
DETOKENIZE_ANSWER = record({"prompt": TEXT, "warnings": _FOREIGN}, "warnings")
TOKENIZER_INFO = record(
    {
        "tokenizer_class": TEXT,
        "bos_token": nullable(TEXT),
        "eos_token": nullable(TEXT),
        "bos_token_id": nullable(TOKEN_ID),
        "eos_token_id": TOKEN_ID,
        "add_bos_token": BOOLEAN,
        "vocab_size": COUNT,
        "model_max_length": COUNT,
        "chat_template": nullable(TEXT),
        "tool_parser": nullable(TEXT),
    }
)
MODEL = record(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": nullable(TEXT),
        "max_model_len": COUNT,
    }
)
MODELS = record({"object": {"const": "list"}, "data": list_of(MODEL)})

# ---------------------------------------------------------------------- routes


@dataclass(frozen=True)
class ApiRoute:
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    answer: Schema
    body: Schema | None = None
    """None for a GET."""
    streams: bool = False
    path_parameters: tuple[str, ...] = ()
    method: str | None = None
    """Default: GET or POST."""


ROUTES = (
    ApiRoute("/v1/models", list_models, MODELS),
    ApiRoute("/v1/models/{model:path}", retrieve_model, MODEL, path_parameters=("model",)),
    ApiRoute("/v1/chat/completions", chat_completion, CHAT_ANSWER, CHAT_REQUEST, streams=True),
    ApiRoute("/v1/completions", completion, COMPLETION_ANSWER, COMPLETION_REQUEST, streams=True),
    ApiRoute("/v1/embeddings", embeddings, EMBEDDING_ANSWER, EMBEDDING_REQUEST),
    ApiRoute("/tokenize", tokenize, TOKENIZE_ANSWER, TOKENIZE_REQUEST),
    ApiRoute("/detokenize", detokenize, DETOKENIZE_ANSWER, DETOKENIZE_REQUEST),
    ApiRoute("/tokenizer_info", tokenizer_info, TOKENIZER_INFO),
)


def openai_routes() -> APIRouter:
    return api_routes("openai", ROUTES, refusals(*REFUSALS))


def api_routes(tag: str, routes: Sequence[ApiRoute], refused: Responses) -> APIRouter:
    router = APIRouter(tags=[tag], route_class=DirectRoute)
    for route in routes:
        method = route.method or ("GET" if route.body is None else "POST")
        router.add_api_route(
            route.path,
            route.endpoint,
            methods=[method],
            responses={**_answer(route), **refused},
            openapi_extra=_extra(route),
            response_model=None,
        )
        if method == "GET":
            router.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], response_model=None, include_in_schema=False
            )
    return router


def _answer(route: ApiRoute) -> Responses:
    content: dict[str, Any] = {"application/json": {"schema": route.answer}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": "The answer.", "content": content}}


def _extra(route: ApiRoute) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if route.body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    if route.path_parameters:
        extra["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.path_parameters
        ]
    return extra
