"""`kestrel serve` as a process of its own: start, SIGTERM in all its moments, exit codes."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.server.long_request import long_query
from tests.server.programs import Program
from tests.server.sockets import POST_QUERY, send

END_ID = 0  # of the embedded model


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    running = Program(tmp_path / "log")
    yield running
    running.kill()


@pytest.fixture
def program_started_anew(tmp_path: Path) -> Iterator[Program]:
    running = Program(tmp_path / "log", is_forked=False)
    yield running
    running.kill()


def test_sigterm_refuses_new_requests_finishes_accepted_ones_and_exits_0(program_started_anew: Program) -> None:
    program = program_started_anew
    url = program.url()
    assert "kestrel-tiny is a small demonstration model" in program.log
    assert "warmed up in" in program.log
    body = long_query(END_ID, max_tokens=150)
    with closing(send(url, body)) as whole, closing(send(url, {**body, "stream": True})) as streamed:
        events = streamed.getresponse()
        program.process.send_signal(signal.SIGTERM)
        program.wait_for("draining: 2 requests")
        with httpx.Client(base_url=url, timeout=60) as newcomer:
            assert newcomer.get("/ready").status_code == 503
            assert newcomer.get("/healthz").status_code == 200
            refused = newcomer.post("/v1/query", json={"question": "Who are you?"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_serving")
        assert refused.headers["retry-after"] == "1"
        answer = whole.getresponse()
        assert (answer.status, json.load(answer)["metrics"]["output_tokens"]) == (200, 150)
        assert b'"completed":true' in events.read().splitlines()[-2]
    assert program.process.wait(20) == 0
    lines = [json.loads(line) for line in program.log.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines if line.get("route") == "/v1/query"].count(200) == 2
    assert "Traceback" not in program.log


def test_a_second_signal_ends_it_at_once(program: Program) -> None:
    url = program.url()
    with closing(send(url, long_query(END_ID, stream=True))) as cut:
        events = cut.getresponse()
        program.process.send_signal(signal.SIGTERM)
        program.wait_for("draining: 1 requests")
        began_s = time.monotonic()
        assert program.end() == 128 + signal.SIGTERM
        assert time.monotonic() - began_s < 3.0
        with pytest.raises((http.client.HTTPException, OSError)):
            events.read()


def test_sigterm_while_loading_ends_it_with_0(program: Program) -> None:
    program.wait_for("memory: KV cache")
    assert program.end() == 0
    assert "draining: 0 requests" in program.log
    assert "startup complete" not in program.log
    assert "Traceback" not in program.log


def test_a_body_that_is_on_its_way_at_a_drain_is_refused(program: Program) -> None:
    url = program.url()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as connection:
        connection.sendall(f"{POST_QUERY}content-length: 100\r\nexpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{")
        assert program.end() == 0
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"not_serving"' in answer
    assert "Traceback" not in program.log


@pytest.mark.parametrize(("where", "num_children"), [("own", 1), ("shared", 0)])
def test_what_the_drain_time_does_not_hold_gets_an_error(where: str, num_children: int, tmp_path: Path) -> None:
    program = Program(tmp_path / "log", "--drain-timeout-s", "0.2", "--compute-process", where)
    try:
        url = program.url()
        assert len(program.children) == num_children
        body = long_query(END_ID)
        with closing(send(url, body)) as late, closing(send(url, {**body, "stream": True})) as streamed:
            events = streamed.getresponse()
            assert program.end(signal.SIGINT) == 0
            answer = late.getresponse()
            assert (answer.status, json.load(answer)["error"]["code"]) == (503, "engine_stopped")
            assert b'"code":"engine_stopped"' in events.read().splitlines()[-2]
    finally:
        program.kill()
