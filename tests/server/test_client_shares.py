"""Two keys on one server: what one of them floods it with, the other hardly notices. Counted in answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kestrel.engine import EngineResult
from kestrel.server.config import ServerConfig
from kestrel.server.state import RequestInfo
from tests.exhaustive import sweep
from tests.server.conftest import KEYS, RunningServer, runtime_config, start_server
from tests.server.long_request import end_id_of, long_query

ROWS, ROOM = 2, 80
MANY, OTHER, URGENT = *KEYS, "urgent-key"


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    config = ServerConfig(port=0, api_keys=(MANY, OTHER), urgent_api_keys=(URGENT,))
    yield from start_server(config, runtime_config(max_batch_size=ROWS, max_queue_size=ROOM - ROWS))


class Answers:
    """How many requests were answered before each one came and went."""

    def __init__(self) -> None:
        self.total = 0
        self.at_start: dict[str, int] = {}
        self.while_waiting: dict[str, int] = {}

    def started(self, request: RequestInfo) -> None:
        self.at_start[request.request_id] = self.total

    def finished(self, request: RequestInfo, outcome: EngineResult | BaseException) -> None:
        self.while_waiting[request.request_id] = self.total - self.at_start[request.request_id]
        self.total += isinstance(outcome, EngineResult)


async def ask(
    client: httpx.AsyncClient, key: str, body: dict[str, Any], connected: asyncio.Event | None = None
) -> httpx.Response:
    async def trace(event: str, _: object) -> None:
        if connected is not None and event == "http11.send_request_headers.started":
            connected.set()

    return await client.post("/v1/query", json=body, headers={"X-Moondream-Auth": key}, extensions={"trace": trace})


@asynccontextmanager
async def flood(server: RunningServer, key: str, number: int, priority: int = 0) -> AsyncIterator[httpx.AsyncClient]:
    """So many requests of a key without an answer, or more than have room; they are dropped at the end."""
    body = long_query(end_id_of(server.engine), max_tokens=20, priority=priority)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        connected = [asyncio.Event() for _ in range(number)]
        tasks = [asyncio.create_task(ask(client, key, body, event)) for event in connected]
        for _ in range(1000):
            was_full = any(task.done() and task.result().status_code == 503 for task in tasks)
            if was_full or (number <= ROOM and server.engine.num_requests >= number - ROWS):
                break
            await asyncio.sleep(0.01)
        assert was_full == (number > ROOM)
        yield client
        for task, event in zip(tasks, connected, strict=True):
            await asyncio.wait_for(event.wait(), 60)  # a task cancelled while it connects would leave its socket open
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def answers_while_waiting(server: RunningServer, key: str, number: int, priority: int = 0) -> int:
    """How many requests are answered while another key's single one waits beside a flood."""
    answers = Answers()
    server.state.observers.append(answers)
    try:
        async with flood(server, key, number, priority) as client:
            body = long_query(end_id_of(server.engine), max_tokens=4, request_id=f"one-{number}")
            response = await ask(client, OTHER, body)
            assert response.status_code == 200, response.text
            return answers.while_waiting[f"one-{number}"]
    finally:
        server.state.observers.remove(answers)


@sweep("num_waiting", [20, 70], always=[70])
async def test_a_single_request_waits_no_longer_behind_70_of_another_key_than_behind_20(
    shared: RunningServer, num_waiting: int
) -> None:
    assert await answers_while_waiting(shared, MANY, ROWS + num_waiting) <= 4 * ROWS


async def test_a_key_that_fills_the_queue_leaves_room_for_another(shared: RunningServer) -> None:
    assert await answers_while_waiting(shared, MANY, ROOM + 20) <= 4 * ROWS


async def test_an_urgent_key_leaves_the_others_every_fourth_start(shared: RunningServer) -> None:
    assert await answers_while_waiting(shared, URGENT, 60, priority=-1_000_000) <= 4 + 4 * ROWS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/query", {"question": "Who are you?"}),
        ("/v1/query", {"question": "Who are you?", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who are you?"}]}),
        ("/v1/completions", {"prompt": "I am", "stream": True}),
        ("/v1/embeddings", {"input": "I am"}),
    ],
)
def test_a_priority_below_zero_needs_an_urgent_key(shared: RunningServer, path: str, body: dict[str, Any]) -> None:
    asked = {"max_tokens": 1, **body, "priority": -1} if path != "/v1/embeddings" else {**body, "priority": -1}
    with shared.client() as client:
        refused = client.post(path, json=asked, headers={"X-Moondream-Auth": MANY})
        allowed = client.post(path, json=asked, headers={"X-Moondream-Auth": URGENT})
        polite = client.post(path, json={**asked, "priority": 1}, headers={"X-Moondream-Auth": MANY})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (403, "permission_error", "priority")
    assert "--urgent-api-key" in error["message"]
    assert (allowed.status_code, polite.status_code) == (200, 200)


@pytest.mark.parametrize("priority", [-1, -1.0])
def test_without_keys_nobody_is_urgent(client: httpx.Client, priority: float) -> None:
    response = client.post("/v1/query", json={"question": "Who are you?", "max_tokens": 1, "priority": priority})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "not_allowed")
