"""What a server tells programs of itself and its model: `/server_info`, `/model_info`. No path, address or key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kestrel import __version__
from kestrel.engine.served import ServedEngine
from kestrel.server.openai.chat import MAX_IMAGES
from kestrel.server.responses import json_response
from kestrel.server.schemas import COUNT, Schema, described, list_of, nullable, record, refusals
from kestrel.server.state import STALLED, Phase, state_of
from kestrel.skills.template_chat import THINKING_SWITCH

SKILL_TEMPLATES = {
    "query": "query",
    "caption": "caption.normal",
    "point": "point",
    "detect": "detect",
    "segment": "segment",
}
"""Skills of pictures, and the template without which a model does not know each."""
SKILLS = (*SKILL_TEMPLATES, "chat", "complete", "embed")
SERVER_LIMITS = (
    "max_body_bytes",
    "max_header_bytes",
    "max_logprobs",
    "max_requests_per_client",
    "max_stored_responses",
    "default_max_new_tokens",
    "receive_timeout_s",
    "queue_timeout_s",
    "request_timeout_s",
)
"""Of the server's configuration, those that a client can meet."""
ENGINE_LIMITS = ("max_queue_size", "max_image_bytes", "max_image_pixels")


async def server_info(request: Request) -> Response:
    """The program, its state and its limits."""
    state = state_of(request)
    limits = {name: getattr(state.config, name) for name in SERVER_LIMITS}
    if state.engine is not None:
        limits |= {name: getattr(state.engine.config, name) for name in ENGINE_LIMITS}
        limits |= {"max_model_len": state.engine.max_model_length, "max_batch_size": state.engine.max_batch_size}
    return json_response(
        {
            "version": __version__,
            "status": state.status,
            "model": state.model_name,
            "served_model_name": state.model_name,
            "started_at": state.started_at_s,
            "needs_key": state.config.has_keys,
            "limits": {**limits, "max_images": MAX_IMAGES},
        }
    )


async def model_info(request: Request) -> Response:
    """The model: what it can do, and how much it reads."""
    state = state_of(request)
    return json_response({"model": state.model_name, **model_facts(state.require_serving())})


def model_facts(engine: ServedEngine) -> dict[str, Any]:
    profile, chat = engine.profile, engine.profile.chat
    skills = [skill for skill, template in SKILL_TEMPLATES.items() if template in profile.templates]
    template = "" if chat is None else chat.template or ""
    return {
        "root": engine.model_name,
        "revision": engine.config.revision,
        "skills": [*skills, *(("chat",) if chat is not None else ()), "complete", "embed"],
        "reads_pictures": profile.has_vision,
        "can_reason": bool(profile.reasoning_opener) or THINKING_SWITCH in template,
        "tool_parser": None if chat is None or chat.tools is None else chat.tools.name,
        "max_model_len": engine.max_model_length,
        "image_tokens": engine.num_image_positions if profile.has_vision else 0,
        "vocab_size": engine.vocab_size,
        "defaults": {
            "temperature": profile.defaults.temperature,
            "top_p": profile.defaults.top_p,
            "max_tokens": profile.defaults.max_new_tokens,
        },
    }


# ---------------------------------------------------------------------- routes

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_MODEL_LIMITS = ("max_model_len", "max_batch_size")
_LIMITS = {
    "type": "object",
    "properties": {name: nullable(_NUMBER) for name in (*SERVER_LIMITS, *ENGINE_LIMITS, *_MODEL_LIMITS, "max_images")},
}
SERVER_INFO = record(
    {
        "version": _TEXT,
        "status": {"enum": [*(phase.value for phase in Phase), STALLED]},
        "model": nullable(_TEXT),
        "served_model_name": described("As model, by the name that sglang-router reads.", nullable(_TEXT)),
        "started_at": described("In seconds since 1970.", COUNT),
        "needs_key": _BOOLEAN,
        "limits": described("Null is no limit, or the model's own.", _LIMITS),
    }
)
MODEL_INFO = record(
    {
        "model": described("The name that answers show.", _TEXT),
        "root": described("The model's own name.", _TEXT),
        "revision": described("As it was configured; null: the one of this release, or files.", nullable(_TEXT)),
        "skills": list_of({"enum": list(SKILLS)}),
        "reads_pictures": _BOOLEAN,
        "can_reason": _BOOLEAN,
        "tool_parser": described("How it calls tools, if it does.", nullable(_TEXT)),
        "max_model_len": described("Tokens of a prompt with its answer.", COUNT),
        "image_tokens": described("Positions that a picture takes.", COUNT),
        "vocab_size": COUNT,
        "defaults": record({"temperature": _NUMBER, "top_p": _NUMBER, "max_tokens": COUNT}),
    }
)


def fact_routes() -> APIRouter:
    router = APIRouter(tags=["operations"])
    for path, endpoint, schema, refused in (
        ("/server_info", server_info, SERVER_INFO, refusals(401, 429)),
        ("/model_info", model_info, MODEL_INFO, refusals(401, 429, 503)),
    ):
        answer = {"description": "The facts.", "content": {"application/json": {"schema": schema}}}
        router.add_api_route(path, endpoint, methods=["GET"], responses={200: answer, **refused}, response_model=None)
        router.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    return router
