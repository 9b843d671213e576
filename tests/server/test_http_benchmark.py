"""The load benchmark against the real server: the whole command, the JSON it writes, the page it draws."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tests.exhaustive import sweep
from tests.scene import SCENE
from tests.server.conftest import RunningServer

ROOT = Path(__file__).parents[2]
STAGE = {
    "target_rps",
    "throughput_rps",
    "concurrency_limit",
    "requests_success",
    "requests_total",
    "error_rate",
    "latency",
    "ttft",
    "decode_latency",
    "processing_latency",
    "tokens",
    "overloaded",
    "overload_reasons",
}
PARAMETERS = {
    "stage_duration_s",
    "start_rps",
    "rps_step",
    "max_rps",
    "start_concurrency",
    "concurrency_step",
    "max_concurrency",
    "latency_threshold_ms",
    "ttft_threshold_ms",
    "error_threshold",
    "results",
}


def run_example(*flags: object) -> int:
    path = ROOT / "examples" / "benchmark_http_server.py"
    spec = importlib.util.spec_from_file_location("benchmark_http_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(flag) for flag in flags])


@sweep("stream", [False, True], always=[True])
def test_a_ramp_on_the_real_server(server: RunningServer, tmp_path: Path, stream: bool) -> None:
    output, page = tmp_path / "bs8.json", tmp_path / "bs8.html"
    flags = ["--url", f"{server.url}/v1/query", "--image", SCENE, "--prompt", "Is there a dog?"]
    ramp = ["--stage-duration", 0.3, "--start-concurrency", 1, "--concurrency-step", 2, "--max-concurrency", 3]
    limits = ["--latency-threshold-ms", 60_000, "--ttft-threshold-ms", 60_000, "--error-threshold", 0.0]
    extra = ["--stream"] if stream else []
    assert run_example(*flags, *ramp, *limits, *extra, "--output", output, "--report", page) == 0
    data = json.loads(output.read_text(encoding="utf-8"))
    assert data.keys() >= PARAMETERS
    first, second = data["results"]
    assert first.keys() >= STAGE
    assert (first["concurrency_limit"], second["concurrency_limit"]) == (1, 3)
    for stage in (first, second):
        assert stage["requests_success"] == stage["requests_total"] > 0
        assert 0 < stage["ttft"]["p50"] <= stage["latency"]["p50"] <= stage["latency"]["p95"]
        assert stage["processing_latency"]["p50"] < stage["latency"]["p95"]
        assert stage["tokens"]["input_per_s"] > 700 * stage["throughput_rps"]
        assert stage["overload_reasons"] == []
    assert "Is there a dog?" in page.read_text(encoding="utf-8")


def test_a_ramp_stops_at_its_limit(server: RunningServer, tmp_path: Path) -> None:
    output = tmp_path / "x.json"
    flags = ["--url", f"{server.url}/v1/caption", "--image", SCENE, "--max-new-tokens", 4, "--output", output]
    ramp = ["--stage-duration", 0.3, "--latency-threshold-ms", 0.1]
    assert run_example(*flags, *ramp) == 0
    (stage,) = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert stage["overloaded"]
    assert stage["overload_reasons"][0].startswith("p95 latency ")
