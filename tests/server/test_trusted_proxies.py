"""Whose word counts for a client's address: a named proxy's, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kestrel.server.config import ServerConfig
from kestrel.server.lifecycle import bind, uvicorn_config
from tests.server.conftest import runtime_config, start_server

QUESTION = {"question": "Who are you?", "max_tokens": 1}
HEADERS = {"x-forwarded-for": "6.6.6.6, 203.0.113.9", "x-forwarded-proto": "https"}


async def who_asks(request: Request) -> Response:
    assert request.client is not None
    return JSONResponse([request.client.host, request.url.scheme])


@asynccontextmanager
async def served(config: ServerConfig) -> AsyncIterator[str]:
    """An application that tells who asks, under the server's own settings of uvicorn."""
    server = uvicorn.Server(uvicorn_config(Starlette(routes=[Route("/", who_asks)]), config))
    with bind(config) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server.should_exit = True
        await task


@pytest.mark.parametrize(
    ("trusted", "expected"),
    [
        ((), ["127.0.0.1", "http"]),
        (("10.0.0.7",), ["127.0.0.1", "http"]),
        (("127.0.0.1",), ["203.0.113.9", "https"]),
        (("127.0.0.0/8",), ["203.0.113.9", "https"]),
        (("127.0.0.0/8", "203.0.113.0/24"), ["6.6.6.6", "https"]),
    ],
)
async def test_only_a_trusted_proxy_speaks_for_its_client(
    trusted: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own variable must not open what the field closes
    async with served(ServerConfig(port=0, trusted_proxies=trusted)) as url, httpx.AsyncClient() as client:
        assert (await client.get(url, headers=HEADERS)).json() == expected


@pytest.mark.parametrize("said", [",", "x" * 1000])
def test_whatever_a_proxy_says_the_client_is_served(said: str) -> None:
    config = ServerConfig(port=0, trusted_proxies=("127.0.0.1",))
    for server in start_server(config, runtime_config()):
        with server.client() as client:
            assert client.post("/v1/query", json=QUESTION, headers={"x-forwarded-for": said}).status_code == 200
