"""gRPC's own health service: serving from the moment the engine is warm until the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from kestrel.integrations.grpc.host import Host
from kestrel.integrations.grpc.protocol import INFERENCE, Behaviour, Message, Protocol

SERVICES = ("", INFERENCE)
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
WATCH_S = 0.25
"""How often a watched status is looked at."""


class HealthService:
    def __init__(self, protocol: Protocol, host: Host, closing: asyncio.Event) -> None:
        self._response = protocol.message("grpc.health.v1.HealthCheckResponse")
        self._host = host
        self._closing = closing

    def behaviours(self) -> dict[str, Behaviour]:
        return {"Check": self._check, "Watch": self._watch}

    async def _check(self, request: Message, context: grpc.aio.ServicerContext) -> Message:
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return self._response(status=self._status(request.service))

    async def _watch(self, request: Message, context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        told = None
        while not self._closing.is_set():
            status = self._status(request.service)
            if status != told:
                told = status
                yield self._response(status=status)
            await asyncio.sleep(WATCH_S)

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return SERVICE_UNKNOWN
        return SERVING if self._host.is_ready else NOT_SERVING
