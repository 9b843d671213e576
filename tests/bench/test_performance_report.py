"""PERFORMANCE.md is what its generator makes of the rows, and the generator keeps to them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from kestrel.bench.report import FP8, PICTURE, TARGET, picture, report
from kestrel.bench.results import append_row

ROOT = Path(__file__).parents[2]
MACHINE = {
    "date": "2026-01-02",
    "commit": "abc1234",
    "kestrel": "0.1.0",
    "python": "3.12.3",
    "torch": "2.11.0",
    "cpu": "Some CPU",
    "gpu": "NVIDIA H200",
    "cores": 16,
    "threads": 8,
    "load_before": 0.25,
}


def engine_row(workload: str, mode: str, size: int, tokens: int, rate: float, p50: float, **changes: object) -> dict:
    what = {"model": "random-MD2", "dtype": "bfloat16", "settings": "", "workload": workload, "mode": mode}
    counts = {"max_batch_size": size, "tokens": tokens, "requests": 4, "cached_tokens": 2199, "vision_passes": 1}
    times = {"latency_p95_ms": p50 * 2, "ttft_p50_ms": 1.0, "token_gap_p99_ms": 0.5, "tokens_per_s": rate * tokens}
    return {**MACHINE, **what, **counts, "req_per_s": rate, "latency_p50_ms": p50, **times, **changes}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        engine_row("chart9", "flood", 64, 3, 11.0, 900.0),
        engine_row("chart9", "flood", 64, 3, 62.5, 901.0),
        engine_row("chart9", "closed", 64, 3, 60.0, 1000.0),
        engine_row("chart9", "flood", 1, 30, 20.25, 40.0),
        engine_row("same-image", "flood", 64, 30, 330.0, 5.0),
        engine_row("text", "closed", 64, 30, 500.0, 6.0),
        engine_row("chart9", "closed", 1, 3, 3.5, 321.0, gpu="none", model="kestrel-tiny", dtype="float32"),
    ]
    for row in rows:
        append_row(tmp_path / "engine.csv", row)
    decode = {"model": "random-MD2", "dtype": "bfloat16", "batch_size": 1, "context": 749, "step_ms": 1.1}
    append_row(tmp_path / "decode_scaling.csv", {**MACHINE, **decode, "tokens_per_s": 909.0, "settings": ""})
    of_fp8 = {"step_ms": 0.9, "tokens_per_s": 1111.0, "settings": "quantization=fp8"}
    append_row(tmp_path / "decode_scaling.csv", {**MACHINE, **decode, **of_fp8})
    start = {"model": "random-MD2", "process_s": 4.5, "create_s": 3.0, "first_answer_s": 0.5, "start_s": 8.0}
    append_row(tmp_path / "start.csv", {**MACHINE, **start})
    return tmp_path


def test_the_committed_file_is_what_the_committed_rows_give() -> None:
    assert (ROOT / TARGET).read_text(encoding="utf-8") == report(ROOT / "bench" / "results")
    assert (ROOT / PICTURE).read_text(encoding="utf-8") == picture(ROOT / "bench" / "results")


def test_the_picture_shows_ours_the_peer_and_the_limit(results: Path) -> None:
    append_row(results / "engine.csv", engine_row("chart9", "flood", 4, 3, 60.5, 1.0, settings=FP8))
    found = ElementTree.fromstring(picture(results))
    texts = [element.text for element in found.iter("{http://www.w3.org/2000/svg}text")]
    assert {"62.5", "60.5", "20.2", "50.1", "45.6", "ours, fp8", "limit in bfloat16, counted"} <= set(texts)
    assert "11" not in texts, "an older row of the same case"


def test_streams_stand_among_the_other_workloads(results: Path) -> None:
    append_row(results / "engine.csv", engine_row("chart9", "streams", 16, 30, 41.0, 300.0))
    lines = report(results).splitlines()
    assert "| chart9 | streams | 16 | 30 | 41 | 300 | 600 | 1 | 0.5 | 1230 |" in lines
    assert not [line for line in lines if line.startswith("| 16 |")]


def test_text_models_have_a_table_of_their_own_beside_what_vllm_was_measured_at(results: Path) -> None:
    counts = {"model": "random-L1B", "seconds": 2.0, "input_tokens": 32_000, "output_tokens": 1024, "runs": 3}
    for row in (
        engine_row("ids128", "closed", 1, 256, 2.0, 5.0, **counts),
        engine_row("ids512", "flood", 16, 128, 8.0, 5.0, **counts),
        engine_row("ids2000", "flood", 64, 1, 8.0, 5.0, **counts),
        engine_row("ids128", "closed", 1, 256, 2.0, 5.0, **{**counts, "seconds": 1.0, "runs": 1}),
    ):
        append_row(results / "engine.csv", row)
    text = report(results)
    assert "| 128 | 256 | 4 | 1 | ms per token | 1.953 | 1.41 | 0.72 |" in text
    assert "| 512 | 128 | 4 | 16 | tokens out per s | 1024 | 7280 | 0.14 |" in text
    assert "| 2000 | 1 | 4 | 64 | ids in per s | 16000 | 268109 | 0.06 |" in text


def test_runs_with_adapters_stand_apart_and_older_rows_have_none(results: Path) -> None:
    mixed = engine_row("chart9", "flood", 64, 3, 55.25, 990.0, adapters=8, adapter_rank=16)
    append_row(results / "engine.csv", mixed)
    text = report(results)
    assert "### random-MD2, bfloat16, 8 adapters of rank 16" in text
    own, other = text.split("8 adapters of rank 16")
    assert "62.5" in own
    assert "55.2" in other
    assert "55.2" not in own


def test_the_last_row_of_a_case_stands_beside_the_peer(results: Path) -> None:
    lines = report(results).splitlines()
    heads = ("direct req/s", "direct P50 ms", "CoT req/s", "CoT P50 ms")
    assert f"| max batch size | {' | '.join(f'{head} | peer | ×' for head in heads)} |" in lines
    assert "| 64 | 62.5 | 50.1 | 1.25 | 1000 | 1271 | 1.27 | – | 45.6 | – | – | 1393 | – |" in lines
    assert "| 1 | – | 33.2 | – | – | 38.4 | – | 20.25 | 11.9 | 1.70 | – | 76.4 | – |" in lines
    assert "| flood | 64 | 30 | 330 | 264 | 1.25 | 4 | 1 | 550 |" in lines
    assert "| text | closed | 64 | 30 | 500 | 6 | 12 | 1 | 0.5 | 15000 |" in lines
    assert "| random-MD2 | bfloat16 | – | 1 | 749 | 1.1 | 1.58 | 1.44 | 909 |" in lines
    assert "| random-MD2 | bfloat16 | quantization=fp8 | 1 | 749 | 0.9 | – | – | 1111 |" in lines
    assert "| random-MD2 | 4.5 | 3 | 0.5 | 8 |" in lines


def test_figures_of_the_peer_stand_only_where_they_were_measured(results: Path) -> None:
    gpu, cpu = report(results).split("\n## Some CPU (CPU)\n")
    assert "Peer: Kestrel 0.5.0" in gpu
    assert "peer" not in cpu.lower()
    assert "| 1 | – | 321 | – | – |" in cpu
    assert "### kestrel-tiny, float32" in cpu


def test_every_section_says_what_was_run(results: Path) -> None:
    run = "2026-01-02; commit abc1234; torch 2.11.0; Python 3.12.3; load average 0.25 on 16 cores before each"
    assert report(results).count(f"Measured {run}.") == 4


def test_a_section_of_several_commits_names_each_once(results: Path) -> None:
    name = results / "decode_scaling.csv"
    first = name.read_text(encoding="utf-8").splitlines()[1]
    later = first.replace("2026-01-02", "2026-02-03").replace("abc1234", "def5678").replace(",749,", ",750,")
    assert later != first
    name.write_text(name.read_text(encoding="utf-8") + later + "\n", encoding="utf-8")
    assert "Measured 2026-01-02 to 2026-02-03; commits abc1234, def5678; torch 2.11.0;" in report(results)


def test_without_rows_only_the_introduction_is_left(tmp_path: Path) -> None:
    assert "\n## " not in report(tmp_path)
