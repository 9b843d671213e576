"""The native skills, `POST /v1/{skill}`: one handler for all of them, driven by a table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult, EngineStream
from kestrel.engine.streams import chunk_body
from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.server.calls import AcceptedRequest, accept, engine_call, request_info, until_gone
from kestrel.server.config import ServerConfig
from kestrel.server.errors import ModelNotFound
from kestrel.server.forms import form_schema, read_form
from kestrel.server.json_body import FORM, is_form, read_object
from kestrel.server.middleware import DirectRoute
from kestrel.server.request_images import image_bytes
from kestrel.server.responses import EventStream, event, json_response
from kestrel.server.schemas import (
    PICTURE,
    REFS,
    RESPONSE_FORMAT,
    Schema,
    body_schema,
    described,
    names,
    skill_responses,
    text,
)
from kestrel.server.state import RequestInfo, ServerState, state_of
from kestrel.settings import CAPTION_LENGTHS, INSTANCES, ROUTING, SETTINGS, boolean

PUBLISHER = "moondream/"
"""Clients of the hosted service may put it before a model's name."""


@dataclass(frozen=True)
class NativeSkill:
    name: str
    fields: Mapping[str, Schema]
    """Its own fields, for the API description; the skill itself checks them."""
    required: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a field left out means over HTTP, where that differs from the engine."""
    counts_tokens: bool = True
    """Whether `max_tokens` bounds it."""
    streams_text: bool = False

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Of a request's body."""
        bound = "max_tokens" if self.counts_tokens else "max_objects"
        return body_schema(self.fields, self.required, bound, in_words=self.streams_text)

    @cached_property
    def form_schema(self) -> dict[str, Any]:
        """Of the same as a form."""
        return form_schema(self.schema)


# Clients of the hosted service leave `reasoning` out when it is false, so false is what its absence means here.
NATIVE_SKILLS = (
    NativeSkill(
        "query",
        {
            "question": text("What to answer.", "What is this?"),
            "image_url": PICTURE,
            "reasoning": described("Think first.", {"type": "boolean"}),
            "spatial_refs": described("Points and boxes the question talks about.", REFS),
            "response_format": RESPONSE_FORMAT,
        },
        required=("question",),
        defaults={"reasoning": False},
        streams_text=True,
    ),
    NativeSkill(
        "caption",
        {"image_url": PICTURE, "length": described("How much to say.", {"enum": list(CAPTION_LENGTHS)})},
        required=("image_url",),
        streams_text=True,
    ),
    NativeSkill(
        "point",
        {
            "image_url": PICTURE,
            "object": names("What to point at.", "cow"),
            "max_points": described("Another name for `max_objects`.", SETTINGS["max_objects"].kind.schema),
            "spatial_refs": described("Points and boxes the object is near to.", REFS),
        },
        required=("image_url", "object"),
        counts_tokens=False,
    ),
    NativeSkill(
        "detect",
        {"image_url": PICTURE, "object": names("What to box.", "cow")},
        required=("image_url", "object"),
        counts_tokens=False,
    ),
    NativeSkill(
        "segment",
        {
            "image_url": PICTURE,
            "object": names("What to outline.", "cow"),
            "spatial_refs": described("Points and boxes that say which one.", REFS),
            "instances": described("Outline one, or look for all of them first.", {"enum": list(INSTANCES)}),
        },
        required=("image_url", "object"),
    ),
)


def native_routes() -> APIRouter:
    router = APIRouter(tags=["skills"], route_class=DirectRoute)
    for skill in NATIVE_SKILLS:
        router.add_api_route(
            f"/v1/{skill.name}",
            _handler(skill),
            methods=["POST"],
            name=skill.name,
            responses=skill_responses(skill.name),
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": skill.schema}, FORM: {"schema": skill.form_schema}},
                }
            },
            response_model=None,
        )
    return router


def _handler(skill: NativeSkill) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        state_of(request).require_serving()
        sends_form = is_form(request.scope)
        known = (skill.form_schema if sends_form else skill.schema)["properties"]
        body = await (read_form(request, known) if sends_form else read_object(request))
        accepted = accept(request)
        wants_stream = _take_flag(body, "stream")
        fields = await _engine_fields(accepted, skill, body, known)
        adapter, request_id = fields.get("adapter"), fields.pop("request_id", None)
        if request_id is not None:
            ROUTING["request_id"].kind("request_id", request_id)
        info = request_info(
            request,
            skill.name,
            stream=wants_stream,
            request_id=request_id,
            adapter=adapter if isinstance(adapter, str) else None,
        )
        if wants_stream:
            return _stream(request, skill, info, fields)
        with accepted.interruptible():
            result = await until_gone(request.receive, _result(request, info, fields))
        return json_response(result.body())

    return handle


