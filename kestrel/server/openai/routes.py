"""The dialect's routes and their description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kestrel.server.middleware import DirectRoute
from kestrel.server.openai import schemas
from kestrel.server.openai.chat import chat_completion
from kestrel.server.openai.completions import completion
from kestrel.server.openai.embeddings import embeddings
from kestrel.server.openai.models import list_models, retrieve_model
from kestrel.server.openai.parameters import Schema
from kestrel.server.openai.tokenize import detokenize, tokenize, tokenizer_info
from kestrel.server.schemas import REFUSALS


@dataclass(frozen=True)
class DialectRoute:
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    answer: Schema
    body: Schema | None = None
    """None for a GET."""
    streams: bool = False
    path_parameters: tuple[str, ...] = ()


ROUTES = (
    DialectRoute("/v1/models", list_models, schemas.MODELS),
    DialectRoute("/v1/models/{model:path}", retrieve_model, schemas.MODEL, path_parameters=("model",)),
    DialectRoute("/v1/chat/completions", chat_completion, schemas.CHAT_ANSWER, schemas.CHAT_REQUEST, streams=True),
    DialectRoute("/v1/completions", completion, schemas.COMPLETION_ANSWER, schemas.COMPLETION_REQUEST, streams=True),
    DialectRoute("/v1/embeddings", embeddings, schemas.EMBEDDING_ANSWER, schemas.EMBEDDING_REQUEST),
    DialectRoute("/tokenize", tokenize, schemas.TOKENIZE_ANSWER, schemas.TOKENIZE_REQUEST),
    DialectRoute("/detokenize", detokenize, schemas.DETOKENIZE_ANSWER, schemas.DETOKENIZE_REQUEST),
    DialectRoute("/tokenizer_info", tokenizer_info, schemas.TOKENIZER_INFO),
)


def openai_routes() -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=DirectRoute)
    for route in ROUTES:
        router.add_api_route(
            route.path,
            route.endpoint,
            methods=["GET" if route.body is None else "POST"],
            responses=_responses(route),
            openapi_extra=_extra(route),
            response_model=None,
        )
        if route.body is None:
            router.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], response_model=None, include_in_schema=False
            )
    return router


def _responses(route: DialectRoute) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"application/json": {"schema": route.answer}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failures = {
        status: {"description": meaning, "content": {"application/json": {"schema": schemas.ERROR}}}
        for status, meaning in REFUSALS.items()
    }
    return {200: {"description": "The answer.", "content": content}, **failures}


def _extra(route: DialectRoute) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if route.body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    if route.path_parameters:
        extra["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.path_parameters
        ]
    return extra
