"""gRPC's own health service: serving from the moment the engine is warm until the server drains."""

from __future__ import annotations

import asyncio

from kestrel.errors import ModelNotFound, shown
from kestrel.integrations.grpc.calls import Call, Method, ReaderStalled, in_time, parsed
from kestrel.integrations.grpc.host import Host
from kestrel.integrations.grpc.places import Places
from kestrel.integrations.grpc.protocol import INFERENCE, Message, Protocol

SERVICES = ("", INFERENCE)
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
WATCHES, WATCHES_PER_ADDRESS = 64, 8
WATCH_S = 0.25
"""How often a watched status is looked at, once for all who watch."""


class HealthService:
    def __init__(self, protocol: Protocol, host: Host, closing: asyncio.Event) -> None:
        self._request = protocol.message("grpc.health.v1.HealthCheckRequest")
        self._response = protocol.message("grpc.health.v1.HealthCheckResponse")
        self._host = host
        self._closing = closing
        self._watches = Places("watches", "end some, or call Check", per_client=WATCHES_PER_ADDRESS, in_all=WATCHES)
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def methods(self) -> dict[str, Method]:
        return {"Check": Method(self._check, needs_key=False), "Watch": Method(self._watch, needs_key=False)}

    async def _check(self, call: Call) -> Message:
        request = parsed(self._request, (await call.receive()).take())
        if request.service not in SERVICES:
            raise ModelNotFound(f"there is no service {shown(request.service)}; ask for {INFERENCE!r} or leave it out")
        return self._response(status=self._status(request.service))

    async def _watch(self, call: Call) -> None:
        request = parsed(self._request, (await call.receive()).take())
        self._watches.take(call.address)
        try:
            told = None
            while not self._closing.is_set():
                status = self._status(request.service)
                if status != told:
                    told = status
                    await self._write(call, status)
                else:
                    await self._next_change()
        finally:
            self._watches.give_back(call.address)

    async def _write(self, call: Call, status: int) -> None:
        seconds = self._host.receive_timeout_s
        unread = ReaderStalled(f"the status was not read within {seconds:g} s (receive_timeout_s); read it")
        with in_time(self._host, seconds, unread):
            await call.write(self._response(status=status))

    async def _next_change(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(self._host.is_ready))
        await self._changed.wait()

    async def _look(self, ready: bool) -> None:
        """Until the server closes, or nobody watches."""
        while not self._closing.is_set() and self._watches.num_taken:
            await asyncio.sleep(WATCH_S)
            if self._host.is_ready != ready:
                ready = self._host.is_ready
                self._tell()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return SERVICE_UNKNOWN
        return SERVING if self._host.is_ready else NOT_SERVING
