"""`kestrel serve` as a process of its own: start, SIGTERM in all its moments, exit codes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.exhaustive import sweep
from tests.server.long_request import long_query
from tests.server.programs import Program
from tests.server.sockets import POST_QUERY, eventually, send

END_ID = 0  # of the embedded model
CHAT = "/v1/chat/completions"


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


@pytest.mark.exhaustive
def test_sigterm_refuses_new_requests_finishes_accepted_ones_and_exits_0(program_started_anew: Program) -> None:
    program = program_started_anew
    url = program.url()
    assert "kestrel-tiny is a small demonstration model" in program.log
    assert "warmed up in" in program.log
    body = long_query(END_ID, max_tokens=80)
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
        assert (answer.status, json.load(answer)["metrics"]["output_tokens"]) == (200, 80)
        assert b'"completed":true' in events.read().splitlines()[-2]
    assert program.process.wait(60) == 0
    lines = [json.loads(line) for line in program.log.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines if line.get("route") == "/v1/query"].count(200) == 2
    assert "Traceback" not in program.log


@pytest.mark.exhaustive
def test_a_second_signal_ends_it_at_once(program: Program) -> None:
    url = program.url()
    with closing(send(url, long_query(END_ID, stream=True))) as cut:
        events = cut.getresponse()
        program.process.send_signal(signal.SIGTERM)
        program.wait_for("draining: 1 requests")
        assert program.end() == 128 + signal.SIGTERM
        with pytest.raises((http.client.HTTPException, OSError)):
            events.read()


def test_sigterm_while_loading_ends_it_with_0(tmp_path: Path) -> None:
    program = Program(tmp_path / "log", never_warm=True)
    try:
        program.wait_for("memory: KV cache")
        assert program.end() == 0
        assert "draining: 0 requests" in program.log
        assert "startup complete" not in program.log
        assert "Traceback" not in program.log
    finally:
        program.kill()


def test_a_body_that_is_on_its_way_at_a_drain_is_refused(program: Program) -> None:
    url = program.url()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(f"{POST_QUERY}content-length: 100\r\nexpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{")
        assert program.end() == 0
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"not_serving"' in answer
    assert "Traceback" not in program.log


@sweep(("where", "num_children"), [("own", 1), ("shared", 0)], always=[("own", 1)])
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


def chat_of(num_choices: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Who are you?"}]
    return {"messages": messages, "n": num_choices, "max_tokens": 20, "ignore_eos": True, **more}


@pytest.mark.exhaustive
def test_a_request_with_several_choices_is_finished_with_all_of_them(tmp_path: Path) -> None:
    """One row for five choices: most of them begin after the drain has."""
    program = Program(tmp_path / "log", "--max-batch-size", "1", "--drain-timeout-s", "120")
    try:
        url = program.url()
        with closing(send(url, chat_of(3), CHAT)) as whole, closing(send(url, chat_of(2, stream=True), CHAT)) as parts:
            events = parts.getresponse()
            assert eventually(lambda: num_started(url) >= 3)
            program.process.send_signal(signal.SIGTERM)
            program.wait_for("draining: 2 requests")
            answer = json.load(whole.getresponse())
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
            ends = re.findall(rb'"finish_reason":"(\w+)"', events.read())
            assert ends == [b"length"] * 2
        assert program.process.wait(60) == 0
    finally:
        program.kill()


def num_started(url: str) -> int:
    found = re.search(r"kestrel_requests_started_total{.*} (\d+)", httpx.get(f"{url}/metrics").text)
    return 0 if found is None else int(found[1])


def test_clients_are_told_when_the_compute_process_dies_during_a_drain(program: Program) -> None:
    url = program.url()
    body = long_query(END_ID)
    with closing(send(url, body)) as whole, closing(send(url, {**body, "stream": True})) as streamed:
        events = streamed.getresponse()
        assert events.readline().startswith(b"data: ")
        program.process.send_signal(signal.SIGTERM)
        program.wait_for("draining: 2 requests")
        os.kill(program.children[0], signal.SIGKILL)
        answer = whole.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (503, "engine_stopped")
        assert b'"code":"engine_stopped"' in events.read().splitlines()[-2]
    assert program.process.wait(60) == 1
    assert "the process that computes has ended (signal 9" in program.log


@pytest.mark.exhaustive
def test_with_a_stopped_compute_process_clients_are_told_in_time_and_it_still_ends(tmp_path: Path) -> None:
    flags = ["--request-timeout-s", "2", "--queue-timeout-s", "1", "--step-timeout-s", "10", "--drain-timeout-s", "1"]
    program = Program(tmp_path / "log", *flags)
    try:
        url = program.url()
        body = long_query(END_ID)
        with closing(send(url, {**body, "stream": True})) as streamed, httpx.Client(base_url=url, timeout=60) as client:
            events = streamed.getresponse()
            assert events.readline().startswith(b"data: ")
            os.kill(program.children[0], signal.SIGSTOP)
            waiting = client.post("/v1/query", json=body)
            assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "queue_timeout")
            assert b'"code":"deadline_exceeded"' in events.read().splitlines()[-2]
            assert eventually(lambda: client.get("/readyz").status_code == 503)
            assert client.get("/ready").json()["status"] == "stalled"
            assert client.get("/metrics").status_code == 200
            program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(60) == 0
        assert "did not end by itself" not in program.log
    finally:
        program.kill()


@sweep("where", ["own", "shared"], always=[])
def test_a_model_that_hangs_ends_the_server_with_1(where: str, tmp_path: Path) -> None:
    """Stopped with its own process, or blocked in the worker's thread."""
    flags = ["--step-timeout-s", "2", "--compute-process", where]
    program = Program(tmp_path / "log", *flags, hangs_after_steps=40 if where == "shared" else None)
    try:
        url = program.url()
        body = long_query(END_ID)
        with closing(send(url, body)) as whole, closing(send(url, {**body, "stream": True})) as streamed:
            events = streamed.getresponse()
            for child in program.children:
                os.kill(child, signal.SIGSTOP)
            answer = whole.getresponse()
            assert (answer.status, json.load(answer)["error"]["code"]) == (503, "engine_stopped")
            assert b'"code":"engine_stopped"' in events.read().splitlines()[-2]
        assert program.process.wait(60) == 1
        assert "no step has ended for 2 s while requests wait (step_timeout_s)" in program.log
        assert "Traceback" not in program.log
    finally:
        program.kill()
