"""What a client may send and hold: bodies while they arrive, heads, time, requests at once."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from kestrel.server.config import ServerConfig
from tests.server.conftest import SCENE_URL, RunningServer, runtime_config, start_server
from tests.server.long_request import end_id_of, long_query
from tests.server.pages import Page
from tests.server.sockets import JSON, POST_QUERY, eventually, send

LIMIT = 64 * 1024
HASTE_S = 0.6
QUESTION = {"question": "Who are you?", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    config = ServerConfig(
        port=0,
        max_body_bytes=LIMIT,
        max_header_bytes=4096,
        max_requests_per_client=3,
        default_max_new_tokens=2,
        served_model_names=("house-model", "other-name"),
    )
    yield from start_server(config, runtime_config(max_batch_size=1, max_queue_size=1))


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningServer]:
    """Gives clients so little time to send that a busy machine may miss it: only for those who are to be late."""
    yield from start_server(ServerConfig(port=0, receive_timeout_s=HASTE_S), runtime_config())


@pytest.fixture
def visitor(strict: RunningServer) -> Iterator[httpx.Client]:
    with strict.client() as client:
        yield client


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def read_answer(connection: socket.socket) -> bytes:
    """One small JSON answer on a connection that stays open."""
    data = b""
    while not data.endswith(b"}"):
        data += connection.recv(4096)
    return data


def test_a_body_at_the_limit_is_read_and_one_above_is_413(visitor: httpx.Client) -> None:
    body = json.dumps(QUESTION).encode()
    assert visitor.post("/v1/query", content=body.ljust(LIMIT), headers=JSON).status_code == 200
    response = visitor.post("/v1/query", content=body.ljust(LIMIT + 1), headers=JSON)
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "body_too_large"
    assert str(LIMIT) in error["message"]


def test_a_chunked_body_is_stopped_while_it_arrives(strict: RunningServer, visitor: httpx.Client) -> None:
    """No length is declared, and far more is sent than may ever be held."""
    most_held = 0

    def endless() -> Iterator[bytes]:
        nonlocal most_held
        for _ in range(400):
            most_held = max(most_held, strict.state.pending_body_bytes)
            yield b"x" * LIMIT

    response = visitor.post("/v1/query", content=endless(), headers=JSON)
    assert response.status_code == 413
    assert most_held <= 2 * LIMIT + 2**18
    assert eventually(lambda: strict.state.pending_body_bytes == 0)


def test_a_client_that_waits_for_the_go_ahead_is_refused_without_sending(strict: RunningServer) -> None:
    with connect(strict) as connection:
        head = f"{POST_QUERY}content-length: {10**9}\r\nexpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_slow_body_is_408(hasty: RunningServer) -> None:
    with connect(hasty) as connection:
        connection.sendall(f"{POST_QUERY}content-length: 100\r\n\r\n{{".encode())
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


@pytest.mark.parametrize("sent", [b"", b"POST /v1/que", POST_QUERY.encode()])
def test_a_slow_head_loses_its_connection(hasty: RunningServer, sent: bytes) -> None:
    began_s = time.monotonic()
    with connect(hasty) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""
    assert time.monotonic() - began_s > HASTE_S / 2, "it may take its time"


def test_a_second_request_on_a_connection_may_not_dawdle_either(hasty: RunningServer) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")
        time.sleep(0.9)  # an idle connection is no slow one
        connection.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"GET /rea")
        assert read_all(connection) == b""


def test_a_large_head_is_refused(strict: RunningServer) -> None:
    with connect(strict) as connection:
        connection.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_a_full_queue_and_a_greedy_client_are_told_to_come_back(strict: RunningServer) -> None:
    """One runs, one waits: the third finds the queue full (503), the fourth of one client is one too many (429)."""
    end_id = end_id_of(strict.engine)
    with ExitStack() as held, strict.client() as client:
        for name in ("runs", "waits"):
            held.enter_context(closing(send(strict.url, long_query(end_id, request_id=name))))
            assert eventually(lambda name=name: name in strict.state.running)
        assert eventually(lambda: strict.engine.num_requests == 2)
        full = client.post("/v1/query", json=QUESTION)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        assert full.headers["retry-after"] == "1"
        half = held.enter_context(connect(strict))
        half.sendall(f"{POST_QUERY}content-length: 100\r\n\r\n{{".encode())
        assert eventually(lambda: bool(strict.state.arriving)), "the half request counts from its head on"
        greedy = client.post("/v1/query", json=QUESTION)
        assert (greedy.status_code, greedy.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert greedy.headers["retry-after"] == "1"
        assert client.get("/ready").status_code == 200
    assert eventually(lambda: strict.engine.num_requests == 0)
    with strict.client() as client:
        page = Page(client.get("/metrics").text)
    assert page.value("kestrel_http_requests_total", route="/v1/query", status="429") == 1
    assert page.total("kestrel_http_requests_total", route="unmatched") == 0


MANY_ANSWERS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}], "n": 4}, "n"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}], "n": 4, "stream": True}, "n"),
    ("/v1/completions", {"prompt": "I", "n": 4}, "n"),
    ("/v1/completions", {"prompt": ["I", "You"], "n": 2}, "prompt"),
    ("/v1/embeddings", {"input": ["I", "you", "we", "they"]}, "input"),
    ("/v1/detect", {"image_url": SCENE_URL, "object": ["bee", "dog", "cow", "cross"]}, "object"),
]


@pytest.mark.parametrize(("path", "body", "field"), MANY_ANSWERS)
def test_one_request_may_not_ask_for_more_answers_than_a_client_may_have(
    visitor: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    response = visitor.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "asks for 4 answers" in error["message"]
    assert "max_requests_per_client" in error["message"]


def test_every_prompt_and_choice_counts_as_a_request_of_its_client(
    strict: RunningServer, visitor: httpx.Client
) -> None:
    body = {"prompt": ["I", "You", "We"], "max_tokens": 1}
    assert visitor.post("/v1/completions", json=body).status_code == 200
    with closing(send(strict.url, long_query(end_id_of(strict.engine), request_id="runs"))):
        assert eventually(lambda: "runs" in strict.state.running)
        greedy = visitor.post("/v1/completions", json=body)
        assert (greedy.status_code, greedy.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert greedy.headers["retry-after"] == "1"
    assert eventually(lambda: strict.engine.num_requests == 0)
    assert visitor.post("/v1/completions", json=body).status_code == 200


def test_the_default_budget_holds_unless_the_request_names_one(visitor: httpx.Client, strict: RunningServer) -> None:
    def num_tokens(body: dict[str, object]) -> int:
        response = visitor.post("/v1/query", json=body)
        assert response.status_code == 200, response.text
        return response.json()["metrics"]["output_tokens"]

    base = long_query(end_id_of(strict.engine))
    ids = {"temperature": 0.0, "suppressed_ids": base["settings"]["suppressed_ids"]}
    assert num_tokens({"question": "Who are you?", "settings": ids}) == 2
    assert num_tokens({"question": "Who are you?", "settings": {**ids, "max_tokens": 5}}) == 5
    assert num_tokens({"question": "Who are you?", "settings": ids, "max_new_tokens": 4}) == 4


@pytest.mark.parametrize("name", ["house-model", "other-name", "kestrel-tiny", "moondream/house-model"])
def test_the_model_answers_to_both_its_names(visitor: httpx.Client, name: str) -> None:
    assert visitor.post("/v1/query", json={**QUESTION, "model": name}).status_code == 200
    assert visitor.get("/version").json()["model"] == "house-model"
