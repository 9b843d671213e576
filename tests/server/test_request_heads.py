"""Heads: what is no HTTP, heads that are too large, bodies framed or encoded in ways that are not taken."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from tests.server.conftest import RunningServer
from tests.server.sockets import JSON, POST_QUERY
from tests.server.test_server_limits import connect, read_all

QUESTION = {"question": "Who are you?", "max_tokens": 1}


def answer_to(server: RunningServer, request: bytes) -> tuple[int, dict[str, str], dict[str, str]]:
    """Status, headers and error of the answer to bytes after which the server hangs up."""
    with connect(server) as connection:
        connection.sendall(request)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    line, *rest = head.decode("ascii").split("\r\n")
    headers = dict(entry.lower().split(": ", 1) for entry in rest)
    return int(line.split()[1]), headers, json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        f"{POST_QUERY}content-length: many\r\n\r\n".encode(),
        f"{POST_QUERY}transfer-encoding: chunked\r\n\r\nzz\r\n".encode(),
    ],
)
def test_what_is_no_http_is_refused_as_all_else_and_with_an_id(server: RunningServer, request_bytes: bytes) -> None:
    status, headers, error = answer_to(server, request_bytes)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert headers["content-type"] == "application/json"
    assert len(headers["x-request-id"]) == 32


def test_a_large_head_is_refused_even_when_it_comes_in_one_piece(server: RunningServer) -> None:
    limit = server.state.config.max_header_bytes
    status, headers, error = answer_to(
        server, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * limit + b"\r\n\r\n"
    )
    assert (status, error["code"]) == (431, "headers_too_large")
    assert (headers["connection"], len(headers["x-request-id"])) == ("close", 32)


def test_a_body_framed_in_two_ways_ends_the_connection(server: RunningServer) -> None:
    """A proxy that went by the other header would take the rest for somebody else's request."""
    framing = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    smuggled = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    status, headers, error = answer_to(server, POST_QUERY.encode() + framing + smuggled)
    assert (status, error["code"], headers["connection"]) == (400, "ambiguous_length", "close")


def test_a_compressed_body_is_refused_by_name(client: httpx.Client) -> None:
    body = gzip.compress(json.dumps(QUESTION).encode())
    response = client.post("/v1/query", content=body, headers={**JSON, "content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert "gzip" in response.json()["error"]["message"]
    plain = client.post("/v1/query", json=QUESTION, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize(
    ("change", "param"), [({"request_id": ""}, "request_id"), ({"model": "kestrel-tiny/"}, "adapter")]
)
def test_an_empty_name_is_refused_and_not_taken_for_none(
    client: httpx.Client, change: dict[str, str], param: str
) -> None:
    response = client.post("/v1/query", json={**QUESTION, **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
