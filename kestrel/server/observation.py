"""All that watches a server, in one object that the application includes.

With `watch = Observation(engine, model_name)` the application adds `watch` to the observers of engine requests,
`watch.middleware()` to its layers just inside the one that gives request ids, and `watch.router()` to its routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from kestrel.engine import EngineResult, InferenceEngine
from kestrel.server.logs import access_log
from kestrel.server.metrics import ServerMetrics
from kestrel.server.native_schemas import refusals
from kestrel.server.records import RecordedRequests, RequestRecord
from kestrel.server.tracing import TracedRequests

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class EngineCall(Protocol):
    """What is asked of a description of one engine request."""

    @property
    def skill(self) -> str: ...


class Observation:
    """Watches a server whose engine may still be loading: metrics begin when it is there."""

    def __init__(
        self,
        engine: Callable[[], InferenceEngine | None],
        model_name: Callable[[], str | None],
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        self._engine = engine
        self._model_name = model_name
        self._tracer_provider = tracer_provider
        self._metrics: ServerMetrics | None = None

    def metrics(self) -> ServerMetrics | None:
        """None while the engine is loading."""
        engine = self._engine()
        if self._metrics is None and engine is not None:
            self._metrics = ServerMetrics(self._model_name() or engine.model_name, engine.snapshot)
        return self._metrics

    # ------------------------------------------------------------------ engine requests

    def started(self, request: EngineCall) -> None:
        record, metrics = RequestRecord.current(), self.metrics()
        if record is not None:
            record.skill = request.skill
        if metrics is not None:
            metrics.started(request.skill)

    def finished(self, request: EngineCall, outcome: EngineResult | BaseException) -> None:
        record, metrics = RequestRecord.current(), self.metrics()
        if isinstance(outcome, EngineResult):
            if record is not None:
                record.add_result(outcome.metrics, outcome.finish_reason)
            if metrics is not None:
                metrics.finished(request.skill, outcome.metrics, outcome.finish_reason, outcome.adapter)
            return
        if record is not None:
            record.error_type = type(outcome).__name__
        if metrics is not None:
            metrics.failed(request.skill, type(outcome).__name__)

    # ------------------------------------------------------------------ HTTP requests

    def middleware(self, routes: Sequence[BaseRoute] = ()) -> list[Middleware]:
        """Records with access log and counts, and spans when there is a tracer; outermost first."""
        layers = [Middleware(RecordedRequests, watchers=[access_log, self._count], routes=routes)]
        if self._tracer_provider is not None:
            layers.append(
                Middleware(TracedRequests, provider=self._tracer_provider, model_name=lambda: self._model_name() or "")
            )
        return layers

    def router(self) -> APIRouter:
        """GET and HEAD /metrics; 503 while the engine is loading."""
        router = APIRouter(tags=["operations"])
        text: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        router.add_api_route(
            "/metrics",
            self._page,
            methods=["GET"],
            response_class=PlainTextResponse,
            response_model=None,
            responses={
                200: {"description": "Metrics in the Prometheus text format.", "content": text},
                503: {"description": "The engine is loading.", "content": text},
                **refusals(401),
            },
        )
        router.add_api_route("/metrics", self._page, methods=["HEAD"], response_model=None, include_in_schema=False)
        return router

    async def _page(self) -> Response:
        metrics = self.metrics()
        if metrics is None:
            return PlainTextResponse("the engine is loading\n", status_code=503)
        return await metrics.page()

    def _count(self, record: RequestRecord) -> None:
        metrics = self.metrics()
        if metrics is not None:
            metrics.http_request(record)
