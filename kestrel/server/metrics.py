"""What a server counts: an observer of its requests, and the metrics that Prometheus reads, in a registry of their own.

With `watch = Observation(engine, model_name)` the application adds `watch` to the observers of engine requests,
`watch.middleware()` to its layers as the outermost ones, and `watch.router()` to its routes.

Every metric has the label `model_name`. Times of requests come from `RequestMetrics`, measured by the scheduler, so
they leave out reading the body and sending the answer, which `kestrel_http_request_duration_seconds` has. A metric
without other labels is there from the start, at zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from kestrel.engine import EngineResult, EngineSnapshot
from kestrel.engine.served import ServedEngine
from kestrel.request import FinishReason, RequestMetrics
from kestrel.server.records import METRICS_PATH, RecordedRequests, RequestRecord, access_log
from kestrel.server.schemas import refusals
from kestrel.server.tracing import TracedRequests

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5)
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""Always this one: the client library's OpenMetrics writer turns the colon of the vLLM names into an underscore."""
MODEL = "model_name"
M = TypeVar("M", bound=MetricWrapperBase)
NO_STATUS = "none"
"""The status of a request whose client left before there was one."""


class EngineCall(Protocol):
    """What is asked of a description of one engine request."""

    @property
    def skill(self) -> str: ...


