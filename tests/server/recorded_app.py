"""A small application behind the record layer, and a real server around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from kestrel.request import RequestMetrics
from kestrel.server.records import RecordedRequests, RequestRecord, RequestWatcher

SECRET = "the red barn of my neighbour"
METRICS = RequestMetrics(input_tokens=740, output_tokens=5, cached_tokens=730, ttft_ms=12.5)


async def skill(request: Request) -> Response:
    """Answers as a skill does: reads a body with a secret in it and fills the record."""
    await request.body()
    record = RequestRecord.of(request.scope)
    record.skill = request.path_params["skill"]
    record.settings = {"temperature": 0.5, "max_tokens": 64, "stop": SECRET, "seed": True}
    record.metrics, record.finish_reason = METRICS, "stop"
    return JSONResponse({"answer": SECRET, "request_id": record.request_id})


async def refuse(request: Request) -> Response:
    RequestRecord.of(request.scope).error_type = "QueueFull"
    return JSONResponse({"error": "busy"}, status_code=503, headers={"x-request-id": "chosen-by-the-handler"})


async def crash(request: Request) -> Response:
    raise RuntimeError(SECRET)


async def endless(request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"data: {}\n\n"
            await asyncio.sleep(0.005)

    return StreamingResponse(body(), media_type="text/event-stream")


async def health(request: Request) -> Response:
    return Response("ok")


def routes() -> FastAPI:
    app = FastAPI()
    for path, handler in (("/v1/busy", refuse), ("/v1/crash", crash), ("/v1/endless", endless), ("/healthz", health)):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    app.add_api_route("/v1/{skill}", skill, methods=["POST"], response_model=None)
    return app


def recorded(watchers: Sequence[RequestWatcher], app: ASGIApp | None = None) -> RecordedRequests:
    return RecordedRequests(app or routes(), watchers)


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """The application behind uvicorn on a free port; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await task
