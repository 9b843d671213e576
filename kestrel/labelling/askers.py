"""Who answers: an engine of this process, or a server. Both give the same answers and refuse with the same errors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from kestrel.engine.patient import PatientEngine
from kestrel.labelling.endpoint import Endpoint

ENDPOINT_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Answer:
    output: Mapping[str, Any]
    input_tokens: int
    output_tokens: int


class Asker(Protocol):
    @property
    def num_requests(self) -> int:
        """Pictures to ask about at the same time."""
        ...

    async def ask(self, skill: str, image: bytes, fields: Mapping[str, Any]) -> Answer: ...


OpenAsker = Callable[[], AbstractAsyncContextManager[Asker]]
"""Called when there is something to ask: a job that is done needs no model."""


class EngineAsker(PatientEngine):
    """An engine of this process."""

    async def ask(self, skill: str, image: bytes, fields: Mapping[str, Any]) -> Answer:
        result = await self.run(skill, image=image, **fields)
        return Answer(result.output, result.metrics.input_tokens, result.metrics.output_tokens)


class EndpointAsker:
    """A server, through its native routes."""

    def __init__(self, endpoint: Endpoint, num_requests: int = ENDPOINT_REQUESTS) -> None:
        self._endpoint = endpoint
        self.num_requests = num_requests

    async def ask(self, skill: str, image: bytes, fields: Mapping[str, Any]) -> Answer:
        body = await asyncio.to_thread(_body, image, fields)
        output = await self._endpoint.post(f"/v1/{skill}", body)
        metrics = output["metrics"]
        return Answer(output, metrics["input_tokens"], metrics["output_tokens"])


def _body(image: bytes, fields: Mapping[str, Any]) -> bytes:
    return orjson.dumps({**fields, "image_url": base64.b64encode(image).decode("ascii")})
