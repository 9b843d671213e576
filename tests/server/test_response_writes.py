"""Head and body of an answer leave in one write; a head alone waits no longer than the event loop's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kestrel.server.connections import HeadWithBody

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
