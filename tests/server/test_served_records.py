"""What the real application leaves in the record of a request, from which log, metrics and spans are made."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Receive, Scope, Send

from kestrel.server.records import RecordedRequests, RequestRecord
from kestrel.server.tracing import TracedRequests
from tests.server.conftest import RunningServer

QUESTION = {"question": "Who are you?"}


def record_of(server: RunningServer, method: str, path: str, body: Any = None) -> RequestRecord:
    """Asks the application on its own loop and returns the record of the request."""
    records: list[RequestRecord] = []

    async def spied(scope: Scope, receive: Receive, send: Send) -> None:
        await server.app(scope, receive, send)
        records.append(RequestRecord.of(scope))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(spied), base_url="http://localhost") as client:
            await client.request(method, path, json=body)

    server.on_loop(ask)
    return records[0]


@pytest.mark.parametrize(
    "given",
    [
        {"settings": {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 2}},
        {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_new_tokens": 2},
        {"temperature": 0.5, "top_p": 0.9, "seed": 7, "settings": {"max_tokens": 2}, "stream": True},
    ],
)
def test_sampling_settings_are_recorded_and_nothing_else_is(server: RunningServer, given: dict[str, Any]) -> None:
    record = record_of(server, "POST", "/v1/query", {**QUESTION, "stop": ["secret"], **given})
    assert record.status == 200
    assert record.settings == {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 2}


@pytest.mark.parametrize(("path", "body"), [("/v1/query", QUESTION), ("/v1/completions", {"prompt": "Who"})])
def test_settings_that_were_refused_are_not_recorded(server: RunningServer, path: str, body: dict[str, str]) -> None:
    """They may be of any size, and one that does not fit into a span would lose a whole batch of them."""
    record = record_of(server, "POST", path, {**body, "seed": 2**63})
    assert (record.status, record.settings) == (400, {})


@pytest.mark.parametrize(
    ("body", "error"), [([], "RequestError"), ({**QUESTION, "model": "another"}, "ModelNotFound"), ({}, "RequestError")]
)
def test_a_refusal_is_recorded_by_its_class(server: RunningServer, body: Any, error: str) -> None:
    assert record_of(server, "POST", "/v1/query", body).error_type == error


def test_a_refused_key_is_recorded_by_its_class(locked: RunningServer) -> None:
    assert record_of(locked, "POST", "/v1/query", QUESTION).error_type == "Unauthorised"


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1/query", "/v1/query"),
        ("GET", "/v1/models/kestrel-tiny/any", "/v1/models/{model:path}"),
        ("PUT", "/v1/query", "/v1/query"),
        ("GET", "/metrics", "/metrics"),
        ("GET", "/openapi.json", "/openapi.json"),
        ("POST", "/v1/nothing/secret", "unmatched"),
        ("GET", "/v1/query/secret", "unmatched"),
    ],
)
def test_a_refused_key_is_recorded_under_the_route_it_asked_for(
    locked: RunningServer, method: str, path: str, route: str
) -> None:
    record = record_of(locked, method, path)
    assert (record.status, record.route) == (401, route)


def test_an_invented_method_is_no_label(server: RunningServer) -> None:
    """Each label is a time series, and a client can invent any number of methods."""
    assert record_of(server, "BREW", "/v1/query").method == "_OTHER"
    assert record_of(server, "DELETE", "/v1/query").method == "DELETE"


async def test_health_checks_under_a_root_path_make_no_spans() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = RecordedRequests(TracedRequests(answer, provider, lambda: "tiny"), [])
    transport = httpx.ASGITransport(app, root_path="/vision")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.get("/vision/healthz")
        assert exporter.get_finished_spans() == ()
        await client.get("/vision/v1/query")
    assert len(exporter.get_finished_spans()) == 1
    provider.shutdown()