class Observation:
    """Watches a server whose engine may still be loading: metrics begin when it is there."""

    def __init__(
        self,
        engine: Callable[[], ServedEngine | None],
        model_name: Callable[[], str | None],
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        self._engine = engine
        self._model_name = model_name
        self._tracer_provider = tracer_provider
        self._metrics: ServerMetrics | None = None

    def metrics(self) -> ServerMetrics | None:
        """None while the engine is loading."""
        if self._metrics is None and (engine := self._engine()) is not None:
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
            METRICS_PATH,
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
        router.add_api_route(METRICS_PATH, self._page, methods=["HEAD"], response_model=None, include_in_schema=False)
        return router

    async def _page(self) -> Response:
        metrics = self.metrics()
        if metrics is None:
            return PlainTextResponse("the engine is loading\n", status_code=503)
        return metrics.page()

    def _count(self, record: RequestRecord) -> None:
        metrics = self.metrics()
        if metrics is not None:
            metrics.http_request(record)


# ---------------------------------------------------------------------- what Prometheus reads


class ServerMetrics:
    """Observers for the request path, and the page that Prometheus scrapes."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineGauges(model_name, snapshot))
        self._model_name = model_name
        self._children: dict[tuple[MetricWrapperBase, tuple[str, ...]], Any] = {}
        self._count_requests()
        self._count_tokens()
        self._measure_times()

    # ------------------------------------------------------------------ observers

    def started(self, skill: str) -> None:
        """A request goes to the engine; exactly one `finished` or `failed` must follow."""
        self._of(self._started, skill).inc()
        self._of(self._in_progress, skill).inc()

    def finished(self, skill: str, metrics: RequestMetrics, finish_reason: str, adapter: str | None = None) -> None:
        """A request has its result. `adapter` is one that was loaded, so that clients cannot invent labels."""
        if adapter is not None:
            self._of(self._by_adapter, adapter).inc()
        self._of(self._in_progress, skill).dec()
        self._of(self._finished, skill, finish_reason).inc()
        self._of(self._vllm_success, finish_reason).inc()
        self._of(self._input_tokens, skill).inc(metrics.input_tokens)
        self._of(self._output_tokens, skill).inc(metrics.output_tokens)
        self._of(self._cached_tokens, skill).inc(metrics.cached_tokens)
        self._vllm_prompt_tokens.inc(metrics.input_tokens)
        self._vllm_generation_tokens.inc(metrics.output_tokens)
        self._observe_times(skill, metrics)
        for seconds in metrics.token_intervals_s:
            self.token_interval(seconds)

    def failed(self, skill: str, error_type: str) -> None:
        """A request ended without a result; `error_type` is the name of the error's class."""
        self._of(self._in_progress, skill).dec()
        self._of(self._failed, skill, error_type).inc()

    def token_interval(self, seconds: float) -> None:
        """The time between two tokens of one request."""
        self._vllm_inter_token.observe(seconds)

    def http_request(self, record: RequestRecord) -> None:
        """A watcher for `RecordedRequests`."""
        status = NO_STATUS if record.status is None else str(record.status)
        self._of(self._http_requests, record.method, record.route, status).inc()
        self._of(self._http_seconds, record.route).observe(record.latency_s)

    def _of(self, metric: M, *labels: str) -> M:
        """The metric with its labels, looked up in the library, which checks and locks, the first time alone."""
        child = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(self._model_name, *labels)
        return child

    # ------------------------------------------------------------------ the page

    def page(self) -> Response:
        return Response(self.text(), headers={"content-type": TEXT_FORMAT})

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ the metrics

    def _count_requests(self) -> None:
        self._started = self._counter("kestrel_requests_started", "Requests given to the engine.", "skill")
        self._finished = self._counter("kestrel_requests_finished", "Requests with a result.", "skill", "finish_reason")
        self._failed = self._counter("kestrel_requests_failed", "Requests without a result.", "skill", "error")
        self._by_adapter = self._counter(
            "kestrel_adapter_requests_finished", "Requests with a result that went through an adapter.", "adapter"
        )
        self._vllm_success = self._counter("vllm:request_success", "Requests with a result.", "finished_reason")
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._vllm_success.labels(self._model_name, reason.value)
        self._in_progress = Gauge(
            "kestrel_requests_in_progress",
            "Requests between started and their end.",
            [MODEL, "skill"],
            registry=self.registry,
        )
        self._http_requests = self._counter(
            "kestrel_http_requests", "HTTP requests answered.", "method", "route", "status"
        )

    def _count_tokens(self) -> None:
        self._input_tokens = self._counter("kestrel_input_tokens", "Tokens in, pictures included.", "skill")
        self._output_tokens = self._counter("kestrel_output_tokens", "Tokens generated.", "skill")
        self._cached_tokens = self._counter("kestrel_cached_tokens", "Tokens in that the cache had.", "skill")
        self._vllm_prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens in, pictures included.")
        self._vllm_generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")

    def _measure_times(self) -> None:
        self._seconds = self._histogram(
            "kestrel_request_duration_seconds", "Submission to the last token.", REQUEST_SECONDS, "skill"
        )
        self._first_token_seconds = self._histogram(
            "kestrel_time_to_first_token_seconds", "Submission to the first token.", FIRST_TOKEN_SECONDS, "skill"
        )
        self._http_seconds = self._histogram(
            "kestrel_http_request_duration_seconds", "First byte in to last byte out.", REQUEST_SECONDS, "route"
        )
        self._vllm_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Submission to the first token.", FIRST_TOKEN_SECONDS
        )
        self._vllm_inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_SECONDS
        )
        self._vllm_e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Submission to the last token.", REQUEST_SECONDS
        )
        self._vllm_queue = self._histogram(
            "vllm:request_queue_time_seconds", "Submission to the first step.", REQUEST_SECONDS
        )
        self._vllm_prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "First step to the first token.", REQUEST_SECONDS
        )
        self._vllm_decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to the last.", REQUEST_SECONDS
        )

    def _observe_times(self, skill: str, metrics: RequestMetrics) -> None:
        total_s = metrics.queue_time_ms / 1000.0 + metrics.processing_latency_s
        self._of(self._seconds, skill).observe(total_s)
        self._of(self._first_token_seconds, skill).observe(metrics.ttft_s)
        self._vllm_first_token.observe(metrics.ttft_s)
        self._vllm_e2e.observe(total_s)
        self._vllm_queue.observe(metrics.queue_time_ms / 1000.0)
        self._vllm_prefill.observe(metrics.prefill_time_ms / 1000.0)
        self._vllm_decode.observe(metrics.decode_latency_s)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """Exposed under `name` with `_total` appended."""
        counter = Counter(name, help_text, [MODEL, *labels], registry=self.registry)
        return counter if labels else counter.labels(self._model_name)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        histogram = Histogram(name, help_text, [MODEL, *labels], buckets=buckets, registry=self.registry)
        return histogram if labels else histogram.labels(self._model_name)


