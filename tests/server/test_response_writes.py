"""Head and body of an answer leave in one write; a head alone waits no longer than the event loop's turn.

Pieces of a body without a length wait for a slow reader side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kestrel.server.protocol import HeadWithBody, UntilClose

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire(asyncio.Transport):
    """What leaves, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.writes.append(b"closed")

    def is_closing(self) -> bool:
        return False


def written(respond: Callable[[HeadWithBody], Awaitable[None]]) -> list[bytes]:
    async def run() -> list[bytes]:
        wire = Wire()
        await respond(HeadWithBody(wire, asyncio.get_running_loop()))
        return wire.writes

    return asyncio.run(run())


def test_head_and_body_are_one_write_and_later_data_leaves_at_once() -> None:
    async def respond(out: HeadWithBody) -> None:
        out.write(HEAD)
        out.write(b"body")
        out.write(b"end")

    assert written(respond) == [HEAD + b"body", b"end"]


def test_a_head_without_a_body_leaves_with_the_turn() -> None:
    async def respond(out: HeadWithBody) -> None:
        out.write(HEAD)
        await asyncio.sleep(0)
        out.write(b"event")

    assert written(respond) == [HEAD, b"event"]


def test_a_head_leaves_before_the_connection_closes() -> None:
    async def respond(out: HeadWithBody) -> None:
        out.write(HEAD)
        out.close()
        await asyncio.sleep(0)

    assert written(respond) == [HEAD, b"closed"]


def exchange(wire: Wire) -> RequestResponseCycle:
    """One request of HTTP/1.0, as uvicorn answers it."""
    return RequestResponseCycle(
        scope=cast(Any, {"type": "http", "method": "GET", "http_version": "1.0"}),
        transport=wire,
        flow=FlowControl(wire),
        logger=logging.getLogger("exchange"),
        access_logger=logging.getLogger("exchange"),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=False,
        on_response=lambda: None,
    )


def test_an_event_and_a_ping_of_http_1_0_wait_for_a_slow_reader_side_by_side() -> None:
    async def run() -> list[bytes]:
        wire = Wire()
        cycle = exchange(wire)
        out = UntilClose(cycle)
        await out.send({"type": "http.response.start", "status": 200, "headers": []})
        cycle.flow.pause_writing()
        pieces = (b"data: a long event\n\n", b": ping\n\n")
        bodies = [{"type": "http.response.body", "body": piece, "more_body": True} for piece in pieces]
        sending = [asyncio.ensure_future(out.send(body)) for body in bodies]
        await asyncio.sleep(0)
        assert len(wire.writes) == 1
        cycle.flow.resume_writing()
        await asyncio.gather(*sending)
        await out.send({"type": "http.response.body", "body": b"", "more_body": False})
        return wire.writes[1:]

    assert asyncio.run(run()) == [b"data: a long event\n\n", b": ping\n\n", b"", b"closed"]
