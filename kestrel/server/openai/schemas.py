"""JSON schemas of the dialect's bodies, for the API description. What a parameter may be is said beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kestrel.server.openai import chat, completions
from kestrel.server.openai.embeddings import ENCODINGS, MAX_INPUTS
from kestrel.server.openai.messages import MAX_MESSAGES
from kestrel.server.openai.parameters import (
    BOOLEAN,
    MAX_CHOICES,
    PRIORITY,
    SAMPLING,
    TEXT,
    TOP_LOGPROBS,
    Parameter,
    Schema,
    integer_schema,
    number_schema,
)

COUNT = integer_schema(0, 2**53)
TOKEN_ID = integer_schema(0, 2**31 - 1)


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def record(properties: Mapping[str, Schema], optional: Sequence[str] = ()) -> Schema:
    """An object whose fields are always there, except the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def body(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """A request: null means not given, and further fields are ignored."""
    properties = {**required, **{name: nullable(schema) for name, schema in optional.items()}}
    return {"type": "object", "properties": properties, "required": list(required)}


def _parameters(parameters: Sequence[Parameter]) -> dict[str, Schema]:
    return {parameter.name: parameter.schema for parameter in parameters}


# ---------------------------------------------------------------------- requests

_IMAGE: Schema = {"anyOf": [TEXT, record({"url": TEXT, "detail": {}}, optional=["detail"])]}
PART: Schema = {
    "oneOf": [
        record({"type": {"const": "text"}, "text": TEXT}),
        record({"type": {"const": "image_url"}, "image_url": _IMAGE}),
    ]
}
_MESSAGE = record(
    {"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": {"anyOf": [TEXT, array(PART)]}}
)
_STREAM_OPTIONS = body({}, {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN})
_COMMON: Mapping[str, Schema] = {
    "model": {"type": "string", "description": "The model's name, or name/adapter. Default: the one served."},
    "n": integer_schema(1, MAX_CHOICES),
    "stream": BOOLEAN,
    "stream_options": _STREAM_OPTIONS,
    "user": {"description": "Taken and not used."},
}
CHAT_REQUEST = body(
    {"messages": array(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES)},
    {
        **_COMMON,
        **_parameters((*chat.BOUNDS, *SAMPLING)),
        "logprobs": BOOLEAN,
        "top_logprobs": TOP_LOGPROBS,
        "reasoning": {"anyOf": [BOOLEAN, body({}, {"effort": {"enum": list(chat.EFFORTS)}, "enabled": BOOLEAN})]},
        "reasoning_effort": {"enum": list(chat.EFFORTS)},
        "include_reasoning": BOOLEAN,
    },
)
_IDS = array(TOKEN_ID, minItems=1)
_TEXT_OR_IDS: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}
COMPLETION_REQUEST = body(
    {
        "prompt": {
            "anyOf": [
                _TEXT_OR_IDS,
                array({"type": "string", "minLength": 1}, minItems=1, maxItems=completions.MAX_PROMPTS),
                array(_IDS, minItems=1, maxItems=completions.MAX_PROMPTS),
            ]
        }
    },
    {
        **_COMMON,
        **_parameters((*completions.BOUNDS, *SAMPLING)),
        "echo": BOOLEAN,
        "logprobs": TOP_LOGPROBS,
        "best_of": {"type": "integer", "description": "Must equal `n`."},
    },
)
EMBEDDING_REQUEST = body(
    {
        "input": {
            "anyOf": [
                _TEXT_OR_IDS,
                array(PART, minItems=1),
                array({"anyOf": [_TEXT_OR_IDS, array(PART, minItems=1)]}, minItems=1, maxItems=MAX_INPUTS),
            ]
        }
    },
    {
        "model": _COMMON["model"],
        "encoding_format": {"enum": list(ENCODINGS)},
        "dimensions": {"type": "integer", "description": "Must be the model's own number."},
        "priority": PRIORITY,
        "user": _COMMON["user"],
    },
)
TOKENIZE_REQUEST = body({"prompt": TEXT}, {"model": _COMMON["model"], "add_special_tokens": BOOLEAN})
DETOKENIZE_REQUEST = body({"tokens": array(TOKEN_ID)}, {"model": _COMMON["model"]})

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
_CHAT_TOKEN = {"token": TEXT, "bytes": nullable(array(integer_schema(0, 255))), "logprob": _NUMBER}
_CHAT_LOGPROBS = record(
    {"content": array(record({**_CHAT_TOKEN, "top_logprobs": array(record(_CHAT_TOKEN))})), "refusal": {"type": "null"}}
)
_COLUMNS = record(
    {
        "tokens": array(TEXT),
        "token_logprobs": array(nullable(_NUMBER)),
        "top_logprobs": array(nullable({"type": "object", "additionalProperties": number_schema(-1e30, 0)})),
        "text_offset": array(COUNT),
    }
)
_FINISH: Schema = {"enum": ["stop", "length"]}
_ENVELOPE: Mapping[str, Schema] = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
CHAT_ANSWER = record(
    {
        **_ENVELOPE,
        "object": {"const": "chat.completion"},
        "choices": array(
            record(
                {
                    "index": COUNT,
                    "message": record(
                        {
                            "role": {"const": "assistant"},
                            "content": TEXT,
                            "refusal": {"type": "null"},
                            "reasoning_content": TEXT,
                        },
                        optional=["reasoning_content"],
                    ),
                    "logprobs": nullable(_CHAT_LOGPROBS),
                    "finish_reason": _FINISH,
                }
            )
        ),
        "usage": _USAGE,
    }
)
COMPLETION_ANSWER = record(
    {
        **_ENVELOPE,
        "object": {"const": "text_completion"},
        "choices": array(
            record({"index": COUNT, "text": TEXT, "logprobs": nullable(_COLUMNS), "finish_reason": _FINISH})
        ),
        "usage": _USAGE,
    }
)
EMBEDDING_ANSWER = record(
    {
        "object": {"const": "list"},
        "data": array(
            record(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT,
                    "embedding": {"anyOf": [array(_NUMBER), {"type": "string", "contentEncoding": "base64"}]},
                }
            )
        ),
        "model": TEXT,
        "usage": record({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }
)
TOKENIZE_ANSWER = record({"count": COUNT, "max_model_len": COUNT, "tokens": array(TOKEN_ID)})
DETOKENIZE_ANSWER = record({"prompt": TEXT})
TOKENIZER_INFO = record(
    {
        "tokenizer_class": TEXT,
        "bos_token": nullable(TEXT),
        "eos_token": nullable(TEXT),
        "bos_token_id": TOKEN_ID,
        "eos_token_id": TOKEN_ID,
        "add_bos_token": BOOLEAN,
        "vocab_size": COUNT,
        "model_max_length": COUNT,
        "chat_template": nullable(TEXT),
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
MODELS = record({"object": {"const": "list"}, "data": array(MODEL)})
ERROR = record({"error": record({"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)})})
