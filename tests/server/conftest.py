"""One real server per module: uvicorn on a free loopback port, in a thread, with the embedded model."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import AsyncMock, patch

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from PIL import Image

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine
from kestrel.server import lifecycle
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.lifecycle import bind, uvicorn_config
from kestrel.server.state import RequestInfo, ServerState, app_state
from tests.moondream.seen_crops import engines_encode_once
from tests.scene import SCENE
from tests.server.long_request import pause_for_long_requests

T = TypeVar("T")
GREEDY = {"temperature": 0.0}
KEYS = ("first-key", "second-key")


class Watcher:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.started_ids: list[str] = []
        self.outcomes: dict[str, EngineResult | BaseException] = {}

    def started(self, request: RequestInfo) -> None:
        self.started_ids.append(request.request_id)

    def finished(self, request: RequestInfo, outcome: EngineResult | BaseException) -> None:
        self.outcomes[request.request_id] = outcome


@dataclass
class RunningServer:
    url: str
    app: FastAPI
    loop: asyncio.AbstractEventLoop
    watcher: Watcher = field(default_factory=Watcher)

    @property
    def state(self) -> ServerState:
        return app_state(self.app)

    @property
    def engine(self) -> InferenceEngine:
        return self.state.require_serving()

    def on_loop(self, work: Callable[[], Awaitable[T]]) -> T:
        """Something asynchronous on the server's own event loop, such as a direct call of its engine."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


def runtime_config(**changes: Any) -> RuntimeConfig:
    return RuntimeConfig(**{"device": "cpu", "kv_cache_pages": 600, "max_batch_size": 8, **changes})


def start_server(
    server_config: ServerConfig,
    config: RuntimeConfig,
    prepare: Callable[[FastAPI], None] | None = None,
    send_buffer_bytes: int | None = None,
) -> Iterator[RunningServer]:
    """A generator for fixtures: yields a ready server, ends it afterwards. It does not warm up: tests of servers as
    programs see that."""
    app = create_app(lambda: InferenceEngine.create(config), server_config)
    if prepare is not None:
        prepare(app)
    server = uvicorn.Server(uvicorn_config(app, server_config))
    listening = bind(server_config)
    if send_buffer_bytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[listening]),))
    running = RunningServer(f"http://127.0.0.1:{listening.getsockname()[1]}", app, loop)
    running.state.observers.append(running.watcher)
    with patch.object(lifecycle, "warm_up", AsyncMock(return_value=0.0)):
        thread.start()
        running.on_loop(running.state.settled.wait)
    try:
        assert running.state.failure is None
        let_long_requests_last(running)
        yield running
    finally:
        server.should_exit = True
        thread.join(60)
        loop.close()
        assert not thread.is_alive()


def let_long_requests_last(server: RunningServer) -> None:
    scheduler = server.engine._scheduler
    step = scheduler.step

    def step_later() -> Any:
        pause_for_long_requests(scheduler)
        return step()

    scheduler.step = step_later  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def _crops_encoded_once() -> Iterator[None]:
    with engines_encode_once():
        yield


@pytest.fixture(scope="package")
def server(_one_thread: None) -> Iterator[RunningServer]:
    """The server that most tests share."""
    yield from start_server(ServerConfig(port=0), runtime_config())


@pytest.fixture(scope="package")
def locked(_one_thread: None) -> Iterator[RunningServer]:
    """A server with keys, each with a cache of its own."""
    config = ServerConfig(port=0, api_keys=KEYS, isolate_prefix_cache=True, cors_origins=("https://app.example",))
    yield from start_server(config, runtime_config())


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


SCENE_BYTES = SCENE.read_bytes()
SCENE_URL = data_url(SCENE_BYTES)
