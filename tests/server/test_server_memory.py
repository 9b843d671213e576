"""Memory of bodies goes back to the system: a server is not for ever as large as its busiest moment."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kestrel.bench.http_memory import drive, resident_mib
from tests.server.conftest import RunningServer
from tests.server.programs import Program
from tests.server.sockets import eventually

BODY = json.dumps({"messages": [{"role": "user", "content": "é" * 2_000_000}]}, ensure_ascii=False).encode()
"""Refused, after it was read, decoded and parsed."""
HEADERS = {"content-type": "application/json"}
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@ON_LINUX
def test_what_large_bodies_took_is_given_back(tmp_path: Path) -> None:
    program = Program(tmp_path / "log")
    try:
        url = program.url()
        refused(url)
        [before, _] = resident_mib(program.process.pid)
        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(refused, [url] * 48)) == {400}
        assert eventually(lambda: resident_mib(program.process.pid)[0] < before + 30, 5.0), (
            before,
            resident_mib(program.process.pid),
        )
    finally:
        program.kill()


def refused(url: str) -> int:
    return httpx.post(f"{url}/v1/chat/completions", content=BODY, headers=HEADERS, timeout=60).status_code


@ON_LINUX
async def test_mixed_traffic_is_answered_and_measured(server: RunningServer) -> None:
    said: list[str] = []
    figures = await drive(server.url, 1, num_requests=40, seed=3, report=said.append)
    assert figures["server_mib_end"] > 0
    assert " 5" not in said[-1].split("; ")[1].replace(" 200", "")  # no 5xx among the outcomes
