"""`GET /v1/models`: what is served, by every name it may be asked for."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kestrel.errors import shown
from kestrel.server.errors import ModelNotFound
from kestrel.server.native import adapter_in
from kestrel.server.responses import json_response
from kestrel.server.state import ServerState, state_of

OWNER = "kestrel"


async def list_models(request: Request) -> Response:
    """The model under each of its names, the one that clients are told first; then each adapter behind that name."""
    state = state_of(request)
    engine = state.require_serving()
    names = dict.fromkeys(name for name in (state.model_name, engine.model_name) if name is not None)
    cards = [model_card(state, name) for name in names]
    cards += [adapter_card(state, listing.name) for listing in await engine.list_adapters()]
    return json_response({"object": "list", "data": cards})


async def retrieve_model(request: Request) -> Response:
    """One model by its name."""
    state, name = state_of(request), request.path_params["model"]
    state.require_serving()
    adapter = adapter_in(state, name)
    if adapter is None:
        return json_response(model_card(state, name))
    listed = [listing.name for listing in await state.require_serving().list_adapters()]
    if adapter not in listed:
        raise ModelNotFound(f"model {shown(name)} is not listed here; see GET /v1/models")
    return json_response(adapter_card(state, adapter))


def adapter_card(state: ServerState, adapter: str) -> dict[str, Any]:
    parent = state.model_name or ""
    return {**model_card(state, f"{parent}/{adapter}"), "parent": parent}


def model_card(state: ServerState, name: str) -> dict[str, Any]:
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
