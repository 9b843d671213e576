"""Tracing: one SERVER span per request, child of the caller's, with the GenAI attributes and no content."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from kestrel.server.tracing import TracedRequests, otlp_provider
from tests.server.recorded_app import SECRET, client_of, recorded, routes

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.app = recorded([], TracedRequests(routes(), self.provider, lambda: "kestrel-tiny"))

    def span(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    setup = Traced()
    yield setup
    setup.provider.shutdown()


async def test_a_request_is_one_server_span_with_genai_attributes(traced: Traced) -> None:
    async with client_of(traced.app) as client:
        await client.post("/v1/query", json={"question": SECRET}, headers={"x-request-id": "r1"})
    span = traced.span()
    assert (span.name, span.kind, span.parent) == ("POST /v1/{skill}", SpanKind.SERVER, None)
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/{skill}",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/v1/query",
        "kestrel.request_id": "r1",
        "gen_ai.operation.name": "query",
        "gen_ai.provider.name": "kestrel",
        "gen_ai.request.model": "kestrel-tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 740,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 730,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert "barn" not in span.to_json()


@pytest.mark.parametrize(("skill", "operation"), [("chat", "chat"), ("complete", "text_completion")])
async def test_well_known_operations_have_their_well_known_names(traced: Traced, skill: str, operation: str) -> None:
    async with client_of(traced.app) as client:
        await client.post(f"/v1/{skill}", json={})
    assert (traced.span().attributes or {})["gen_ai.operation.name"] == operation


async def test_the_callers_trace_goes_on(traced: Traced) -> None:
    async with client_of(traced.app) as client:
        await client.post("/v1/query", headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})
    span = traced.span()
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID


async def test_a_broken_traceparent_starts_a_new_trace(traced: Traced) -> None:
    async with client_of(traced.app) as client:
        assert (await client.post("/v1/query", headers={"traceparent": "00-zz-1-01"})).status_code == 200
    assert traced.span().parent is None


async def test_refusals_and_crashes_are_errors_without_their_texts(traced: Traced) -> None:
    async with client_of(traced.app) as client:
        await client.get("/v1/busy")
        await client.get("/v1/crash")
    busy, crashed = traced.exporter.get_finished_spans()
    assert [s.status.status_code for s in (busy, crashed)] == [StatusCode.ERROR] * 2
    assert (busy.attributes or {})["error.type"] == "QueueFull"
    assert (crashed.attributes or {})["error.type"] == "RuntimeError"
    assert "barn" not in crashed.to_json()


async def test_health_checks_make_no_spans(traced: Traced) -> None:
    async with client_of(traced.app) as client:
        await client.get("/healthz")
    assert traced.exporter.get_finished_spans() == ()


async def test_spans_made_in_a_handler_are_children(traced: Traced) -> None:
    current: list[int] = []

    async def handler(request: Request) -> Response:
        current.append(get_current_span().get_span_context().span_id)
        return Response("ok")

    app = TracedRequests(Router([Route("/inside", handler)]), traced.provider, lambda: "kestrel-tiny")
    async with client_of(recorded([], app)) as client:
        await client.get("/inside")
    context = traced.span().context
    assert context is not None
    assert current == [context.span_id]


def test_the_otlp_provider_carries_the_service_name() -> None:
    provider = otlp_provider("kestrel-eu", "http://127.0.0.1:9/v1/traces")
    assert provider.resource.attributes["service.name"] == "kestrel-eu"
    provider.shutdown()


def test_without_the_package_only_asking_for_tracing_is_refused() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None
import kestrel.server.tracing as tracing
from kestrel.errors import ConfigError
try:
    tracing.otlp_provider("kestrel")
except ConfigError as error:
    assert error.field == "otlp_endpoint" and "pip install -e '.[otel]'" in str(error), error
else:
    raise AssertionError("not refused")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
