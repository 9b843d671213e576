"""Crowds: many streams at once, clients that leave at every moment, and counters that agree with what was sent."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kestrel.bench.http_load.client import Connection, Exchange, Target
from kestrel.server.config import ServerConfig
from tests.exhaustive import sweep
from tests.scene import turned_scenes
from tests.server.conftest import GREEDY, RunningServer, data_url, runtime_config, start_server
from tests.server.leftovers import holdings, resident_bytes
from tests.server.long_request import end_id_of, long_query
from tests.server.pages import Page
from tests.server.sockets import POST_QUERY, eventually

CAPACITY = 224
"""Requests that the server takes at once, running or waiting."""
GROWTH_BYTES = 96 * 2**20


@pytest.fixture(scope="module")
def crowded() -> Iterator[RunningServer]:
    yield from start_server(
        ServerConfig(port=0), runtime_config(max_batch_size=16, max_queue_size=CAPACITY - 16, kv_cache_pages=1200)
    )


@dataclass(frozen=True)
class Asked:
    skill: str
    fields: dict[str, Any]
    answer: Any
    """What the engine says when it is asked directly, alone."""

    @property
    def body(self) -> bytes:
        return json.dumps({**self.fields, "stream": True}).encode()


def questions(server: RunningServer, num_scenes: int) -> list[Asked]:
    """Four about each scene; points and boxes tell one scene from another."""
    asked: list[Asked] = []
    for picture in turned_scenes()[:num_scenes]:
        for skill, fields, key in (
            ("point", {"object": "bee", "max_objects": 1}, "points"),
            ("detect", {"object": "bee", "max_objects": 1}, "objects"),
            ("caption", {"settings": {**GREEDY, "max_tokens": 5}}, "caption"),
            ("query", {"question": "How many bees are there?", "reasoning": False, "settings": GREEDY}, "answer"),
        ):
            direct = server.on_loop(lambda s=skill, f=fields, p=picture: server.engine.run(s, image=p, **f))
            asked.append(Asked(skill, {**fields, "image_url": data_url(picture)}, direct.output[key]))
    return asked


async def stream(server: RunningServer, asked: Asked) -> Exchange:
    connection = Connection(Target.of(f"{server.url}/v1/{asked.skill}"))
    try:
        return await asyncio.wait_for(connection.post(asked.body), 120)
    finally:
        connection.close()


def events_of(exchange: Exchange) -> list[dict[str, Any]]:
    frames = [frame for frame in exchange.body.split(b"\n\n") if frame.startswith(b"data: ")]
    return [json.loads(frame[6:]) for frame in frames]


def close_to(found: Any, wanted: Any) -> bool:
    """Texts to the letter; coordinates up to what the order of additions in a batch changes."""
    if isinstance(wanted, str):
        return found == wanted
    return len(found) == len(wanted) and all(
        one[side] == pytest.approx(other[side], abs=1e-4)
        for one, other in zip(found, wanted, strict=True)
        for side in other
    )


@sweep(("num_streams", "num_scenes"), [(24, 2), (64, 2), (256, 8)], always=[(24, 2)])
def test_many_streams_at_once_are_answered_rightly_or_refused(
    crowded: RunningServer, num_streams: int, num_scenes: int
) -> None:
    asked = questions(crowded, num_scenes)
    assert len({json.dumps(each.answer) for each in asked if each.skill in ("point", "detect")}) == 2 * num_scenes
    crowd = [asked[i % len(asked)] for i in range(num_streams)]

    async def all_at_once() -> list[Exchange]:
        return await asyncio.gather(*(stream(crowded, each) for each in crowd))

    exchanges = asyncio.run(all_at_once())
    statuses = Counter(exchange.status for exchange in exchanges)
    assert statuses.keys() <= {200, 503}
    assert statuses[200] >= min(num_streams, CAPACITY // 2)
    key = {"point": "points", "detect": "objects", "caption": "caption", "query": "answer"}
    for each, exchange in zip(crowd, exchanges, strict=True):
        if exchange.status == 503:
            assert json.loads(exchange.body)["error"]["code"] == "overloaded"
            assert exchange.headers["retry-after"] == "1"
            continue
        *pieces, last = events_of(exchange)
        assert last["completed"] is True
        assert close_to(last[key[each.skill]], each.answer), each.skill
        if each.skill in ("caption", "query"):
            assert "".join(piece["chunk"] for piece in pieces) == each.answer
    assert (
        len({json.loads(e.body.split(b"\n\n")[-2][6:])["request_id"] for e in exchanges if e.status == 200})
        == (statuses[200])
    )
    assert eventually(lambda: holdings(crowded).num_requests == 0)


# ---------------------------------------------------------------------- clients that leave


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"{POST_QUERY}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def leave_abruptly(connection: socket.socket) -> None:
    """With a reset, as a process that dies does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def abort_all(server: RunningServer, sent: bytes, waits_for_answer: bool, times: int) -> None:
    """Eight at a time connect, send, perhaps read the first bytes of the answer, and are gone."""
    host, port = server.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()

    async def visitor(numbers: Iterator[int]) -> None:
        for number in numbers:
            connection = socket.socket()
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, sent)
            if waits_for_answer:
                assert (await loop.sock_recv(connection, 4096)).startswith(b"HTTP/1.1 200 OK")
            if number % 2:
                connection.close()
            else:
                leave_abruptly(connection)

    numbers = iter(range(times))
    await asyncio.gather(*(visitor(numbers) for _ in range(8)))