# ---------------------------------------------------------------------- the engine's numbers


class _EngineGauges(Collector):
    """Read at a scrape only. The vLLM names are those that dashboards and the Kubernetes inference gateway know."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._model_name = model_name
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        taken = self._snapshot()
        yield from self._own(taken)
        yield from self._of_adapters(taken)
        yield from self._as_vllm(taken)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask an engine that is still starting."""
        return iter(())

    def _own(self, taken: EngineSnapshot) -> Iterator[Metric]:
        yield self._gauge("kestrel_requests_running", "Requests that hold a row of the batch.", taken.num_running)
        yield self._gauge("kestrel_requests_waiting", "Accepted requests that hold none.", taken.num_waiting)
        yield self._gauge("kestrel_max_batch_size", "Requests that can run at the same time.", taken.max_batch_size)
        yield self._gauge("kestrel_kv_pages", "Pages of the KV cache.", taken.num_pages)
        yield self._gauge("kestrel_kv_pages_used", "Pages that running requests hold.", taken.num_used_pages)
        yield self._gauge("kestrel_kv_pages_cached", "Pages that hold a reusable prefix.", taken.num_cached_pages)
        yield self._gauge("kestrel_kv_page_positions", "Positions per page.", taken.page_size)
        yield self._counter(
            "kestrel_kv_pages_evicted", "Cached pages given up for other requests.", taken.evicted_pages_total
        )
        yield self._counter(
            "kestrel_preemptions",
            "Running requests sent back to the queue because the KV cache was full.",
            taken.preemptions_total,
        )
        yield self._gauge("kestrel_replicas", "Engines behind this server.", taken.num_replicas)
        yield self._counter("kestrel_retries", "Requests sent to another engine, theirs lost.", taken.retries_total)

    def _of_adapters(self, taken: EngineSnapshot) -> Iterator[Metric]:
        yield self._gauge("kestrel_adapter_slots", "Adapters that can be in use at once.", taken.num_adapter_slots)
        yield self._gauge("kestrel_adapters_running", "Adapters in use.", len(taken.running_adapters))
        yield self._gauge("kestrel_adapters_waiting", "Adapters that wait for a slot.", len(taken.waiting_adapters))
        yield self._gauge("kestrel_adapters_kept", "Adapters in the host's memory.", len(taken.kept_adapters))
        yield self._counter(
            "kestrel_adapter_slot_loads", "Adapters copied to the device.", taken.adapter_slot_loads_total
        )
        yield self._counter("kestrel_adapter_loads", "Adapters read from files.", taken.adapter_loads_total)
        yield self._counter(
            "kestrel_adapter_load_failures", "Adapters that could not be used.", taken.adapter_load_failures_total
        )
        yield self._counter(
            "kestrel_adapter_load_seconds", "Seconds spent on reads and downloads.", taken.adapter_load_seconds_total
        )

    def _as_vllm(self, taken: EngineSnapshot) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests that hold a row of the batch.", taken.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Accepted requests that hold none.", taken.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", taken.kv_usage)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", taken.prefix_query_tokens_total
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", taken.prefix_hit_tokens_total
        )
        yield self._counter("vllm:num_preemptions", "Requests sent back to the queue.", taken.preemptions_total)
        yield self._labelled(
            "vllm:cache_config_info",
            "The KV cache; always 1.",
            {"block_size": str(taken.page_size), "num_gpu_blocks": str(taken.num_pages)},
            1.0,
        )
        yield self._labelled(
            "vllm:lora_requests_info",
            "Adapters in use; the value is the time of the reading.",
            {
                "max_lora": str(taken.num_adapter_slots),
                "running_lora_adapters": ",".join(taken.running_adapters),
                "waiting_lora_adapters": ",".join(taken.waiting_adapters),
            },
            time.time(),
        )

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        return self._labelled(name, help_text, {}, value)

    def _labelled(self, name: str, help_text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=[MODEL, *labels])
        family.add_metric([self._model_name, *labels.values()], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        """Exposed under `name` with `_total` appended."""
        family = CounterMetricFamily(name, help_text, labels=[MODEL])
        family.add_metric([self._model_name], value)
        return family
