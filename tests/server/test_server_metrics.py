"""Metrics: what the page says is what went through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from kestrel.engine import EngineResult, EngineSnapshot, InferenceEngine
from kestrel.request import RequestMetrics
from kestrel.server.metrics import ServerMetrics
from kestrel.server.records import RecordedRequests
from tests.scene import SCENE
from tests.server.pages import VLLM_NAMES, Page
from tests.server.tiny import tiny_engine

QUESTIONS = ("How many bees are there?", "Is there a bee?", "Is there a dog?")


def idle() -> EngineSnapshot:
    return EngineSnapshot(0, 0, 100, 25, 30, 16, 8, 0, 0, 0, 0)


async def scrape(metrics: ServerMetrics, accept: str = "*/*") -> httpx.Response:
    app = FastAPI()
    app.add_api_route("/metrics", metrics.page, response_model=None)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get("/metrics", headers={"accept": accept})


async def page(metrics: ServerMetrics) -> Page:
    return Page((await scrape(metrics)).text)


async def ask(engine: InferenceEngine, metrics: ServerMetrics, question: str) -> EngineResult:
    metrics.started("query")
    result = await engine.query(SCENE, question, reasoning=False, temperature=0.0)
    metrics.finished("query", result.metrics, result.finish_reason)
    return result


async def test_every_name_of_the_gateway_is_there_before_the_first_request() -> None:
    fresh = await page(ServerMetrics("tiny", idle))
    assert {name: fresh.types.get(name) for name in VLLM_NAMES} == VLLM_NAMES
    assert all(sample.labels["model_name"] == "tiny" for sample in fresh.samples)
    for name, kind in VLLM_NAMES.items():
        suffix = {"gauge": "", "counter": "_total", "histogram": "_count"}[kind]
        assert name + suffix in fresh.sample_names


async def test_gauges_are_the_snapshot() -> None:
    seen = await page(ServerMetrics("tiny", lambda: EngineSnapshot(3, 7, 100, 25, 30, 16, 8, 500, 200, 11, 2)))
    assert seen.value("vllm:num_requests_running") == seen.value("kestrel_requests_running") == 3
    assert seen.value("vllm:num_requests_waiting") == seen.value("kestrel_requests_waiting") == 7
    assert seen.value("vllm:kv_cache_usage_perc") == 0.25
    assert seen.value("kestrel_kv_pages_cached") == 30
    assert seen.value("vllm:prefix_cache_queries_total") == 500
    assert seen.value("vllm:prefix_cache_hits_total") == 200
    assert seen.value("kestrel_preemptions_total") == 2
    assert seen.value("kestrel_kv_pages_evicted_total") == 11
    assert seen.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert seen.value("vllm:lora_requests_info", max_lora="0", running_lora_adapters="") > 1.6e9


async def test_counters_are_what_went_through_a_real_engine() -> None:
    async with tiny_engine() as engine:
        metrics = ServerMetrics(engine.model_name, engine.snapshot)
        results = list(await asyncio.gather(*(ask(engine, metrics, question) for question in QUESTIONS)))
        results.append(await ask(engine, metrics, QUESTIONS[0]))
        seen = await page(metrics)
        tokens_in = sum(r.metrics.input_tokens for r in results)
        tokens_out = sum(r.metrics.output_tokens for r in results)
        assert seen.value("vllm:prompt_tokens_total", model_name="kestrel-tiny") == tokens_in
        assert seen.value("vllm:generation_tokens_total") == tokens_out
        assert seen.value("kestrel_input_tokens_total", skill="query") == tokens_in
        assert seen.value("kestrel_output_tokens_total", skill="query") == tokens_out
        assert seen.value("vllm:prefix_cache_queries_total") == tokens_in
        hits = seen.value("vllm:prefix_cache_hits_total")
        assert hits == seen.value("kestrel_cached_tokens_total") == sum(r.metrics.cached_tokens for r in results) > 0
        assert seen.value("vllm:request_success_total", finished_reason="stop") == len(results)
        assert seen.value("vllm:request_success_total", finished_reason="length") == 0
        assert seen.value("kestrel_requests_started_total") == len(results)
        assert seen.value("kestrel_requests_in_progress") == 0
        assert seen.value("vllm:num_requests_running") == 0


async def test_histograms_sum_the_times_the_requests_report() -> None:
    async with tiny_engine() as engine:
        metrics = ServerMetrics("tiny", engine.snapshot)
        times = [(await ask(engine, metrics, question)).metrics for question in QUESTIONS]
        seen = await page(metrics)

        def near(total_ms: float) -> object:
            return pytest.approx(total_ms / 1000.0)

        assert seen.value("vllm:time_to_first_token_seconds_sum") == near(sum(t.ttft_ms for t in times))
        assert seen.value("vllm:request_queue_time_seconds_sum") == near(sum(t.queue_time_ms for t in times))
        assert seen.value("vllm:request_prefill_time_seconds_sum") == near(sum(t.prefill_time_ms for t in times))
        assert seen.value("vllm:request_decode_time_seconds_sum") == near(sum(t.decode_time_ms for t in times))
        whole = sum(t.ttft_ms + t.decode_time_ms for t in times)
        assert seen.value("vllm:e2e_request_latency_seconds_sum") == near(whole)
        assert seen.value("kestrel_request_duration_seconds_count", skill="query") == len(times)


async def test_intervals_between_tokens_are_the_real_ones() -> None:
    async with tiny_engine() as engine:
        metrics = ServerMetrics("tiny", engine.snapshot)
        metrics.started("caption")
        result = await engine.caption(SCENE, "normal", temperature=0.0)
        metrics.finished("caption", result.metrics, result.finish_reason)
        seen = await page(metrics)
        assert result.metrics.output_tokens > 5
        assert seen.value("vllm:inter_token_latency_seconds_count") == result.metrics.output_tokens - 1
        whole = seen.value("vllm:inter_token_latency_seconds_sum")
        assert whole == pytest.approx(sum(result.metrics.token_intervals_s))
        assert 0 < whole <= result.metrics.decode_latency_s


async def test_each_interval_lands_in_its_own_bucket() -> None:
    metrics = ServerMetrics("tiny", idle)
    metrics.started("query")
    metrics.finished("query", RequestMetrics(output_tokens=4, token_intervals_s=[0.002, 0.03, 0.7]), "stop")
    metrics.token_interval(0.002)
    seen = await page(metrics)
    upto = {
        le: seen.value("vllm:inter_token_latency_seconds_bucket", le=le) for le in ("0.001", "0.0025", "0.05", "1.0")
    }
    assert upto == {"0.001": 0, "0.0025": 2, "0.05": 3, "1.0": 4}


async def test_a_failure_is_no_success() -> None:
    metrics = ServerMetrics("tiny", idle)
    for end in (lambda: metrics.failed("detect", "RequestError"), lambda: metrics.failed("detect", "QueueFull")):
        metrics.started("detect")
        end()
    seen = await page(metrics)
    assert seen.value("kestrel_requests_failed_total", skill="detect", error="QueueFull") == 1
    assert seen.total("kestrel_requests_failed_total") == 2
    assert seen.total("vllm:request_success_total") == 0
    assert seen.value("kestrel_requests_in_progress", skill="detect") == 0


async def test_http_requests_are_counted_by_pattern_not_by_path() -> None:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("yes", status_code=int(request.path_params["status"]))

    metrics = ServerMetrics("tiny", idle)
    inner = FastAPI()
    inner.add_api_route("/v1/{status}", answer, response_model=None)
    app = RecordedRequests(inner, [metrics.http_request])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path in ("/v1/200", "/v1/200", "/v1/400", "/wp-login.php", "/.env"):
            await client.get(path)
    seen = await page(metrics)
    assert seen.value("kestrel_http_requests_total", method="GET", route="/v1/{status}", status="200") == 2
    assert seen.value("kestrel_http_requests_total", route="/v1/{status}", status="400") == 1
    assert seen.value("kestrel_http_requests_total", route="unmatched", status="404") == 2
    assert seen.value("kestrel_http_request_duration_seconds_count", route="/v1/{status}") == 3


async def test_names_keep_their_colon_whatever_format_prometheus_would_like() -> None:
    wishes = (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2"
    )
    answer = await scrape(ServerMetrics("tiny", idle), wishes)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert set(VLLM_NAMES) <= Page(answer.text).types.keys()


async def test_two_servers_in_a_process_do_not_share_numbers() -> None:
    first, second = ServerMetrics("a", idle), ServerMetrics("b", idle)
    first.started("query")
    assert (await page(first)).value("kestrel_requests_started_total", model_name="a") == 1
    assert (await page(second)).total("kestrel_requests_started_total") == 0


def test_making_metrics_does_not_ask_the_engine() -> None:
    def not_ready() -> EngineSnapshot:
        raise AssertionError("asked before anyone scraped")

    snapshot: Callable[[], EngineSnapshot] = not_ready
    ServerMetrics("tiny", snapshot)
