"""The server as a process, ended amid a crowd: by SIGTERM nobody loses an answer, after SIGKILL it is back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
from collections import Counter
from pathlib import Path

import httpx
import pytest

from kestrel.bench.http_load.client import BROKEN, Connection, Target
from tests.server.long_request import long_query
from tests.server.programs import Program
from tests.server.sockets import POST_QUERY, eventually
from tests.server.test_draining import END_ID

NUM_CLIENTS = 16
NUM_TOKENS = 24


async def ask_until_the_end(url: str, client: int, outcomes: Counter[str], program: Program) -> None:
    """A new connection for each request, streamed and whole in turn, until nobody listens any more."""
    for number in range(10_000):
        body = long_query(END_ID, max_tokens=NUM_TOKENS, stream=(client + number) % 2 == 0)
        connection = Connection(Target.of(f"{url}/v1/query"))
        try:
            exchange = await asyncio.wait_for(connection.post(json.dumps(body).encode()), 60)
        except ConnectionRefusedError:
            return
        except BROKEN as error:
            outcomes["cut off" if not _is_before_any_answer(error) else "closed without a word"] += 1
            continue
        finally:
            connection.close()
        if exchange.status == 200:
            last = exchange.body.split(b"data: ")[-1]
            assert json.loads(last)["metrics"]["output_tokens"] == NUM_TOKENS
        outcomes[str(exchange.status)] += 1
        if number == 1 and client == 0:
            program.process.send_signal(signal.SIGTERM)
        if exchange.status != 200:
            await asyncio.sleep(0.02)


def _is_before_any_answer(error: BaseException) -> bool:
    if isinstance(error, asyncio.IncompleteReadError):
        return error.partial == b""
    return isinstance(error, ConnectionError)


@pytest.mark.exhaustive
def test_sigterm_in_a_crowd_loses_no_accepted_request(tmp_path: Path) -> None:
    program = Program(tmp_path / "log", "--max-batch-size", "8")
    try:
        url = program.url()
        outcomes: Counter[str] = Counter()

        async def crowd() -> None:
            clients = (ask_until_the_end(url, number, outcomes, program) for number in range(NUM_CLIENTS))
            await asyncio.gather(*clients)

        asyncio.run(crowd())
        assert program.process.wait(60) == 0
    finally:
        program.kill()
    lines = [json.loads(line) for line in program.log.splitlines() if line.startswith("{")]
    logged = Counter(str(line.get("status")) for line in lines if line.get("route") == "/v1/query")
    assert outcomes["200"] == logged["200"] >= NUM_CLIENTS
    assert outcomes["503"] == logged["503"] > 0
    assert logged.keys() <= {"200", "503"}
    assert outcomes["cut off"] == 0
    assert any("draining: " in line.get("message", "") for line in lines)
    assert "the drain time is over" not in program.log
    assert "Traceback" not in program.log


@pytest.mark.exhaustive
def test_after_a_sudden_end_it_comes_back_on_its_port(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first = Program(tmp_path / "first", "--port", port)
    try:
        assert eventually(lambda: is_ready(url), 120)
        busy = [open_stream(url) for _ in range(4)]
        [computing] = first.children
        first.kill()
        second = Program(tmp_path / "second", "--port", port, is_forked=False)
        try:
            assert eventually(lambda: is_ready(url), 120)
            answer = httpx.post(f"{url}/v1/query", json={"question": "Who are you?", "max_tokens": 1}, timeout=60)
            assert answer.status_code == 200
            assert not is_running(computing), "the process that computed must go with the server"
            os.kill(second.children[0], signal.SIGKILL)
            assert second.process.wait(60) == 1, "nothing computes any more: whoever watches over it starts it anew"
            assert "the process that computes has ended (signal 9" in second.log
        finally:
            second.kill()
        for connection in busy:
            connection.close()
    finally:
        first.kill()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def answers(url: str) -> bool:
    body = {"question": "Who are you?", "max_tokens": 1}
    return httpx.post(f"{url}/v1/query", json=body, timeout=60).status_code == 200


def test_a_standard_error_that_fails_stops_nothing() -> None:
    port = free_port()
    program = Program(Path("/dev/full"), "--port", port)
    try:
        assert eventually(lambda: is_ready(f"http://127.0.0.1:{port}"), 120)
        assert answers(f"http://127.0.0.1:{port}")
        assert program.end() == 0
    finally:
        program.kill()


def test_a_standard_error_that_nobody_reads_stops_nothing_and_what_it_lost_is_told(tmp_path: Path) -> None:
    port, pipe = free_port(), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(reader, bytes(4096)):
            pass
    program = Program(pipe, "--port", port)
    try:
        assert eventually(lambda: is_ready(f"http://127.0.0.1:{port}"), 120)
        assert answers(f"http://127.0.0.1:{port}")
        os.read(reader, 2**20)
        assert answers(f"http://127.0.0.1:{port}")
        assert eventually(lambda: select.select([reader], [], [], 0)[0] != [])
        assert b" lines were lost" in os.read(reader, 2**16)
        assert program.end() == 0
    finally:
        program.kill()
        os.close(reader)


def is_running(pid: int) -> bool:
    """Who ends without a parent to ask after it may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def open_stream(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps(long_query(END_ID, stream=True)).encode()
    head = f"{POST_QUERY}content-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection
