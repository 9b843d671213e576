"""`POST /v1/embeddings`: a unit vector for each text, list of token ids, or group of parts with a picture."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult
from kestrel.errors import RequestError, shown
from kestrel.server.calls import accept, until_gone
from kestrel.server.json_body import read_object
from kestrel.server.native import take_model
from kestrel.server.openai.chat import PartReader
from kestrel.server.openai.generation import EngineWork, all_results, answering_model, warned
from kestrel.server.openai.parameters import (
    REFUSED_IN_EMBEDDINGS,
    UNUSED,
    Body,
    ForeignFields,
    given,
    refuse,
)
from kestrel.server.responses import listed_response
from kestrel.server.state import state_of
from kestrel.settings import is_number

MAX_INPUTS = 2048
FEW_INPUTS = 16
"""Vectors of so many inputs are written on the event loop."""
ENCODINGS = ("float", "base64")
ROUTED = ("priority", "cache_salt")
FIELDS = frozenset(
    (
        *("model", "input", "encoding_format", "dimensions", "adapter", "max_crops", *ROUTED),
        *(*UNUSED, *REFUSED_IN_EMBEDDINGS),
    )
)


async def embeddings(request: Request) -> Response:
    """Vectors of texts and pictures."""
    state = state_of(request)
    state.require_serving()
    body = given(await read_object(request))
    accepted = accept(request)
    refuse(body, REFUSED_IN_EMBEDDINGS)
    foreign = ForeignFields()
    foreign.note("", body, FIELDS)
    encoding = body.get("encoding_format", "float")
    if encoding not in ENCODINGS:
        raise RequestError("encoding_format", f"must be one of: {', '.join(ENCODINGS)} (got {shown(encoding)})")
    common = {name: body[name] for name in ("model", "adapter", *ROUTED) if name in body}
    take_model(state, common)
    fields = [{**common, **one} for one in await _inputs(body, PartReader(accepted, foreign))]
    if "max_crops" in body:  # of those with a picture; where there is none, it is refused
        for one in [one for one in fields if one.get("image") is not None] or fields:
            one["max_crops"] = body["max_crops"]
    names: dict[str, str] = dict.fromkeys(("text", "token_ids", "image", "prompt"), "input")
    work = EngineWork("embed", fields, names, many="input")

    def written(index: int, result: EngineResult) -> bytes:
        vector = result.output["embedding"]
        _require_dimensions(body, len(vector))
        return orjson.dumps({"object": "embedding", "index": index, "embedding": encoded(vector, encoding)})

    is_large = len(fields) > FEW_INPUTS
    with accepted.interruptible():
        finished = await until_gone(request.receive, all_results(request, work, written, is_large=is_large))
    num_tokens = sum(result.metrics.input_tokens for result, _ in finished)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    of_model = next((result.warnings for result, _ in finished if result.warnings), ())
    after = {"model": answering_model(request, work), "usage": usage, **warned([*of_model, *foreign.warnings])}
    vectors = (vector for _, vector in finished)
    return listed_response({"object": "list"}, "data", vectors, after, state.config.send_timeout_s)


def encoded(vector: Sequence[float], encoding: str) -> Any:
    """Base64 is of little-endian 32-bit floats."""
    if encoding == "float":
        return vector
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


async def _inputs(body: Body, parts: PartReader) -> list[dict[str, Any]]:
    """Fields of the embed skill for each input."""
    value = body.get("input")
    if value is None:
        raise RequestError("input", "is required: a text, token ids, or parts with a picture")
    if isinstance(value, str):
        return [{"text": value}]
    if not isinstance(value, list) or not value:
        raise RequestError("input", f"must be a text, token ids, parts, or a list of one of these (got {shown(value)})")
    if is_number(value[0]) or isinstance(value[0], Mapping):
        return [await _input("input", value, parts)]
    if len(value) > MAX_INPUTS:
        raise RequestError("input", f"has {len(value)} entries; give at most {MAX_INPUTS}")
    return [await _input(f"input[{index}]", one, parts) for index, one in enumerate(value)]


async def _input(name: str, value: Any, parts: PartReader) -> dict[str, Any]:
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, list) and value and is_number(value[0]):
        return {"token_ids": value}
    if not isinstance(value, list) or not value:
        raise RequestError(name, f"must be a text, a list of token ids or a list of parts (got {shown(value)})")
    read = await parts.read_all(name, value)
    images = [part["image"] for part in read if part["type"] == "image"]
    texts = [part["text"] for part in read if part["type"] == "text"]
    if len(images) > 1:
        raise RequestError(name, f"holds {len(images)} pictures; an embedding is of at most one")
    words = "\n".join(texts)
    return {"image": images[0] if images else None, "text": words if words.strip() or not images else None}


def _require_dimensions(body: Body, num_dimensions: int) -> None:
    """A shorter vector would need a model trained for it; this one puts meaning into all of them."""
    if body.get("dimensions", num_dimensions) != num_dimensions:
        raise RequestError("dimensions", f"must be {num_dimensions}, the model's own, or left out")
