"""`kestrel serve` as a process of its own: start, SIGTERM in all its moments, exit codes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.server.long_request import long_query
from tests.server.sockets import send

ROOT = Path(__file__).parents[2]
END_ID = 0  # of the embedded model
FLAGS = ("--port", "0", "--device", "cpu", "--kv-cache-pages", "300", "--log-format", "json")


class Program:
    def __init__(self, log: Path, *flags: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "kestrel.main", "serve", *FLAGS, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=file, env=environment)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if (match := re.search(pattern, self.log)) is not None:
                return match.group(match.lastindex or 0)
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in: {self.log}")

    def url(self) -> str:
        return self.wait_for(r"(http://127\.0\.0\.1:\d+)/")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    running = Program(tmp_path / "log")
    yield running
    running.process.kill()
    running.process.wait()


def test_sigterm_refuses_new_requests_finishes_accepted_ones_and_exits_0(program: Program) -> None:
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
    time.sleep(0.5)
    while program.process.poll() is None and "kestrel-tiny" not in program.log:
        time.sleep(0.02)
    time.sleep(0.3)
    assert program.end() == 0


def test_what_the_drain_time_does_not_hold_gets_an_error(tmp_path: Path) -> None:
    """This one in a single process, as servers on a GPU are."""
    program = Program(tmp_path / "log", "--drain-timeout-s", "0.2", "--compute-process", "shared")
    try:
        url = program.url()
        assert children_of(program.process.pid) == []
        body = long_query(END_ID)
        with closing(send(url, body)) as late, closing(send(url, {**body, "stream": True})) as streamed:
            events = streamed.getresponse()
            assert program.end(signal.SIGINT) == 0
            answer = late.getresponse()
            assert (answer.status, json.load(answer)["error"]["code"]) == (503, "engine_stopped")
            assert b'"code":"engine_stopped"' in events.read().splitlines()[-2]
    finally:
        program.process.kill()
        program.process.wait()
