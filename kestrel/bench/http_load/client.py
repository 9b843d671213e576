"""A small HTTP/1.1 client on asyncio streams, and what became of a request.

What a load generator spends on itself is lost to the measurement.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kestrel.errors import ConfigError, shown

MAX_HEAD_BYTES = 2**18
BROKEN = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""What a connection that ends or talks nonsense raises."""


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    path: str
    is_https: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(url: str, headers: Mapping[str, str] | None = None) -> Target:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError("--url", f"{shown(url)} is not an address; write http://host:port/v1/query") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", f"{shown(url)} is not an http address; write http://host:port/v1/query")
        is_https = parts.scheme == "https"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return Target(parts.hostname, port or (443 if is_https else 80), path, is_https, dict(headers or {}))

    def head(self, num_bytes: int) -> bytes:
        named = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "host": f"{named}:{self.port}",
            "content-type": "application/json",
            "content-length": str(num_bytes),
            **self.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


@dataclass(frozen=True)
class Exchange:
    """One request and its whole answer; times are of `time.perf_counter`."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    started_s: float
    first_data_s: float
    """When the first byte of the body was there; in a stream, of its first event."""
    ended_s: float

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Connection:
    """One kept-alive connection, opened when it is first needed and again after it was closed."""

    def __init__(self, target: Target, tls: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._tls = tls or (ssl.create_default_context() if target.is_https else None)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Now, for a request that shall not wait for it."""
        await self._streams()

    async def post(self, body: bytes) -> Exchange:
        """Raises one of BROKEN when the connection breaks. A kept-alive one that was closed is opened anew."""
        was_open = self._writer is not None
        try:
            return await self._post(body)
        except BROKEN as error:
            self.close()
            if was_open and isinstance(error, (ConnectionError, asyncio.IncompleteReadError)):
                return await self._post(body)
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _post(self, body: bytes) -> Exchange:
        started_s = time.perf_counter()
        reader, writer = await self._streams()
        writer.write(self._target.head(len(body)) + body)  # in one piece: two would wake the server twice
        await writer.drain()
        status, headers = await _read_head(reader)
        answer = _Body(reader)
        await answer.read(headers)
        if headers.get("connection", "").lower() == "close" or answer.ends_connection:
            self.close()
        ended_s = time.perf_counter()
        return Exchange(status, headers, bytes(answer.data), started_s, answer.first_data_s or ended_s, ended_s)

    async def _streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            target = self._target
            self._reader, self._writer = await asyncio.open_connection(
                target.host, target.port, ssl=self._tls, limit=MAX_HEAD_BYTES
            )
        return self._reader, self._writer


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.split("\r\n")
        if not status_line.startswith("HTTP/1."):
            raise ValueError("the answer is not HTTP/1")
        status = int(status_line[9:12])
        if status >= 200:
            break
    pairs = (line.partition(":") for line in lines if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


class _Body:
    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.data = bytearray()
        self.first_data_s: float | None = None
        self.ends_connection = False

    async def read(self, headers: Mapping[str, str]) -> None:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while num_bytes := int(await self._reader.readline(), 16):
                self._take(await self._reader.readexactly(num_bytes))
                await self._reader.readexactly(2)
            await self._reader.readline()
        elif "content-length" in headers:
            self._take(await self._reader.readexactly(int(headers["content-length"])))
        else:
            self.ends_connection = True
            self._take(await self._reader.read())

    def _take(self, data: bytes) -> None:
        """Comments that keep a stream open are no data."""
        if self.first_data_s is None and not data.startswith(b":"):
            self.first_data_s = time.perf_counter()
        self.data += data


# ---------------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Outcome:
    """Times in seconds; those that nobody told are None."""

    started_s: float
    ended_s: float
    error: str | None = None
    """Why it has no answer: a status with the server's code, or the name of what broke."""
    ttft_s: float | None = None
    """In a stream the time until its first event here, otherwise what the server says."""
    processing_s: float | None = None
    decode_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.started_s


def outcome_of(exchange: Exchange) -> Outcome:
    """Of an answer that arrived whole; a stream that ends in an error event, or without its last one, has failed."""
    started_s, ended_s = exchange.started_s, exchange.ended_s
    result = _result(exchange)
    if exchange.status != 200 or result is None or "error" in result:
        return Outcome(started_s, ended_s, _error(exchange.status, result))
    metrics = result.get("metrics") or {}
    measured_s = exchange.first_data_s - started_s if exchange.is_stream else result.get("ttft_s")
    return Outcome(
        started_s,
        ended_s,
        ttft_s=measured_s,
        processing_s=result.get("processing_latency_s"),
        decode_s=result.get("decode_latency_s"),
        input_tokens=metrics.get("input_tokens", 0),
        output_tokens=metrics.get("output_tokens", 0),
    )


def _result(exchange: Exchange) -> dict[str, Any] | None:
    """The answer, in a stream its last event; None when it is not there."""
    data = exchange.body
    if exchange.is_stream and exchange.status == 200:
        events = [line for line in data.split(b"\n\n") if line.startswith(b"data: ")]
        if not events:
            return None
        data = events[-1][len(b"data: ") :]
    try:
        result = json.loads(data)
    except ValueError:
        return None
    is_whole = isinstance(result, dict) and ("error" in result or not exchange.is_stream or result.get("completed"))
    return result if is_whole else None


def _error(status: int, result: Mapping[str, Any] | None) -> str:
    told = (result or {}).get("error")
    code = told.get("code") or told.get("type") if isinstance(told, dict) else None
    if status == 200:
        return f"stream: {code}" if code else "no whole answer"
    return f"{status} {code}" if code else str(status)
