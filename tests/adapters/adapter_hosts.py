"""Real HTTP servers on the loopback that play the hosted service and the host of its files, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]

PHRASES = {200: "OK", 302: "Found"}


def answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} {PHRASES.get(status, 'Other')}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def presigned(url: str) -> bytes:
    return answer(200, json.dumps({"url": url}).encode(), "Content-Type: application/json")


@dataclass
class Host:
    answers: dict[str, bytes | Answer] = field(default_factory=dict)
    """By path with query; what is not here is 404."""
    requests: list[dict[str, str]] = field(default_factory=list)
    """Headers of each request, with the path under ":path"."""
    port: int = 0
    open_connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, path: str) -> int:
        return sum(request[":path"] == path for request in self.requests)


@asynccontextmanager
async def host() -> AsyncIterator[Host]:
    seen = Host()
    closing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.open_connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split(" ")[1]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            seen.requests.append({":path": path, **headers})
            found = seen.answers.get(path, answer(404))
            if isinstance(found, bytes):
                writer.write(found)
                await writer.drain()
            else:
                # A client that leaves, or the end of the test, ends an answer that would never end by itself.
                parts = [asyncio.ensure_future(part) for part in (found(writer), reader.read(), closing.wait())]
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            seen.open_connections -= 1
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.port = server.sockets[0].getsockname()[1]
    try:
        yield seen
    finally:
        closing.set()
        server.close()
        while seen.open_connections:
            await asyncio.sleep(0.001)


def slow(body: bytes, before: asyncio.Event) -> Answer:
    """The head and half of the body at once, the rest after the event."""

    async def write(writer: asyncio.StreamWriter) -> None:
        whole = answer(200, body)
        half = len(whole) - len(body) // 2
        writer.write(whole[:half])
        await writer.drain()
        await before.wait()
        writer.write(whole[half:])
        await writer.drain()

    return write
