"""Memory of requests goes back at once: no server stays as large as its busiest moment, none waits for a collection."""

from __future__ import annotations

import gc
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from kestrel.bench.http_memory import drive
from kestrel.bench.processes import resident_mib
from tests.server.conftest import RunningServer
from tests.server.programs import Program
from tests.server.sockets import eventually, send

BODY = json.dumps({"messages": [{"role": "user", "content": "é" * 2_000_000}]}, ensure_ascii=False).encode()
"""Refused, after it was read, decoded and parsed."""
HEADERS = {"content-type": "application/json"}
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
CHAT = "/v1/chat/completions"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "answered": ("/v1/query", {"question": "Who?", "max_tokens": 1}),
    "streamed": ("/v1/query", {"question": "Who?", "max_tokens": 1, "stream": True}),
    "refused by the engine": ("/v1/query", {"question": 5}),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "x" * 400_000}]}),
    "no picture": ("/v1/caption", {"image_url": "AAAA"}),
}
OURS = ("kestrel", "uvicorn", "starlette")


@pytest.mark.exhaustive
@ON_LINUX
def test_what_large_bodies_took_is_given_back(tmp_path: Path) -> None:
    program = Program(tmp_path / "log")
    try:
        url = program.url()
        refused(url)
        before = resident_mib(program.process.pid)[0]
        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(refused, [url] * 48)) == {400}
        assert eventually(lambda: resident_mib(program.process.pid)[0] < before + 24), (
            before,
            resident_mib(program.process.pid),
        )
    finally:
        program.kill()


def refused(url: str) -> int:
    return httpx.post(f"{url}{CHAT}", content=BODY, headers=HEADERS, timeout=60).status_code


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_leaves_nothing_for_the_garbage_collector(server: RunningServer, kind: str) -> None:
    """A cycle would keep its body and its pictures until the next full collection, which may be minutes away."""
    path, body = REQUESTS[kind]
    server.state.observers.remove(server.watcher)  # it keeps every error
    connection = send(server.url, body, path)
    try:
        connection.getresponse().read()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        connection.request("POST", path, json.dumps(body), HEADERS)
        connection.getresponse().read()
        time.sleep(0.1)
        gc.collect()
        left = [one for one in gc.garbage if isinstance(one, FrameType) or type(one).__module__.startswith(OURS)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        connection.close()
        server.state.observers.append(server.watcher)
    assert left == []


@pytest.mark.exhaustive
@ON_LINUX
async def test_mixed_traffic_is_answered_and_measured(server: RunningServer) -> None:
    said: list[str] = []
    figures = await drive(server.url, 1, num_requests=40, seed=3, report=said.append)
    assert figures["server_mib_end"] > 0
    assert not any(f"{kind} 5" in said[-1] for kind in ("known", "fresh", "words", "format", "refused"))