@sweep("num_clients", [100, 1000], always=[100])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(crowded: RunningServer, num_clients: int) -> None:
    body = request_bytes(long_query(end_id_of(crowded.engine), stream=True))
    moments = ((b"", False), (body[: len(body) // 2], False), (body, True))
    for sent, waits in moments:
        asyncio.run(abort_all(crowded, sent, waits, 24))
    assert eventually(lambda: holdings(crowded).num_requests == 0)
    before, memory_before, num_started = holdings(crowded), resident_bytes(), len(crowded.watcher.started_ids)
    assert (before.num_used_pages, before.pending_body_bytes, before.listed) == (0, 0, 0)
    for sent, waits in moments:
        asyncio.run(abort_all(crowded, sent, waits, num_clients // len(moments)))
    assert eventually(lambda: holdings(crowded) == before), (before, holdings(crowded))
    crowded.engine._cache.check_integrity()
    assert len(crowded.watcher.started_ids) - num_started == num_clients // len(moments)
    assert resident_bytes() - memory_before < GROWTH_BYTES
    with crowded.client() as client:
        assert client.post("/v1/query", json={"question": "Who are you?", "max_tokens": 1}).status_code == 200


# ---------------------------------------------------------------------- counters


def test_the_counters_agree_with_what_was_sent(crowded: RunningServer) -> None:
    def scrape(client: httpx.Client) -> Page:
        return Page(client.get("/metrics").text)

    good = {"question": "Who are you?", "settings": {**GREEDY, "max_tokens": 3}}
    sent = [
        *[("/v1/query", good, 200)] * 5,
        *[("/v1/query", {**good, "stream": True}, 200)] * 4,
        *[("/v1/query", {"question": ""}, 400)] * 3,
        *[("/v1/query", {**good, "model": "another"}, 404)] * 2,
        ("/v1/caption", {}, 400),
        ("/v1/nothing", {}, 404),
    ]
    with crowded.client() as client:
        before = scrape(client)
        tokens = [0, 0]
        for path, body, status in sent:
            response = client.post(path, json=body)
            assert response.status_code == status
            if status == 200:
                last = response.text.split("data: ")[-1] if "stream" in body else response.text
                metrics = json.loads(last)["metrics"]
                tokens = [tokens[0] + metrics["input_tokens"], tokens[1] + metrics["output_tokens"]]
        after = scrape(client)

    def grew(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert grew("kestrel_http_requests_total", route="/v1/query", status="200") == 9
    assert grew("kestrel_http_requests_total", route="/v1/query", status="400") == 3
    assert grew("kestrel_http_requests_total", route="/v1/query", status="404") == 2
    assert grew("kestrel_http_requests_total", route="/v1/caption", status="400") == 1
    assert grew("kestrel_http_requests_total", route="unmatched", status="404") == 1
    assert grew("kestrel_http_requests_total", route="/metrics") == 1
    assert grew("kestrel_requests_finished_total", skill="query") == grew("vllm:request_success_total") == 9
    assert grew("kestrel_requests_failed_total") == grew("kestrel_requests_started_total") - 9
    assert grew("kestrel_input_tokens_total") == grew("vllm:prompt_tokens_total") == tokens[0]
    assert grew("kestrel_output_tokens_total") == grew("vllm:generation_tokens_total") == tokens[1]
    assert grew("kestrel_request_duration_seconds_count", skill="query") == 9
    assert after.total("kestrel_requests_in_progress") == 0
    assert after.value("kestrel_kv_pages_used") == 0
