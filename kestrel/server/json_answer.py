"""Answers as JSON. A large one leaves in pieces, as the client reads it: at once it would be copied as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kestrel.server.connections import hang_up

PIECE_BYTES = 2**18


def json_response(body: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def listed_response(
    before: Mapping[str, Any], name: str, entries: Iterable[bytes], after: Mapping[str, Any], timeout_s: float
) -> Response:
    """One object: the fields before, a list of entries that are JSON already, the fields after."""
    head = orjson.dumps({**before, name: []}).removesuffix(b"]}")
    tail = b"]," + orjson.dumps(after).removeprefix(b"{")
    commas = chain.from_iterable((b",", entry) for entry in entries)
    next(commas, None)
    parts = [head, *commas, tail]
    if sum(map(len, parts)) <= PIECE_BYTES:
        return Response(b"".join(parts), media_type="application/json")
    return InPieces(parts, timeout_s)


class InPieces(Response):
    """Hangs up on a client that has not read it within `timeout_s`."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], timeout_s: float) -> None:
        super().__init__()
        self._parts = parts
        self._timeout_s = timeout_s
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timer = asyncio.get_running_loop().call_later(self._timeout_s, hang_up, scope)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in _pieces(self._parts):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            timer.cancel()


def _pieces(parts: Iterable[bytes]) -> Iterable[bytes]:
    """Small parts together, large ones cut."""
    waiting = bytearray()
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            waiting += part[at : at + PIECE_BYTES]
            if len(waiting) >= PIECE_BYTES:
                yield bytes(waiting)
                waiting.clear()
    yield bytes(waiting)
