"""Connections that nobody reads, that fill every place, or whose client has closed its writing side."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kestrel.errors import ConfigError
from kestrel.server.config import ServerConfig
from kestrel.server.lifecycle import bind
from tests.server.conftest import RunningServer, runtime_config, start_server
from tests.server.long_request import end_id_of, long_query
from tests.server.programs import Program
from tests.server.sockets import POST_QUERY, eventually
from tests.server.test_server_limits import read_all, read_answer

SEND_TIMEOUT_S = 0.7
LIMIT = 8
QUESTION = {"question": "Who are you?", "max_tokens": 1}
PAGE = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
ERROR = b"GET /no/such HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def brisk() -> Iterator[RunningServer]:
    """Hangs up soon on who does not read, and has few places."""
    config = ServerConfig(port=0, send_timeout_s=SEND_TIMEOUT_S, max_connections=LIMIT, keep_alive_timeout_s=60)
    yield from start_server(config, runtime_config(), send_buffer_bytes=4096)


def connect(url: str, receive_buffer_bytes: int | None = None) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    return connection


def post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return f"{POST_QUERY}content-length: {len(content)}\r\n\r\n".encode() + content


def kernel_queues(port: int, client_port: int) -> list[int]:
    """The bytes that wait to be sent from the server's end of a connection, as long as the system has one."""
    ends = f":{port:04X}", f":{client_port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[4].split(":")[0], 16) for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]


def has_hung_up(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**20):
            pass
    return True


# ---------------------------------------------------------------------- answers that nobody reads

UNREAD = {
    "a plain answer": PAGE,
    "answers on and on": PAGE * 20,
    "an answer and the end": PAGE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
    "errors": ERROR * 200,
    "a few errors and the end": ERROR * 12 + ERROR.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
    "a refusal of what is no HTTP": PAGE + b"nonsense\r\n\r\n",
}


@pytest.mark.parametrize("name", UNREAD)
def test_who_does_not_read_is_hung_up_on_and_nothing_is_kept(brisk: RunningServer, name: str) -> None:
    with connect(brisk.url, 2048) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(UNREAD[name])
        ends = connection.getpeername()[1], connection.getsockname()[1]
        assert eventually(lambda: any(kernel_queues(*ends)))
        assert eventually(lambda: kernel_queues(*ends) == [])
        assert has_hung_up(connection)


def test_who_reads_late_but_in_time_gets_the_whole_answer(brisk: RunningServer) -> None:
    with connect(brisk.url, 2048) as connection:
        connection.sendall(PAGE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        time.sleep(SEND_TIMEOUT_S / 3)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert json.loads(body) == httpx.get(f"{brisk.url}/openapi.json").json()


def test_a_connection_that_is_read_stays_open_beyond_that_time(brisk: RunningServer) -> None:
    with connect(brisk.url) as connection:
        for _ in range(3):
            connection.sendall(HEALTH)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")
            time.sleep(SEND_TIMEOUT_S * 0.8)


# ---------------------------------------------------------------------- clients that have closed their writing side


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_half_closed_client_gets_its_answers(brisk: RunningServer, num_requests: int) -> None:
    with connect(brisk.url) as connection:
        connection.sendall(post(QUESTION) * num_requests)
        connection.shutdown(socket.SHUT_WR)
        answers = read_all(connection)
    assert answers.startswith(b"HTTP/1.1 ")
    assert (answers.count(b"HTTP/1.1 200 OK"), answers.count(b'"answer"')) == (num_requests, num_requests)


def test_a_half_closed_client_waits_for_a_long_answer_and_a_stream(brisk: RunningServer) -> None:
    body = long_query(end_id_of(brisk.engine), max_tokens=40)
    for stream in (False, True):
        with connect(brisk.url) as connection:
            connection.sendall(post({**body, "stream": stream}))
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
        assert answer.count(b"HTTP/1.1 200 OK") == 1
        assert b'"output_tokens":40' in answer


# ---------------------------------------------------------------------- no place left


def test_silent_connections_give_way_to_those_who_ask(brisk: RunningServer) -> None:
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(connect(brisk.url)) for _ in range(4 * LIMIT)]
        with brisk.client() as client:
            for _ in range(3):
                assert client.post("/v1/query", json=QUESTION).status_code == 200
        assert has_hung_up(silent[0])
        silent[-1].sendall(HEALTH)
        assert read_answer(silent[-1]).startswith(b"HTTP/1.1 200 OK")


def test_an_idle_connection_gives_way_later_than_a_silent_one(brisk: RunningServer) -> None:
    with contextlib.ExitStack() as held:
        idle = held.enter_context(connect(brisk.url))
        idle.sendall(HEALTH)
        assert read_answer(idle)
        for _ in range(LIMIT - 1):
            held.enter_context(connect(brisk.url))
        time.sleep(1.1)
        for _ in range(LIMIT - 1):
            held.enter_context(connect(brisk.url))
        idle.sendall(HEALTH)
        assert read_answer(idle).startswith(b"HTTP/1.1 200 OK")


def test_when_all_are_busy_only_health_answers(brisk: RunningServer) -> None:
    half = post(QUESTION)[:-5]
    with contextlib.ExitStack() as held:
        busy = [held.enter_context(connect(brisk.url)) for _ in range(LIMIT)]
        for connection in busy:
            connection.sendall(half)
        assert eventually(lambda: brisk.state.pending_body_bytes == LIMIT * len(half.partition(b"\r\n\r\n")[2]))
        for _ in range(40):  # more than there are places in reserve
            held.enter_context(connect(brisk.url))
            assert httpx.get(f"{brisk.url}/healthz").status_code == 200
            refused = httpx.post(f"{brisk.url}/v1/query", json=QUESTION)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        for connection in busy:
            connection.sendall(post(QUESTION)[-5:])
        assert all(read_answer(connection).startswith(b"HTTP/1.1 200 OK") for connection in busy)


def test_more_connections_than_open_files_are_survived(tmp_path: Path) -> None:
    """Each idle one is an open file of the server's."""
    program = Program(tmp_path / "log", num_files=256)
    try:
        url = program.url()
        with contextlib.ExitStack() as held:
            for number in range(300):
                held.enter_context(connect(url))
                if number % 50 == 49:
                    assert httpx.get(f"{url}/healthz", timeout=20).status_code == 200
            assert httpx.post(f"{url}/v1/query", json=QUESTION, timeout=60).status_code == 200
            size = len(program.log)
            time.sleep(1.0)
            assert httpx.get(f"{url}/healthz", timeout=20).status_code == 200
            assert len(program.log) - size < 5000
        assert "out of system resource" not in program.log
        assert program.end() == 0
    finally:
        program.kill()


def test_more_connections_than_files_allow_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"max_connections: .*ulimit -n"):
        bind(ServerConfig(port=0, max_connections=10**6))
