"""Logs: one line per request, with the numbers and without what was asked."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest

from kestrel.errors import ConfigError
from kestrel.server.records import LOGGERS, RequestRecord, access_log, configure_logs
from tests.server.recorded_app import SECRET, client_of, recorded


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def log(format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logs(format, level, stream)
    return stream


async def test_a_json_line_has_all_numbers_of_the_request() -> None:
    lines = log("json")
    async with client_of(recorded([access_log])) as client:
        await client.post("/v1/query", json={"question": SECRET}, headers={"x-request-id": "r1"})
    (line,) = [json.loads(text) for text in lines.getvalue().splitlines()]
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line.pop("latency_ms") > 0
    assert line == {
        "level": "info",
        "logger": "kestrel.server.access",
        "message": "request",
        "request_id": "r1",
        "method": "POST",
        "route": "/v1/{skill}",
        "skill": "query",
        "status": 200,
        "finish_reason": "stop",
        "input_tokens": 740,
        "output_tokens": 5,
        "cached_tokens": 730,
        "ttft_ms": 12.5,
    }


@pytest.mark.parametrize("format", ["json", "text"])
async def test_what_was_asked_and_answered_is_in_no_line(format: str) -> None:
    lines = log(format, "debug")
    async with client_of(recorded([access_log])) as client:
        await client.post(f"/v1/query?q={SECRET}", json={"question": SECRET, "image_url": SECRET})
        await client.get("/v1/crash")
        await client.get(f"/{SECRET}")
    assert len(lines.getvalue().splitlines()) == 3
    assert "barn" not in lines.getvalue()


async def test_a_text_line_reads_at_a_glance() -> None:
    lines = log("text")
    async with client_of(recorded([access_log])) as client:
        await client.get("/v1/busy")
    (line,) = lines.getvalue().splitlines()
    assert " warning request request_id=chosen-by-the-handler method=GET route=/v1/busy status=503 " in line
    assert "error=QueueFull" in line


async def test_health_checks_are_silent_until_debug() -> None:
    lines = log("json")
    async with client_of(recorded([access_log])) as client:
        await client.get("/healthz")
        assert lines.getvalue() == ""
        lines = log("json", "debug")
        await client.get("/healthz")
    assert json.loads(lines.getvalue())["route"] == "/healthz"


@pytest.mark.parametrize(
    ("route", "status", "level"),
    [
        ("/ready", 503, "debug"),
        ("/healthz", 500, "error"),
        ("/v1/query", 200, "info"),
        ("/v1/query", 404, "info"),
        ("/v1/query", 503, "warning"),
        ("/v1/query", 500, "error"),
    ],
)
def test_the_level_says_whether_someone_should_look(route: str, status: int, level: str) -> None:
    lines = log("json", "debug")
    access_log(RequestRecord("r", "GET", route, status=status))
    assert json.loads(lines.getvalue())["level"] == level


def test_a_client_that_left_is_marked() -> None:
    lines = log("json")
    access_log(RequestRecord("r", "POST", client_gone=True))
    line = json.loads(lines.getvalue())
    assert line["client_gone"] is True
    assert "status" not in line


@pytest.mark.parametrize("format", ["json", "text"])
def test_nobody_can_write_a_second_line(format: str) -> None:
    lines = log(format)
    logging.getLogger("kestrel.server").warning("bad name %s", "x\n12:00:00 info forged\x1b[2J")
    access_log(RequestRecord("r", "POST", skill="a\nb c"))
    assert len(lines.getvalue().splitlines()) == 2
    assert "\x1b" not in lines.getvalue()


def test_an_exception_keeps_its_traceback() -> None:
    lines = log("json")
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("kestrel").exception("it broke")
    line = json.loads(lines.getvalue())
    assert line["message"] == "it broke"
    assert "ValueError: inside" in line["traceback"]


def test_the_http_servers_own_start_is_told_at_debug_level_only() -> None:
    for level, num_lines in (("info", 0), ("debug", 1)):
        lines = io.StringIO()
        configure_logs("text", level, lines)
        logging.getLogger("uvicorn.error").info("Started server process")
        assert len(lines.getvalue().splitlines()) == num_lines


async def test_lines_of_requests_can_be_left_out() -> None:
    for access, num_lines in ((False, 1), (True, 2)):
        lines = io.StringIO()
        configure_logs("text", "info", lines, access=access)
        async with client_of(recorded([access_log])) as client:
            await client.post("/v1/query", json={"question": SECRET})
        logging.getLogger("kestrel.server").info("something else")
        assert len(lines.getvalue().splitlines()) == num_lines


def test_configuring_twice_writes_once() -> None:
    first, second = log("json"), log("text")
    logging.getLogger("uvicorn.error").warning("busy")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("format", "level", "field"), [("xml", "info", "log_format"), ("json", "loud", "log_level")])
def test_an_unknown_format_or_level_is_refused_by_name(format: str, level: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: .* use one of") as refusal:
        configure_logs(format, level)
    assert refusal.value.field == field


def test_importing_the_server_configures_no_logger() -> None:
    script = (
        "import logging\n"
        "import kestrel.server.records\n"
        "loggers = [logging.getLogger(), logging.getLogger('kestrel'), logging.getLogger('uvicorn')]\n"
        "assert all(not l.handlers and l.propagate for l in loggers)\n"
        "assert loggers[1].level == logging.NOTSET\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
