"""A client that asks for a stream and does not read it: its time ends as everybody's, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kestrel.errors import KestrelError
from kestrel.server.config import ServerConfig
from tests.server.conftest import RunningServer, runtime_config, start_server
from tests.server.leftovers import holdings
from tests.server.long_request import end_id_of
from tests.server.sockets import POST_QUERY, eventually

TIMEOUT_S = 1.5
QUESTION = {"question": "Who are you?", "max_tokens": 1}


@pytest.fixture(scope="module")
def brief() -> Iterator[RunningServer]:
    config = ServerConfig(port=0, request_timeout_s=TIMEOUT_S, ping_interval_s=0.05)
    yield from start_server(config, runtime_config(), send_buffer_bytes=4096)


def verbose_chat(end_id: int) -> dict[str, Any]:
    """Kilobytes for each token, so that the buffers on the way, which are small, are full soon."""
    return {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_tokens": 1000,
        "logit_bias": {str(end_id): -100},
        "logprobs": True,
        "top_logprobs": 64,
        "n": 2,
        "stream": True,
    }


def ask_and_never_read(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"{POST_QUERY}content-length: {len(content)}\r\n\r\n".replace("query", "chat/completions")
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.exhaustive
def test_a_stalled_stream_ends_with_its_time_and_harms_nobody(brief: RunningServer) -> None:
    before = holdings(brief)
    began_s = time.monotonic()
    with ask_and_never_read(brief, verbose_chat(end_id_of(brief.engine))) as connection:
        assert eventually(lambda: len(brief.state.running) == 2)
        with brief.client() as client:
            for _ in range(10_000):
                assert client.post("/v1/query", json=QUESTION).status_code == 200
                if not brief.state.running:
                    break
        assert not brief.state.running
        assert time.monotonic() - began_s > TIMEOUT_S - 0.5
        assert eventually(lambda: holdings(brief) == before)
        assert is_ended(connection)
    brief.engine._cache.check_integrity()
    late = [outcome for outcome in brief.watcher.outcomes.values() if isinstance(outcome, KestrelError)]
    assert [type(outcome).__name__ for outcome in late] == ["DeadlineExceeded"] * 2


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has let go: what is left to read is followed by the end or a reset, not by silence."""
    connection.settimeout(60)
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**20):
            pass
        return True
    return True


@pytest.mark.exhaustive
def test_a_slow_but_steady_reader_is_told_that_its_time_is_over(brief: RunningServer) -> None:
    body = {**verbose_chat(end_id_of(brief.engine)), "n": 1, "logprobs": False, "top_logprobs": None}
    with brief.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        text = b"".join(response.iter_raw())
    assert b'"code":"deadline_exceeded"' in text
    assert text.endswith(b"data: [DONE]\n\n")
    assert httpx.get(f"{brief.url}/ready").status_code == 200
