"""OpenTelemetry: one SERVER span per HTTP request, with the GenAI attributes. Optional: the extra `otel`.

A `traceparent` header makes the span a child of the caller's. Attributes are names and numbers, never a prompt or a
picture. Health checks and the metrics page make no spans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kestrel.errors import ConfigError
from kestrel.server.records import QUIET_ROUTES, SETTINGS, RequestRecord, route_path

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

PROVIDER = "kestrel"
OPERATIONS = {"chat": "chat", "complete": "text_completion", "embed": "embeddings"}
"""Skills with a well-known operation name; the others go by their own."""
REMEDY = "needs OpenTelemetry, which is not installed; run `pip install -e '.[otel]'` in the checkout, or leave it out"


def otlp_provider(service_name: str, endpoint: str | None = None) -> TracerProvider:
    """Spans to an OTLP collector over HTTP; without `endpoint` the `OTEL_EXPORTER_OTLP_*` variables say where."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError("otlp_endpoint", REMEDY) from error
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class TracedRequests:
    """The ASGI layer inside `RecordedRequests`. Whoever made the provider shuts it down, which sends the last spans."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, model_name: Callable[[], str]) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ConfigError("otlp_endpoint", REMEDY) from error
        self._app = app
        self._model_name = model_name
        self._tracer: Tracer = provider.get_tracer("kestrel.server")
        self._propagator = TraceContextTextMapPropagator()
        self._server_kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in QUIET_ROUTES:
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        caller = self._propagator.extract(_trace_headers(scope))
        with self._tracer.start_as_current_span(
            record.method, caller, self._server_kind, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                await self._app(scope, receive, send)
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(self._error)
                raise
            finally:
                self._describe(span, record, scope)

    def _describe(self, span: Span, record: RequestRecord, scope: Scope) -> None:
        record.find_route(scope)
        span.update_name(f"{record.method} {record.route}")
        attributes = {**_http_attributes(record, scope), **_genai_attributes(record, self._model_name())}
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if record.status is not None and record.status >= 500:
            span.set_status(self._error)


def _trace_headers(scope: Scope) -> dict[str, str]:
    headers = Headers(scope=scope)
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _http_attributes(record: RequestRecord, scope: Scope) -> Mapping[str, str | int | bool | None]:
    return {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "url.scheme": scope["scheme"],
        "url.path": scope["path"],
        "error.type": record.error_type,
        "kestrel.request_id": record.request_id,
        "kestrel.client_gone": record.client_gone or None,
    }


def _genai_attributes(record: RequestRecord, model_name: str) -> Mapping[str, str | int | float | list[str] | None]:
    if record.skill is None:
        return {}
    attributes: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.operation.name": OPERATIONS.get(record.skill, record.skill),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_name,
        "gen_ai.response.finish_reasons": None if record.finish_reason is None else [record.finish_reason],
    }
    for setting in SETTINGS:
        value = record.settings.get(setting)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            attributes[f"gen_ai.request.{setting}"] = value
    if record.metrics is not None:
        attributes["gen_ai.usage.input_tokens"] = record.metrics.input_tokens
        attributes["gen_ai.usage.output_tokens"] = record.metrics.output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.metrics.cached_tokens
    return attributes
