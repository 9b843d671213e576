"""`/v1/models`, `/tokenize`, `/detokenize` and `/tokenizer_info`: the served model by all its names, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine.intake import MAX_CHARACTERS_PER_POSITION, require_readable, size_of
from kestrel.engine.served import ServedEngine
from kestrel.errors import RequestError, shown
from kestrel.server.calls import accept
from kestrel.server.errors import ModelNotFound
from kestrel.server.json_body import read_object
from kestrel.server.native import adapter_in, take_model
from kestrel.server.openai.chat import FIELDS, TEMPLATE_FIELDS, TOOL_FIELDS, PartReader, add_conversation
from kestrel.server.openai.generation import client_names, warned
from kestrel.server.openai.parameters import (
    REFUSED_IN_CHAT,
    REFUSED_IN_TOKENIZE,
    Body,
    EngineFields,
    ForeignFields,
    given,
    refuse,
)
from kestrel.server.responses import json_response
from kestrel.server.state import ServerState, state_of
from kestrel.settings import any_text, boolean, token_ids
from kestrel.skills.base import ModelProfile
from kestrel.tokens import TextToken

OWNER = "kestrel"
TOKEN_FIELDS = FIELDS | {"prompt", "tokens", *REFUSED_IN_TOKENIZE}
"""A whole chat may be sent to have its tokens counted."""


async def list_models(request: Request) -> Response:
    """The model under each of its names, the one that clients are told first; then each adapter behind that name."""
    state = state_of(request)
    engine = state.require_serving()
    names = dict.fromkeys((*state.config.served_model_names, engine.model_name))
    cards = [_model_card(state, name) for name in names]
    cards += [_adapter_card(state, listing.name) for listing in await engine.list_adapters()]
    return json_response({"object": "list", "data": cards})


async def retrieve_model(request: Request) -> Response:
    """One model by its name."""
    state, name = state_of(request), request.path_params["model"]
    state.require_serving()
    adapter = adapter_in(state, name)
    if adapter is None:
        return json_response(_model_card(state, name))
    listed = [listing.name for listing in await state.require_serving().list_adapters()]
    if adapter not in listed:
        raise ModelNotFound(f"model {shown(name)} is not listed here; see GET /v1/models")
    return json_response(_adapter_card(state, adapter))


def _adapter_card(state: ServerState, adapter: str) -> dict[str, Any]:
    parent = state.model_name or ""
    return {**_model_card(state, f"{parent}/{adapter}"), "parent": parent}


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    engine = state.require_serving()
    return {
        "id": name,
        "object": "model",
        "created": state.started_at_s,
        "owned_by": OWNER,
        "root": engine.model_name,
        "parent": None,
        "max_model_len": engine.max_model_length,
    }


# ---------------------------------------------------------------------- tokens


async def tokenize(request: Request) -> Response:
    """The ids of a prompt as `/v1/completions` would use it, or of messages as `/v1/chat/completions` would."""
    engine = state_of(request).require_serving()
    body = given(await read_object(request))
    take_model(state_of(request), body)
    refuse(body, REFUSED_IN_TOKENIZE)
    foreign = ForeignFields()
    foreign.note("", body, TOKEN_FIELDS)
    if "messages" in body:
        return await _chat_tokens(request, body, foreign)
    return await _text_tokens(engine, body, foreign)


async def _text_tokens(engine: ServedEngine, body: Body, foreign: ForeignFields) -> Response:
    if "prompt" not in body:
        raise RequestError("prompt", "is required: give some text, or messages in its place")
    for name in TEMPLATE_FIELDS:
        if name in body:
            raise RequestError(name, "can be used with messages only; leave it out")
    text = any_text("prompt", body["prompt"])
    require_readable(len(text), engine.max_model_length)
    bos = engine.profile.bos if boolean("add_special_tokens", body.get("add_special_tokens", True)) else None
    opening = [] if bos is None else [bos]
    return await _tokens(engine, lambda: [*opening, *_prompt_ids(engine.profile, text)], foreign)


async def _chat_tokens(request: Request, body: Body, foreign: ForeignFields) -> Response:
    if "prompt" in body:
        raise RequestError("prompt", "cannot be used together with messages; give one of them")
    if boolean("add_special_tokens", body.get("add_special_tokens", False)):
        raise RequestError("add_special_tokens", "cannot be used with messages, which have their own; leave it out")
    refuse(body, REFUSED_IN_CHAT)
    for name in TOOL_FIELDS:
        if name in body:
            raise RequestError(name, "is not counted here; leave it out: usage.prompt_tokens of a chat counts it")
    accepted, fields = accept(request), EngineFields()
    engine, profile = accepted.engine, accepted.engine.profile
    parts = PartReader(accepted, foreign, takes_images=False)
    await add_conversation(body, fields, parts, profile.chat)
    with client_names({**fields.names, "prompt": "messages"}):
        size = size_of(fields.values, engine.vocab_size, engine.max_model_length)
        require_readable(size.num_characters, engine.max_model_length)
        return await _tokens(engine, lambda: _written_ids(engine, fields.values), foreign)


async def _tokens(engine: ServedEngine, make_ids: Callable[[], list[int]], foreign: ForeignFields) -> Response:
    """Of long texts there are many: they are made and written off the event loop."""

    def answer() -> Response:
        ids = make_ids()
        counted = {"count": len(ids), "max_model_len": engine.max_model_length, "tokens": ids}
        return json_response({**counted, **warned(foreign.warnings)})

    return await engine.text_threads.run(answer)


def _written_ids(engine: ServedEngine, fields: Mapping[str, Any]) -> list[int]:
    skill, profile = engine.skills.get("chat"), engine.profile
    request = skill.parse({name: value for name, value in fields.items() if value is not None}, profile)
    return [item.id for item in skill.prompt(request, (), profile).items if isinstance(item, TextToken)]


def _prompt_ids(profile: ModelProfile, text: str) -> list[int]:
    """The ids of a text. Clients learn special ids by asking for their names, so a name all alone is its id."""
    for token_id in (profile.bos, *profile.stop_ids):
        if token_id is not None and text == profile.tokenizer.token_name(token_id):
            return [token_id]
    return profile.tokenizer.encode(text)


async def detokenize(request: Request) -> Response:
    """The text of ids; special ids have none."""
    engine = state_of(request).require_serving()
    body = given(await read_object(request))
    take_model(state_of(request), body)
    foreign = ForeignFields()
    foreign.note("", body, TOKEN_FIELDS)
    if "tokens" not in body:
        raise RequestError("tokens", "is required: give a list of token ids")
    most = engine.max_model_length * MAX_CHARACTERS_PER_POSITION
    if isinstance(body["tokens"], list) and len(body["tokens"]) > most:
        raise RequestError("tokens", f"has {len(body['tokens'])} ids; give at most {most}")
    prompt = await engine.text_threads.run(_text_of, engine, body["tokens"])
    return json_response({"prompt": prompt, **warned(foreign.warnings)})


def _text_of(engine: ServedEngine, tokens: object) -> str:
    ids = token_ids("tokens", tokens)
    for token_id in ids:
        if token_id >= engine.vocab_size:
            last = engine.vocab_size - 1
            raise RequestError("tokens", f"holds {shown(token_id)}, which is not an id; ids run from 0 to {last}")
    return engine.profile.tokenizer.decode(ids)


async def tokenizer_info(request: Request) -> Response:
    """Names and numbers of the tokenizer."""
    engine = state_of(request).require_serving()
    bos, end_id, name = engine.profile.bos, engine.profile.end_id, engine.profile.tokenizer.token_name
    chat = engine.profile.chat
    return json_response(
        {
            "tokenizer_class": "tokenizer.json",
            "bos_token": None if bos is None else name(bos),
            "eos_token": name(end_id),
            "bos_token_id": bos,
            "eos_token_id": end_id,
            "add_bos_token": bos is not None,
            "vocab_size": engine.vocab_size,
            "model_max_length": engine.max_model_length,
            "chat_template": None if chat is None else chat.template,
            "tool_parser": None if chat is None or chat.tools is None else chat.tools.name,
        }
    )
