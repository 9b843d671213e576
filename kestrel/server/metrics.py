"""What Prometheus reads: requests, tokens and times, in a registry of the server's own.

Every metric has the label `model_name`. Times of requests come from `RequestMetrics`, measured by the scheduler, so
they leave out reading the body and sending the answer, which `kestrel_http_request_duration_seconds` has. A metric
without other labels is there from the start, at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from starlette.responses import Response

from kestrel.engine import EngineSnapshot
from kestrel.request import FinishReason, RequestMetrics
from kestrel.server.engine_gauges import MODEL, EngineGauges
from kestrel.server.records import RequestRecord

REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5)
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""Always this one: the client library's OpenMetrics writer turns the colon of the vLLM names into an underscore."""
M = TypeVar("M", bound=MetricWrapperBase)
NO_STATUS = "none"
"""The status of a request whose client left before there was one."""


class ServerMetrics:
    """Observers for the request path, and the page that Prometheus scrapes."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineGauges(model_name, snapshot))
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

    async def page(self) -> Response:
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
