"""What chat and text completions share: engine fields from a body, a choice per engine request, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kestrel import __version__
from kestrel.engine import EngineResult
from kestrel.server.calls import accept, until_gone
from kestrel.server.native import take_model
from kestrel.server.openai.engine_work import EngineWork, all_results, answering_model
from kestrel.server.openai.parameters import (
    SAMPLING,
    Body,
    EngineFields,
    Parameter,
    StreamWish,
    derived_seed,
    take_settings,
)
from kestrel.server.openai.stream import ChoiceShape, stream_response
from kestrel.server.openai.usage import PromptShare, usage_of
from kestrel.server.records import request_id_of
from kestrel.server.responses import listed_response
from kestrel.server.state import ServerState, state_of


class Shape(ChoiceShape, Protocol):
    """How one kind of generation looks."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, result: EngineResult) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Generation:
    """Everything a body asks for."""

    work: EngineWork
    shape: Shape
    wish: StreamWish
    share: PromptShare
    is_large: bool
    """Whether making the choices takes too long for the event loop."""


async def generation_response(request: Request, asked: Generation) -> Response:
    shape = asked.shape
    envelope = {
        "id": f"{shape.id_prefix}-{request_id_of(request)}",
        "object": shape.chunk_object if asked.wish.stream else shape.object,
        "created": int(time.time()),
        "model": answering_model(request, asked.work),
        "system_fingerprint": f"kestrel-{__version__}",
    }
    if asked.wish.stream:
        return stream_response(request, asked.work, envelope, shape, asked.wish, asked.share)

    def written(index: int, result: EngineResult) -> bytes:
        return orjson.dumps(shape.choice(index, result))

    with accept(request).interruptible():
        results = all_results(request, asked.work, written, is_large=asked.is_large)
        finished = await until_gone(request.receive, results)
    usage = usage_of([result for result, _ in finished], asked.share)
    timeout_s = state_of(request).config.send_timeout_s
    return listed_response(envelope, "choices", (choice for _, choice in finished), {"usage": usage}, timeout_s)


def sampling_fields(
    state: ServerState, body: Body, bounds: Sequence[Parameter], default_max: int | None
) -> EngineFields:
    """The settings of a body. `bounds` are the dialect's names of `max_tokens`."""
    fields = EngineFields()
    take_settings(body, (*bounds, *SAMPLING), fields)
    named = {name: body[name] for name in ("model", "adapter") if name in body}
    take_model(state, named)
    fields.values |= named
    default_max = state.config.default_max_new_tokens or default_max
    if default_max is not None:
        fields.values.setdefault("max_tokens", max(default_max, _least_tokens(fields)))
    return fields


def _least_tokens(fields: EngineFields) -> int:
    """What `min_tokens` asks for: a bound that the client did not set must not contradict it."""
    least = fields.values.get("min_tokens", 0)
    return least if isinstance(least, int) else 0


def one_per_choice(fields: Mapping[str, Any], num_choices: int) -> list[dict[str, Any]]:
    """The same request for each choice; a given seed gives each one of its own."""
    seed = fields.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        return [dict(fields) for _ in range(num_choices)]
    first = dict(fields)
    return [first, *({**fields, "seed": derived_seed(seed, choice)} for choice in range(1, num_choices))]
