"""Answer formats made to cost as much as they can, sent to `kestrel serve`: refused, while it serves everybody else."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import eventually, has_ended, tree
from tests.server.programs import Program

ATTACK = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{10 + i}}}"} for i in range(24)]}
"""Judged by its text. Compiled, it takes gigabytes and does not end."""
SLOW = {"enum": [f"{i}" for i in range(6500)], "type": "string", "pattern": "(.{0,40}[0-9].{0,9}){0,40}"}
"""Harmless by its text; compiling takes seconds."""
LARGE = {
    "allOf": [{"properties": {"a": {"enum": [f"v{i}" for i in range(1800)]}}}, {"anyOf": [{"type": "object"}] * 1500}]
}
"""The same, and hundreds of megabytes."""
MAX_GROWTH_BYTES = 500 * 2**20


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("formats") / "log", "--drain-timeout-s", "0.5")
    yield program
    program.kill()


def ask(url: str, schema: dict[str, Any]) -> httpx.Response:
    body = {
        "model": "kestrel-tiny",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "What is it?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def with_title(schema: dict[str, Any], number: int) -> dict[str, Any]:
    return {**schema, "title": str(number)}


def own_bytes(pid: int) -> int:
    """What a process has for itself alone: what it shares with a parent that forked it is counted once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Watch(threading.Thread):
    """The most memory that a program and its children had at any time."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self._is_over = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._is_over.wait(0.05):
            self.most = max(self.most, sum(map(own_bytes, tree(self._pid))))

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


TIMES = 2


@pytest.mark.exhaustive
def test_a_costly_format_is_refused_while_others_are_answered_and_memory_stays(program: Program) -> None:
    url = program.url()
    assert ask(url, {"type": "boolean"}).status_code == 200
    before = sum(map(own_bytes, tree(program.process.pid)))
    hostile = [with_title(schema, number) for number in range(TIMES) for schema in (ATTACK, LARGE)] + [SLOW]
    with ThreadPoolExecutor(len(hostile)) as pool, Watch(program.process.pid) as watch:
        refused = [pool.submit(ask, url, schema) for schema in hostile]
        answered = [ask(url, with_title({"type": "integer", "maximum": 9}, i)).status_code for i in range(4)]
        replies = [one.result() for one in refused]
    assert answered == [200] * 4
    assert replies.pop().status_code in (200, 400)  # a fast processor may have been done in time
    for reply, reason in zip(replies, ("24 complex", "memory") * TIMES, strict=True):
        assert reply.status_code == 400
        assert "response_format" in reply.text
        assert reason in reply.text
    assert watch.most - before < MAX_GROWTH_BYTES


def test_properties_may_be_named_like_keywords(program: Program) -> None:
    names = ("multipleOf", "pattern", "patternProperties", "$ref", "allOf", "x-guidance")
    schema = {"type": "object", "properties": {name: {"type": "integer", "maximum": 9} for name in names}}
    assert ask(program.url(), schema).status_code == 200


def test_a_termination_while_a_format_compiles_ends_every_process(program: Program) -> None:
    url = program.url()
    assert ask(url, {"type": "null"}).status_code == 200
    idle = len(tree(program.process.pid))
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(ask, url, with_title(SLOW, 2))
        assert eventually(lambda: len(tree(program.process.pid)) > idle)
        everybody = tree(program.process.pid)
        assert program.end(signal.SIGTERM) == 0
        assert last.exception() is not None or last.result().status_code in (400, 503)
    assert eventually(lambda: all(map(has_ended, everybody)))
