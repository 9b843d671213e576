"""An id on every response: the client's own where it is sane, else a fresh one."""

from __future__ import annotations

import random
import re

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kestrel.server.headers import header_of

HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NUMBERS = random.Random()
"""Seeded by the system once: to ask it for every request gives the interpreter away to the worker each time."""


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = sane_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def sane_id(scope: Scope) -> str:
    """The client's own id when it is a plain one, else a new one."""
    given = header_of(scope, HEADER.encode()) or ""
    return given if _SANE.fullmatch(given) else fresh_id()


def fresh_id() -> str:
    return f"{_NUMBERS.getrandbits(128):032x}"


def request_id_of(connection: HTTPConnection) -> str:
    return connection.scope["state"]["request_id"]
