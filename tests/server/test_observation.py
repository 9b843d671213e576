"""All watchers together around a real engine: one call, and log, metrics and span tell the same story."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kestrel.engine import EngineResult, InferenceEngine
from kestrel.errors import RequestError
from kestrel.server.metrics import Observation
from kestrel.server.records import LOGGERS, configure_logs
from tests.scene import SCENE
from tests.server.pages import Page
from tests.server.recorded_app import client_of
from tests.server.tiny import tiny_engine


@dataclass(frozen=True)
class Call:
    skill: str


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def application(watch: Observation, engine: InferenceEngine) -> FastAPI:
    """Calls the engine as the server does: the watcher is told of the start and of every end."""

    @asynccontextmanager
    async def told(skill: str) -> AsyncIterator[SimpleNamespace]:
        call, held = Call(skill), SimpleNamespace(outcome=None)
        watch.started(call)
        try:
            yield held
        except Exception as error:
            held.outcome = error
            raise
        finally:
            watch.finished(call, held.outcome)

    async def query(request: Request) -> Response:
        questions = (await request.json())["questions"]
        results: list[EngineResult] = []
        try:
            for question in questions:
                async with told("query") as held:
                    held.outcome = await engine.query(SCENE, question, reasoning=False, temperature=0.0)
                    results.append(held.outcome)
        except RequestError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse([[r.metrics.input_tokens, r.metrics.output_tokens] for r in results])

    app = FastAPI(middleware=watch.middleware())
    app.include_router(watch.router())
    app.add_api_route("/v1/query", query, methods=["POST"], response_model=None)
    return app


async def test_log_metrics_and_span_agree_about_a_real_call() -> None:
    async with tiny_engine() as engine:
        exporter, provider, lines = InMemorySpanExporter(), TracerProvider(), io.StringIO()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        configure_logs("json", "info", lines)
        watch = Observation(lambda: engine, lambda: "served-name", provider)
        async with client_of(application(watch, engine)) as client:
            answer = await client.post("/v1/query", json={"questions": ["Is there a bee?", "Is there a dog?"]})
            page = Page((await client.get("/metrics")).text)
        tokens_in, tokens_out = (sum(column) for column in zip(*answer.json(), strict=True))
        line = json.loads(lines.getvalue().splitlines()[0])
        (span,) = exporter.get_finished_spans()
        attributes = span.attributes or {}
        assert (line["input_tokens"], line["output_tokens"]) == (tokens_in, tokens_out)
        assert page.value("vllm:prompt_tokens_total", model_name="served-name") == tokens_in
        assert page.value("vllm:generation_tokens_total") == tokens_out
        assert attributes["gen_ai.usage.input_tokens"] == tokens_in
        assert attributes["gen_ai.usage.output_tokens"] == tokens_out
        assert (line["skill"], attributes["gen_ai.operation.name"]) == ("query", "query")
        assert attributes["gen_ai.request.model"] == "served-name"
        assert page.value("kestrel_requests_finished_total", skill="query", finish_reason="stop") == 2
        assert page.value("kestrel_http_requests_total", route="/v1/query", status="200") == 1
        assert line["request_id"] == attributes["kestrel.request_id"] == answer.headers["x-request-id"]
        provider.shutdown()


async def test_a_refused_call_is_a_failure_everywhere() -> None:
    async with tiny_engine() as engine:
        lines = io.StringIO()
        configure_logs("json", "info", lines)
        watch = Observation(lambda: engine, lambda: None)
        async with client_of(application(watch, engine)) as client:
            assert (await client.post("/v1/query", json={"questions": [7]})).status_code == 400
            page = Page((await client.get("/metrics")).text)
        assert json.loads(lines.getvalue().splitlines()[0])["error"] == "RequestError"
        assert page.value("kestrel_requests_failed_total", model_name="kestrel-tiny", error="RequestError") == 1
        assert page.value("kestrel_requests_in_progress", skill="query") == 0


async def test_while_the_engine_loads_the_page_says_so_and_nothing_breaks() -> None:
    watch = Observation(lambda: None, lambda: None)
    watch.started(Call("query"))
    watch.finished(Call("query"), RequestError("question", "is missing"))
    app = FastAPI(middleware=watch.middleware())
    app.include_router(watch.router())
    async with client_of(app) as client:
        assert (await client.get("/metrics")).status_code == 503