async def _result(request: Request, info: RequestInfo, fields: dict[str, Any]) -> EngineResult:
    async with _native_call(request, info, fields) as stream:
        return await stream.result()


def _stream(request: Request, skill: NativeSkill, info: RequestInfo, fields: dict[str, Any]) -> Response:
    def events(stream: EngineStream) -> AsyncIterator[bytes]:
        return _stream_events(stream, "chunk" if skill.streams_text else "type")

    return EventStream(_native_call(request, info, fields), events, state_of(request).config)


@asynccontextmanager
async def _native_call(request: Request, info: RequestInfo, fields: dict[str, Any]) -> AsyncIterator[EngineStream]:
    """An engine call whose refusals name the picture as the client did."""
    try:
        async with engine_call(request, info, fields) as stream:
            yield stream
    except RequestError as error:
        if error.field != "image" or is_form(request.scope):
            raise
        raise RequestError("image_url", str(error).removeprefix("image: ")) from error


# ---------------------------------------------------------------------- what goes in


async def _engine_fields(
    accepted: AcceptedRequest, skill: NativeSkill, body: Mapping[str, Any], known: Mapping[str, Schema]
) -> dict[str, Any]:
    """The engine's fields for a body: null means not given, the picture is bytes, the rest as it came."""
    fields = {name: value for name, value in body.items() if value is not None}
    for name in fields:
        if name not in known:
            close = did_you_mean(name, known)
            raise RequestError(name, f"is not a field of {skill.name}; known fields: {', '.join(sorted(known))}{close}")
    take_model(accepted.state, fields)
    for name, value in skill.defaults.items():
        fields.setdefault(name, value)
    if skill.counts_tokens:
        fields = with_default_budget(fields, accepted.state.config)
    if "image_url" in fields:
        max_bytes, threads = accepted.engine.config.max_image_bytes, accepted.state.body_threads
        fields["image"] = await image_bytes(fields.pop("image_url"), max_bytes, accepted.fetch, threads)
    return fields


def _take_flag(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, None)
    return value is not None and boolean(name, value)


def take_model(state: ServerState, fields: dict[str, Any]) -> None:
    """Takes out `model`, which may name an adapter after a slash."""
    name = fields.pop("model", None)
    if name is None:
        return
    if not isinstance(name, str):
        raise RequestError("model", f"must be the model's name (got {shown(name)})")
    adapter = adapter_in(state, name)
    if adapter is None:
        return
    given = fields.setdefault("adapter", adapter)
    if given != adapter:
        raise RequestError("adapter", f"is {shown(given)}, but the model names {shown(adapter)}; give one of them")


def adapter_in(state: ServerState, name: str) -> str | None:
    """The adapter that a model's name asks for, None for the model itself. Raises ModelNotFound for other models."""
    known = [*state.config.served_model_names, state.require_serving().model_name]
    for served in known:
        for spelled in (served, f"{PUBLISHER}{served}"):
            if name == spelled:
                return None
            if name.startswith(f"{spelled}/"):
                return name.removeprefix(f"{spelled}/")
    close = did_you_mean(name, known)
    config = state.require_serving().config
    has_adapters = config.adapter_dir is not None or config.adapter_url_template is not None
    use = f"use {state.model_name!r}{f' ({state.model_name}/NAME for an adapter)' if has_adapters else ''}"
    raise ModelNotFound(f"model {shown(name)} is not served here; {use} or leave it out{close}")


def with_default_budget(fields: dict[str, Any], config: ServerConfig) -> dict[str, Any]:
    """The fields of a skill that counts tokens, with the server's own bound where they have none."""
    if config.default_max_new_tokens is None or _bounds_tokens(fields):
        return fields
    return {**fields, "max_new_tokens": config.default_max_new_tokens}


def _bounds_tokens(fields: Mapping[str, Any]) -> bool:
    settings = fields.get("settings")
    places = (fields, settings if isinstance(settings, Mapping) else {})
    return any(place.get(name) is not None for place in places for name in SETTINGS["max_tokens"].names)


# ---------------------------------------------------------------------- what comes out


async def _stream_events(stream: EngineStream, style: str) -> AsyncIterator[bytes]:
    """Every piece as it comes, then the whole result."""
    async for chunk in stream:
        yield event(chunk_body(chunk))
    opening = {"chunk": ""} if style == "chunk" else {"type": "final"}
    yield event({**opening, "completed": True, **(await stream.result()).body()})
